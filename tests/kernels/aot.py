"""Compiles the kernels for sm_90 on a machine without a GPU and says what the machine code does.

Run as a program, with TRITON_INTERPRET unset: prints one JSON object. The tools that read the machine code
come with the triton wheel.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from hiradix.triton_kernels import page_copy
from hiradix.triton_kernels.page_copy import page_copy_kernel
from hiradix.triton_kernels.page_quant import page_dequantise_kernel, page_quantise_kernel, pick_quant_tile
from hiradix.triton_kernels.sides import pick_tile

TARGET = GPUTarget("cuda", 90, 32)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Case:
    name: str
    kernel: Any
    constants: Mapping[str, int]
    num_warps: int


@dataclass(frozen=True)
class Report:
    """registers per thread; local: accesses to spilled registers; loads, stores: counts by width in bytes.
    flushing: instructions that take subnormal numbers for 0."""

    name: str
    registers: int
    local: int
    shared_bytes: int
    async_loads: int
    loads: dict[int, int]
    stores: dict[int, int]
    flushing: int


def copy_case(name: str, rows: int, row_bytes: int) -> Case:
    """The kernel as `launch` would run it for pages of so many rows."""
    tile = pick_tile(rows * row_bytes // 16, interpreted=False)
    constants = {"ROWS": rows, "VPR": row_bytes // 16, "BLOCK": tile.block, "STAGES": tile.stages}
    return Case(name, page_copy_kernel, constants, tile.num_warps)


def quant_case(name: str, kernel: Any, rows: int, dim: int) -> Case:
    """Likewise for a head's pages of `rows` tokens."""
    tile = pick_quant_tile(rows, dim)
    constants = {"ROWS": rows, "DIM": dim, "ROWS_TILE": tile.rows, "DIM_TILE": tile.dim}
    return Case(name, kernel, constants, tile.num_warps)


CASES = [
    copy_case("8B, page 64, layer_first", 1, 64 * 2048),
    copy_case("8B, page 16, page_first", 16, 2048),
    copy_case("8B TP8, page 64, page_first", 64, 256),
    copy_case("MLA, page 64, page_first", 64, 1152),
    copy_case("8B, page 16, page_head", 16, 256),
    copy_case("8B, page 1", 1, 2048),
    copy_case("SmolLM2 fp32, page 64, page_first", 64, 768),
    copy_case("MLA, page 16, page_first", 16, 1152),
    copy_case("SmolLM2 fp32, page 16, page_first", 16, 768),
    copy_case("one head of 24, page 4, page_first", 4, 48),
    copy_case("MLA fp8 with scales, page 64, page_first", 64, 656),
    copy_case("DSA indexer, page 64", 1, 64 * 132),
    copy_case("recurrent state, 32 x 64 x 128", 1, 32 * 64 * 128 * 4),
    copy_case("fp8, page 64, scales per token, 8 heads", 1, 64 * 8 * 4),
    *(quant_case(f"quantise, page {rows}", page_quantise_kernel, rows, 128) for rows in (64, 16, 1)),
    *(quant_case(f"dequantise, page {rows}", page_dequantise_kernel, rows, 128) for rows in (64, 16, 1)),
    quant_case("quantise, page 64, 512 wide", page_quantise_kernel, 64, 512),
    quant_case("dequantise, page 64, 512 wide", page_dequantise_kernel, 64, 512),
]


def compiled(case: Case) -> Any:
    """The kernel for sm_90, with the alignment that the JIT would add to the tables' addresses."""
    names = case.kernel.arg_names
    signature = {name: _type(name, case.constants) for name in names}
    constants = {(names.index(name),): value for name, value in case.constants.items()}
    tables = [(names.index(name),) for name in names if name.endswith("_tab")]
    source = ASTSource(
        fn=case.kernel,
        signature=signature,
        constexprs=constants,
        attrs={table: [["tt.divisibility", 16]] for table in tables},
    )
    return triton.compile(source, target=TARGET, options={"num_warps": case.num_warps})


def _type(name: str, constants: Mapping[str, int]) -> str:
    if name in constants:
        return "constexpr"
    if name.endswith(("_tab", "_idx")) and name != "num_idx":
        return "*i64"
    return "i32" if name in ("first_plane", "num_planes", "num_idx") else "i64"


def report(case: Case) -> Report:
    """What the machine code of `case` does."""
    kernel = compiled(case)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        code = _output(TOOLS / "nvdisasm", "-c", file.name)
        usage = _output(TOOLS / "cuobjdump", "-res-usage", file.name)
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, usage
    return Report(
        case.name,
        int(registers[1]),
        len(re.findall(r"\b(?:LDL|STL)\b", code)),
        kernel.metadata.shared,
        len(re.findall(r"\bLDGSTS[^;\n]*\.128", code)),
        widths(r"\bLDG\.[A-Z0-9_.]*", code),
        widths(r"\bSTG\.[A-Z0-9_.]*", code),
        len(re.findall(r"\.ftz\b", kernel.asm["ptx"])),  # the machine code's own are in integer division
    )


def widths(pattern: str, code: str) -> dict[int, int]:
    """How many instructions access how many bytes at once."""
    return dict(Counter(_width(found) for found in re.findall(pattern, code)))


def _width(instruction: str) -> int:
    for mark, num_bytes in ((".128", 16), (".64", 8), ("16", 2), ("U8", 1), ("S8", 1)):
        if mark in instruction:
            return num_bytes
    return 4


def _output(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def variants() -> dict[str, str]:
    """What the JIT tells apart for ordinary calls of the copy kernel: equal strings share one variant."""
    kernel = page_copy_kernel
    binder = create_function_from_signature(kernel.signature, kernel.params, make_backend(TARGET))
    ids = torch.zeros(64, dtype=torch.int64)
    names = page_copy_kernel.arg_names
    usual = dict.fromkeys(names, ids) | dict(
        first_plane=0, num_planes=64, num_idx=7, dst_row=2048, src_row=2048
    )
    usual |= dict(dst_page=32768, src_page=32768, ROWS=16, VPR=128, BLOCK=2048, STAGES=3)
    changes: dict[str, dict[str, Any]] = {
        "usual": {},
        "one page": {"num_idx": 1},
        "16 pages": {"num_idx": 16},
        "one plane": {"num_planes": 1},
        "second plane": {"first_plane": 1},
        "another plane": {"first_plane": 5},
        "pages far apart": {"src_page": 1 << 33},
        "odd row": {"dst_row": 1000},
        "ids at 8 bytes": {"src_idx": ids[1:]},
        "int32 ids": {"src_idx": ids.to(torch.int32), "dst_idx": ids.to(torch.int32)},
    }
    return {name: str(binder(*(usual | change).values())[1]) for name, change in changes.items()}


def without_hint(folder: str) -> Case:
    """The first case with the pointers' alignment hint taken out of the kernel: the check must see it."""
    source = Path(page_copy.__file__).read_text()
    weaker = re.sub(r"tl\.multiple_of\((.*), 16\)\n", r"\1\n", source)
    assert weaker.count("tl.multiple_of") == source.count("tl.multiple_of") - 2
    path = Path(folder, "weaker.py")
    path.write_text(weaker)
    spec = importlib.util.spec_from_file_location("weaker", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["weaker"] = module
    spec.loader.exec_module(module)
    return replace(CASES[0], name="without the hint", kernel=module.page_copy_kernel)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        reports = [asdict(report(case)) for case in (*CASES, without_hint(folder))]
    print(json.dumps({"triton": triton.__version__, "reports": reports, "variants": variants()}))


if __name__ == "__main__":
    main()
