"""What do builds of one model differ by, and what do other models? For the tolerances of memory/compare.py.

    make bench-canary
    python benchmarks/bench_canary.py [--quick] [--dtypes float32,bfloat16,...] [--out FILE]

Each row is the largest difference of two pages of SmolLM2-135M (tokens 0 to 63 and 128 to 191), as a share of
what `PageComparer` allows. Builds must be below 1, other models above: how far on either side is the margin.

| case | what is compared with the model in that type |
|---|---|
| build: ... | the same weights by other kernels, chunks, batches, threads, without oneDNN, in float32 |
| other: ... | weights quantised and restored, a LoRA of that relative size merged in, other ropes, epsilons |

`fp8 cache`: a bfloat16 model's KV kept as float8. `lossy storage`: its pages coded by storage (quantise=fp8).
Writes build/bench/canary.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from common import Report, Row

from hiradix.apps.engine.smollm2 import smollm2_path
from hiradix.memory import KVShape
from hiradix.memory.compare import PageComparer
from hiradix.storage.wrappers.quantise import rounded

PAGE = 64
NUM_TOKENS = 192
DTYPES = ("float32", "float16", "bfloat16")
Cache = list[tuple[torch.Tensor, torch.Tensor]]  # per layer K and V [H, T, D]
Change = Callable[[Any], None]


class Models:
    """SmolLM2 in one type, as it is and changed."""

    def __init__(self, dtype: torch.dtype, num_layers: int | None = None) -> None:
        self.path, self.dtype = str(smollm2_path()), dtype
        self.layers = {} if num_layers is None else {"num_hidden_layers": num_layers}
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, 49000, (1, NUM_TOKENS), generator=generator)
        self.beside = torch.randint(0, 49000, (2, NUM_TOKENS), generator=generator)

    def load(self, change: Change | None = None, attention: str = "sdpa", **config: Any) -> Any:
        import transformers

        own = transformers.AutoConfig.from_pretrained(self.path, local_files_only=True)
        for name, value in (config | self.layers).items():
            whole = {**getattr(own, name), **value} if isinstance(value, dict) else value
            setattr(own, name, whole)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            self.path, config=own, dtype=self.dtype, attn_implementation=attention, local_files_only=True
        )
        if change is not None:
            with torch.no_grad():
                change(model)
        return model.eval()

    @torch.inference_mode()
    def cache(self, model: Any, chunk: int = NUM_TOKENS, is_batch: bool = False) -> Cache:
        from transformers import DynamicCache

        cache, ids = DynamicCache(), torch.cat([self.ids, self.beside]) if is_batch else self.ids
        for at in range(0, NUM_TOKENS, chunk):
            model(ids[:, at : at + chunk], past_key_values=cache, use_cache=True)
        return [
            (layer.keys[0].to(self.dtype).clone(), layer.values[0].to(self.dtype).clone())
            for layer in cache.layers
        ]


def quantised(bits: int) -> Change:
    def change(model: Any) -> None:
        for _, values in matrices(model):
            step = values.float().abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
            values.copy_((values.float() / step).round() * step)

    return change


def as_fp8(model: Any) -> None:
    for _, values in matrices(model):
        scale = values.float().abs().amax(1, keepdim=True) / 448
        values.copy_((values.float() / scale).to(torch.float8_e4m3fn).float() * scale)


def with_lora(size: float, layers: Sequence[int] | None = None) -> Change:
    """Updates of rank 8 to queries and values, of that size relative to the weights."""

    def change(model: Any) -> None:
        generator = torch.Generator().manual_seed(3)
        for name, values in matrices(model):
            if "q_proj" in name or "v_proj" in name:
                update = torch.randn(len(values), 8, generator=generator) @ torch.randn(
                    8, values.shape[1], generator=generator
                )
                if layers is None or int(name.split(".")[2]) in layers:
                    values.copy_(values.float() + update / update.norm() * values.float().norm() * size)

    return change


def matrices(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, values in model.named_parameters():
        if values.dim() == 2 and "embed" not in name:
            yield name, values


def builds(models: Models, is_quick: bool) -> Iterator[tuple[str, Cache]]:
    yield "eager attention", models.cache(models.load(attention="eager"))
    model = models.load()
    for chunk in (48,) if is_quick else (48, 1):
        yield f"chunks of {chunk}", models.cache(model, chunk)
    yield "in a batch", models.cache(model, is_batch=True)
    if is_quick:
        return
    torch.set_num_threads(2)
    yield "two threads", models.cache(model)
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False
    yield "without oneDNN", models.cache(model)
    torch.backends.mkldnn.enabled = True
    if models.dtype is not torch.float32:
        yield "computed in float32", models.cache(model.float())


OTHERS: dict[str, dict[str, Any]] = {
    "weights as int8": {"change": quantised(8)},
    "weights as int4": {"change": quantised(4)},
    "weights as fp8": {"change": as_fp8},
    "LoRA of 10%": {"change": with_lora(0.1)},
    "LoRA of 3%": {"change": with_lora(0.03)},
    "LoRA of 1%": {"change": with_lora(0.01)},
    "LoRA of 3%, last 4 layers": {"change": with_lora(0.03, range(26, 30))},
    "rope base x2": {"rope_parameters": {"rope_theta": 200000.0}},
    "rope base +1%": {"rope_parameters": {"rope_theta": 101000.0}},
    "rope scaled by 2": {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    "epsilon 1e-4 for 1e-5": {"rms_norm_eps": 1e-4},
    "epsilon 1e-6 for 1e-5": {"rms_norm_eps": 1e-6},
}
QUICK_LAYERS = 4
QUICK = ("weights as int8", "rope base x2")


def page(cache: Cache, first: int, dtype: torch.dtype) -> list[memoryview]:
    """Tokens from `first` on, as a page_first_direct host pool of `dtype` has them."""
    arrays = [
        torch.stack([layer[at][:, first : first + PAGE].transpose(0, 1) for layer in cache]) for at in (0, 1)
    ]
    return [
        memoryview(bytes(array.to(dtype).contiguous().view(torch.uint8).numpy().data)) for array in arrays
    ]


def share(one: Cache, other: Cache, dtype: torch.dtype, is_rounded: bool = False) -> float:
    """The largest difference of the two pages as a share of what it may be."""
    heads, _, dim = one[0][0].shape
    compare = PageComparer(KVShape(len(one), heads, dim, dim, dtype), "page_first_direct", PAGE)
    worst = 0.0
    for first in (0, NUM_TOKENS - PAGE):
        pages = [page(cache, first, dtype) for cache in (one, other)]
        if is_rounded:
            elements = str(dtype).removeprefix("torch.")
            pages = [[rounded(bytes(view), elements) for view in own] for own in pages]
        worst = max(worst, compare(*pages, is_rounded).share)
    return worst


def measure(dtype: str, is_quick: bool) -> list[Row]:
    models, rows = Models(getattr(torch, dtype), QUICK_LAYERS if is_quick else None), []
    base = models.cache(models.load())

    def add(case: str, cache: Cache) -> None:
        rows.append(Row(f"{dtype}: {case}", "difference", "of what may be", share(cache, base, models.dtype)))
        if dtype == "bfloat16":
            fp8 = share(cache, base, torch.float8_e4m3fn)
            rows.append(Row(f"fp8 cache: {case}", "difference", "of what may be", fp8))
            lossy = share(cache, base, models.dtype, is_rounded=True)
            rows.append(Row(f"lossy storage: {case}", "difference", "of what may be", lossy))

    for name, cache in builds(models, is_quick):
        add(f"build: {name}", cache)
    for name, how in OTHERS.items():
        if not is_quick or name in QUICK:
            add(f"other: {name}", models.cache(models.load(**how)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few models of four layers, bfloat16 alone")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--out", type=Path, default=Path("build/bench/canary.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    with Report(args.out, (), ours="share") as report:
        for dtype in ("bfloat16",) if args.quick else args.dtypes.split(","):
            report.add(measure(dtype, args.quick))


if __name__ == "__main__":
    main()
