"""How fast do pages move between the pools, and how near is that to what the machine can do at all?

    python benchmarks/copy_bandwidth.py [--device cuda] [--quick] [--out FILE]

Prints the ceilings (one pinned copy of 1 GiB each way and both ways at once), then every transport per page
size, layout and model shape as GB/s and as a share of the ceiling; then how much matrix products slow down
beside the copies, and how much of a load back a forward pass hides. Every transport's copy is compared byte
for byte with the torch transport's before it is timed. Without a GPU it says so and runs the rows a CPU has:
the ceiling is one contiguous copy on one thread. A transport that fails is a line that says so, and in the
file, which is written anew after every case; the others go on, and the exit code is 1. Writes
build/bench/copy-bandwidth.json: `rows` are auto beside the others, `copies` and the rest the raw numbers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import common
import copy_overlap
import numpy as np
import torch

from hiradix.memory import (
    CacheShape,
    DevicePool,
    HostPool,
    KVShape,
    MLAShape,
    SparseMLAShape,
    TorchTransport,
    Transport,
    make_transport,
    page_bytes,
)
from hiradix.memory.copy_plan import plan_copies
from hiradix.memory.dma_transport import DmaTransport, cuda_pieces, memmove_pieces
from hiradix.memory.packing_transport import PackingTransport
from hiradix.memory.sgl_transport import SglKernelTransport, find_kernels

SHAPES: dict[str, CacheShape] = {
    "MHA-8B": KVShape(32, 8, 128, 128, torch.bfloat16),
    "MHA-70B-TP8": KVShape(80, 1, 128, 128, torch.bfloat16),
    "MLA": MLAShape(61, 512, 64, torch.bfloat16),
    "DSA": SparseMLAShape(61, 512, 64, torch.bfloat16),
    "SmolLM2-fp32": KVShape(30, 3, 64, 64, torch.float32),
}
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_blob")
PAGE_SIZES = (64, 16, 1)
PROGRAMS = (2, 4, 8, 16, 32)
STAGES = (1, 3)
NOISE_BYTES = 16_000_057  # a prime
PARTS = "sweep: the transports alone; beside: the slow-downs and the overlap alone"
SLOW_S = 0.5  # a copy that takes longer is timed once


@dataclass(frozen=True)
class Row:
    """One line of the table. share: of the ceiling in its direction; piece: contiguous bytes per copy."""

    direction: str
    transport: str
    shape: str
    layout: str
    page_size: int
    piece: int
    gb_per_s: float
    share: float


class Clock:
    """Median seconds of a call, until the copy has ended, with the host's part in it."""

    def __init__(self, cuda: bool, repeats: int) -> None:
        self._cuda = cuda
        self._repeats = repeats

    def seconds(self, call: Callable[[], None]) -> float:
        first = self.once(call)
        repeats = 1 if first > SLOW_S else self._repeats
        return statistics.median(self.once(call) for _ in range(repeats))

    def once(self, call: Callable[[], None]) -> float:
        begin = time.perf_counter()
        call()
        if self._cuda:
            torch.cuda.current_stream().synchronize()
        return time.perf_counter() - begin


@dataclass(frozen=True)
class Fault:
    """A transport that raised, or copied other bytes than torch, and what was said."""

    transport: str
    shape: str
    layout: str
    page_size: int
    error: str


@dataclass(frozen=True)
class Case:
    """Two pools and a shuffled list of pages of each. before: the host's bytes, 0 but for those pages."""

    shape_name: str
    device: DevicePool
    host: HostPool
    device_pages: np.ndarray
    host_pages: np.ndarray
    before: torch.Tensor

    def copy(self, transport: Transport, to_device: bool, layers: range | None = None) -> None:
        if to_device:
            transport.copy_pages(self.host, self.device, self.host_pages, self.device_pages, layers)
        else:
            transport.copy_pages(self.device, self.host, self.device_pages, self.host_pages, layers)

    @property
    def num_bytes(self) -> int:
        return len(self.host_pages) * self.host.page_bytes


def make_case(shape_name: str, layout: str, page_size: int, args: argparse.Namespace) -> Case:
    """Pools of twice the pages that are copied, so that lists have holes."""
    shape = SHAPES[shape_name]
    num_pages = max(2, int(args.megabytes * 1e6) // page_bytes(shape, page_size))
    device = DevicePool(shape, 2 * num_pages, page_size, args.device)
    host = HostPool(shape, 2 * num_pages, page_size, layout=layout, device=args.device)
    random = np.random.default_rng(0)
    noise = torch.from_numpy(random.integers(0, 256, NOISE_BYTES, np.uint8))  # repeats, but never on a page
    for begin in range(0, len(host.buffer), NOISE_BYTES):
        part = host.buffer[begin : begin + NOISE_BYTES]
        part.copy_(noise[: len(part)])
    device_pages = random.permutation(2 * num_pages)[:num_pages] + 1
    listed, others = np.split(random.permutation(2 * num_pages), [num_pages])
    for page in others.tolist():
        for view in host.page_views(page):
            view[:] = bytes(len(view))
    return Case(shape_name, device, host, device_pages, listed, host.buffer.clone())


def check(case: Case, transport: Transport, reference: torch.Tensor) -> None:
    """Load, wipe and write back with `transport`; the host must be what it was. reference: torch's load."""
    case.host.buffer.copy_(case.before)  # one that was tried and measured has written to both pools
    seen = contents(case, transport)
    case.host.buffer.zero_()
    case.copy(transport, to_device=False)
    settle(case)
    is_whole = torch.equal(case.host.buffer, case.before)
    case.host.buffer.copy_(case.before)
    assert is_whole, f"{transport.name} changed bytes"
    assert torch.equal(reference, seen), f"{transport.name} and torch load different bytes"


def settle(case: Case) -> None:
    """Wait for copies under way, before the host touches what they read or write."""
    if case.device.device.type == "cuda":
        torch.cuda.synchronize()


def contents(case: Case, transport: Transport) -> torch.Tensor:
    """The first layer's keys after a load by `transport` into a wiped device pool."""
    for layers in case.device.layer_views(0):
        layers.zero_()
    case.copy(transport, to_device=True)
    settle(case)
    return case.device.layer_views(0)[0].cpu().view(torch.uint8)


class Named:
    """A transport under another name."""

    note = ""

    def __init__(self, name: str, transport: Transport) -> None:
        self.name = name
        self.copy_pages = transport.copy_pages


def transports(case: Case, args: argparse.Namespace) -> Iterator[Transport]:
    """What there is to compare, each made when its turn comes."""
    yield TorchTransport()
    if not args.cuda:
        packing = PackingTransport(TorchTransport(), memmove_pieces)
        yield from (DmaTransport(memmove_pieces), Named("pack", packing))
        yield Named("auto", make_transport("auto", args.device, (case.device, case.host)))
        return
    from hiradix.memory.triton_transport import TritonTransport

    pieces = cuda_pieces()
    if pieces is not None:
        yield Named("dma" if pieces.batched else "dma, one by one", DmaTransport(pieces))
        yield PackingTransport(TritonTransport(), pieces)
    for stages in STAGES:
        for count in PROGRAMS:
            yield Named(f"triton x{count} s{stages}", TritonTransport("", count, stages))
    kernels = find_kernels()
    if kernels is not None:
        yield SglKernelTransport(kernels, TorchTransport())
    yield Named("auto", make_transport("auto", args.device, (case.device, case.host)))


def ceilings(args: argparse.Namespace, clock: Clock) -> dict[str, float]:
    """GB/s of one contiguous copy of 1 GiB (CPU: of the case's size) to the device, to the host, and both."""
    num_bytes = 1 << 30 if args.cuda else int(args.megabytes * 1e6)
    host, host_out = (torch.ones(num_bytes, dtype=torch.uint8, pin_memory=args.cuda) for _ in range(2))
    device, device_in = (torch.ones(num_bytes, dtype=torch.uint8, device=args.device) for _ in range(2))

    def loads() -> None:
        device_in.copy_(host, non_blocking=True)

    def writes() -> None:
        host_out.copy_(device, non_blocking=True)

    found = {
        "to device": num_bytes / clock.seconds(loads) / 1e9,
        "to host": num_bytes / clock.seconds(writes) / 1e9,
    }
    if args.cuda:
        found["both ways"] = 2 * num_bytes / clock.seconds(lambda: both(loads, writes)) / 1e9
    return found


def both(loads: Callable[[], None], writes: Callable[[], None]) -> None:
    """Both copies at once, each on a stream of its own."""
    current, streams = torch.cuda.current_stream(), [torch.cuda.Stream() for _ in range(2)]
    for stream, copy in zip(streams, (loads, writes), strict=True):
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            copy()
    for stream in streams:  # not sooner: the second copy would wait for the first
        current.wait_stream(stream)


def measure(
    case: Case, args: argparse.Namespace, clock: Clock, ceiling: dict[str, float]
) -> Iterator[Row | Fault]:
    """A row per transport and direction; raises only where the device is of no more use."""
    reference = contents(case, TorchTransport())
    where = (case.shape_name, case.host.layout.name, case.host.page_size)
    for transport in transports(case, args):
        if time.monotonic() > args.deadline:
            return
        try:
            check(case, transport, reference)
            yield from timed(case, transport, clock, ceiling)
        except Exception as error:
            yield Fault(transport.name, *where, f"{type(error).__name__}: {str(error):.300}")
            settle(case)


def timed(case: Case, transport: Transport, clock: Clock, ceiling: dict[str, float]) -> Iterator[Row]:
    plan = plan_copies(case.host, case.device)[0].collapsed()
    for direction in ("to host", "to device"):
        to_device = direction == "to device"
        speed = case.num_bytes / clock.seconds(partial(case.copy, transport, to_device)) / 1e9
        yield Row(
            direction, transport.name, case.shape_name, case.host.layout.name, case.host.page_size,
            plan.src.row_bytes, speed, speed / ceiling[direction],
        )  # fmt: skip


def machine(device: str) -> dict[str, object]:
    """What the numbers were measured on."""
    versions = {}
    for package in ("torch", "triton", "numpy", "sgl-kernel"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    about = common.machine() | {"versions": versions, "device": "CPU"}
    if device.startswith("cuda"):
        about["device"] = torch.cuda.get_device_name(device)
        about["cuda"] = torch.version.cuda
    return about


def best(rows: list[Row]) -> Iterator[str]:
    """The goals on a GPU: `auto` beside the ceiling, and the kernel beside the copy engines."""
    for page_size, goal in ((64, 0.90), (16, 0.85)):
        found = [row for row in rows if row.transport == "auto" and row.page_size == page_size]
        if found:
            least = min(found, key=lambda row: row.share)
            where = f"{least.direction}, {least.shape}, {least.layout}"
            yield f"auto at {page_size}-token pages: at least {least.share:.0%} ({where}); goal {goal:.0%}"
    speeds: dict[tuple[object, ...], dict[str, float]] = {}
    for row in rows:
        if row.direction == "to device" and row.piece <= 16 << 10:
            kind = row.transport.split(" ")[0]
            own = speeds.setdefault((row.shape, row.layout, row.page_size), {})
            own[kind] = max(own.get(kind, 0.0), row.gb_per_s)
    ratios = [own["triton"] / own["dma"] for own in speeds.values() if {"triton", "dma"} <= own.keys()]
    if ratios:
        yield f"kernel over copy engines, pieces of 16 KiB or less: {min(ratios):.1f}x at least; goal 3x"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--megabytes", type=float, help="bytes per copy; 256 on CUDA, 64 on a CPU")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shape", action="append", choices=list(SHAPES))
    parser.add_argument("--layout", action="append", choices=LAYOUTS)
    parser.add_argument("--page-size", action="append", type=int, choices=PAGE_SIZES)
    parser.add_argument("--budget-s", type=float, default=480.0, help="no new row is begun after so long")
    parser.add_argument("--part", choices=("all", "sweep", "beside"), default="all", help=PARTS)
    parser.add_argument("--quick", action="store_true", help="one small shape, one repeat")
    parser.add_argument("--out", type=Path, default=Path("build/bench/copy-bandwidth.json"))
    args = parser.parse_args()
    if args.quick:
        args.shape, args.layout, args.page_size = ["SmolLM2-fp32"], ["page_first"], [64]
        args.megabytes, args.repeats = 8, 1
    args.cuda = args.device.startswith("cuda")
    common.need_device(parser, args.device)
    args.megabytes = args.megabytes or (256 if args.cuda else 64)
    args.deadline = time.monotonic() + args.budget_s
    return args


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    if args.cuda:
        torch.cuda.set_device(torch.device(args.device).index or 0)
    with torch.cuda.stream(torch.cuda.Stream()) if args.cuda else torch.no_grad():
        faults = run(args, Clock(args.cuda, args.repeats))
    sys.exit(bool(faults))


def run(args: argparse.Namespace, clock: Clock) -> list[dict[str, Any]]:
    """Measure everything asked for, a printed line each, and keep the raw numbers; what failed."""
    about, ceiling = machine(args.device), ceilings(args, clock)
    print(*(f"{key} {value}" for key, value in about.items()), sep=", ")
    if not args.cuda:
        print("no GPU here: torch, memmove in place of the copy engines, and packing; nothing about a bus")
    print("ceiling:", ", ".join(f"{name} {speed:.1f} GB/s" for name, speed in ceiling.items()), flush=True)
    found: dict[str, Any] = {"machine": about, "ceiling": ceiling, "rows": [], "copies": [], "faults": []}
    if args.part != "beside":
        rows = sweep(args, clock, found)
        if args.cuda:
            print(*best(rows), sep="\n", flush=True)
    if args.part != "sweep":
        copy_overlap.report(args, clock.once, found)
        found["rows"] += [asdict(line) for line in beside_computing(found)]
        save(args, found)
    lines = [common.Row(**row) for row in found["rows"]]
    peers = dict.fromkeys(name for line in lines for name in line.peers)
    print("\n" + common.table(lines, list(peers)).replace("hiradix", "  auto ", 1), flush=True)
    return list(found["faults"])


def sweep(args: argparse.Namespace, clock: Clock, found: dict[str, Any]) -> list[Row]:
    """Every case's transports, into `found` and the file as they come."""
    head = ("direction", "transport", "shape", "layout", "page", "piece", "GB/s", "share")
    print("{:10} {:14} {:13} {:18} {:>4} {:>8} {:>6} {}".format(*head))
    rows: list[Row] = []
    for case in cases(args):
        for row in measure(case, args, clock, ceiling=found["ceiling"]):
            if isinstance(row, Fault):
                found["faults"].append(asdict(row))
                print(f"FAILED     {row.transport:14} {row.shape:13} {row.layout:18} {row.error}", flush=True)
                continue
            rows.append(row)
            found["copies"].append(asdict(row))
            print(
                f"{row.direction:10} {row.transport:14} {row.shape:13} {row.layout:18} "
                f"{row.page_size:4} {row.piece:8} {row.gb_per_s:6.2f} {row.share:4.0%}",
                flush=True,
            )
        found["rows"] = [asdict(line) for line in beside(rows, found["ceiling"])]
        save(args, found)
    return rows


def beside(rows: list[Row], ceiling: dict[str, float]) -> Iterator[common.Row]:
    """Per copy what `auto` does beside each other transport and the ceiling, in GB/s."""
    speeds: dict[tuple[str, ...], dict[str, float]] = {}
    for row in rows:
        key = (row.direction, f"{row.shape} {row.layout} page {row.page_size} {row.direction}")
        speeds.setdefault(key, {})[row.transport] = row.gb_per_s
    for (direction, case), own in speeds.items():
        if "auto" in own:
            yield common.Row(case, "rate", "GB/s", own.pop("auto"), {**own, "ceiling": ceiling[direction]})


def beside_computing(found: dict[str, Any]) -> Iterator[common.Row]:
    """The slow-downs, and the shares of loads that forward passes hid."""
    for own in found["interference"]:
        case = f"products beside copies {own['direction']}, {own['transport']}"
        yield common.Row(case, "slow-down", "x", own["ratio"], {"low": own["low"], "high": own["high"]})
    for own in found["overlap"]:
        case = f"load under a forward pass of {own['num_tokens']} tokens, {own['transport']}"
        alone = {"compute alone": own["compute_s"] * 1e3, "load alone": own["load_s"] * 1e3}
        yield common.Row(case, "together", "ms", own["together_s"] * 1e3, alone)


def save(args: argparse.Namespace, found: dict[str, Any]) -> None:
    common.write_raw(args.out, found)


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """The cases asked for, the large pages first; none begins after the deadline."""
    for page_size in args.page_size or PAGE_SIZES:
        for shape_name in args.shape or SHAPES:
            if page_size != getattr(SHAPES[shape_name], "page_size", page_size):
                continue
            for layout in args.layout or LAYOUTS:
                if time.monotonic() < args.deadline:
                    yield make_case(shape_name, layout, page_size, args)


if __name__ == "__main__":
    main()
