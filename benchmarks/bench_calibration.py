"""Does `--hicache-io-backend auto` find the faster transport, how soon, and does it find the same one again?

    python benchmarks/bench_calibration.py [--device cuda] [--quick] [--out FILE]

Calibrates several times between the same two pools, then copies sizes that were not measured with every
candidate and with auto: what auto costs over the best of them, at the median and at worst. The goal is 3 %.
Without a GPU the candidates are torch and memmove, which shows the method and nothing about a bus.
Writes build/bench/calibration.json; `copies` in it are the raw numbers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Report, need_device
from common import Row as Line
from copy_bandwidth import LAYOUTS, SHAPES, Clock, machine

from hiradix.memory import DevicePool, HostPool, TorchTransport, make_transport, page_bytes
from hiradix.memory.calibrate import CalibratedTransport
from hiradix.memory.dma_transport import DmaTransport, memmove_pieces
from hiradix.memory.prove import own_stream

SIZES = (1, 3, 6, 11, 24, 48, 100, 180)  # pages; most lie between those that are measured


@dataclass(frozen=True)
class Regret:
    """Seconds of each candidate and of auto for a copy of so many pages; over: auto's over the least, less 1.
    picks: the candidate that each calibration would take."""

    case: str
    direction: str
    pages: int
    seconds: dict[str, float]
    auto_s: float
    over: float
    picks: list[str]


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    found, times = list[Regret](), dict[str, list[float]]()
    with Report(args.out, ("best", "torch", "dma", "pack", "triton"), ours="auto") as report:
        report.about = machine(args.device)
        report.raw = {"calibration_s": times, "copies": []}
        for name in args.shape:
            for layout in args.layout:
                case = f"{name} {layout} page {args.page_size}"
                pools = make_pools(name, layout, args)
                made, times[case] = calibrations(pools, args)
                own = list(regrets(case, pools, made, args))
                found += own
                told(case, times[case], own)
                report.raw["copies"] = [asdict(row) for row in found]
                report.add(rows_of(case, times[case], own))


def rows_of(case: str, calibration_s: list[float], found: list[Regret]) -> Iterator[Line]:
    """Of one case: what a calibration takes, each copy beside the candidates, what auto costs over them."""
    yield Line(case, "calibration", "ms", float(np.median(calibration_s)) * 1e3)
    for row in found:
        times = {name: seconds * 1e6 for name, seconds in row.seconds.items()}
        copy = f"{case}, {row.direction} {row.pages} pages"
        yield Line(copy, "copy", "us", row.auto_s * 1e6, {"best": min(times.values()), **times})
    if found:
        over = [row.over for row in found]
        yield Line(case, "auto over the best, median", "share", float(np.median(over)))
        yield Line(case, "auto over the best, worst", "share", max(over))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=["MHA-8B", "MHA-70B-TP8", "MLA"])
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=["layer_first", "page_first"])
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--megabytes", type=float, default=512, help="of each pool")
    parser.add_argument("--calibrations", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="one small shape and layout, one repeat")
    parser.add_argument("--out", type=Path, default=Path("build/bench/calibration.json"))
    args = parser.parse_args()
    if args.quick:
        args.shape, args.layout, args.megabytes = ["SmolLM2-fp32"], ["page_first"], 8
        args.calibrations, args.repeats = 2, 1
    need_device(parser, args.device)
    return args


Pools = tuple[DevicePool, HostPool]


def make_pools(name: str, layout: str, args: argparse.Namespace) -> Pools:
    shape = SHAPES[name]
    num_pages = max(2, int(args.megabytes * 1e6) // page_bytes(shape, args.page_size))
    device = DevicePool(shape, num_pages, args.page_size, args.device)
    return device, HostPool(shape, num_pages, args.page_size, layout=layout, device=args.device)


def calibrations(pools: Pools, args: argparse.Namespace) -> tuple[list[CalibratedTransport], list[float]]:
    """Several of the same pools, and the seconds of each; the first compiles kernels."""
    made, seconds = [], []
    for _ in range(args.calibrations):
        begin = time.perf_counter()
        if args.device.startswith("cuda"):
            transport = make_transport("auto", pools[0].device, pools)
        else:
            candidates = [DmaTransport(memmove_pieces), TorchTransport()]
            transport = CalibratedTransport(candidates, TorchTransport())
            transport.calibrate(*pools)
        seconds.append(time.perf_counter() - begin)
        if isinstance(transport, CalibratedTransport):
            made.append(transport)
        else:
            print(f"nothing to calibrate: {transport.name}, {transport.note}", flush=True)
    return made, seconds


def regrets(
    case: str, pools: Pools, made: list[CalibratedTransport], args: argparse.Namespace
) -> Iterator[Regret]:
    """Both directions, sizes that fit, in turns so that what disturbs one disturbs the others."""
    device, host = pools
    clock, random = Clock(args.device.startswith("cuda"), 1), np.random.default_rng(0)
    ways = (("to host", device, host, None), ("to device", host, device, range(1)))
    for direction, src, dst, layers in ways if made else ():
        for count in (size for size in SIZES if size < min(src.page_limit, dst.page_limit)):
            pages = [np.sort(random.permutation(pool.page_limit - 1)[:count] + 1) for pool in (src, dst)]
            each = {"auto": made[0], **{own.name: own for own in made[0].candidates}}
            times: dict[str, list[float]] = {name: [] for name in each}
            with own_stream(device.device):
                for _ in range(args.repeats):
                    for name, own in each.items():
                        times[name].append(clock.once(partial(own.copy_pages, src, dst, *pages, layers)))
            medians = {name: float(np.median(own)) for name, own in times.items()}
            auto_s = medians.pop("auto")
            picks = [pick(own, (src, dst), count, layers) for own in made]
            yield Regret(case, direction, count, medians, auto_s, auto_s / min(medians.values()) - 1, picks)


def pick(made: CalibratedTransport, pools: tuple[Any, Any], count: int, layers: range | None) -> str:
    """Which candidate a calibration takes for a copy."""
    num_layers = pools[0].shape.num_layers if layers is None else len(layers)
    return made.chosen(*pools, count, num_layers).name


def told(case: str, seconds: list[float], rows: list[Regret]) -> None:
    later = [f"{own * 1e3:.0f}" for own in seconds]
    print(f"{case}: calibrated in {', '.join(later)} ms, the first with compiling", flush=True)
    for row in rows:
        times = ", ".join(f"{name} {own * 1e6:.0f}" for name, own in row.seconds.items())
        same = "the same each time" if len(set(row.picks)) == 1 else f"differs: {', '.join(row.picks)}"
        told_s = f"auto {row.auto_s * 1e6:.0f} us ({row.over:+.0%})"
        where = f"{row.direction:9} {row.pages:4} pages"
        print(f"  {where}: {told_s}; {times}; {row.picks[0]}, {same}", flush=True)


if __name__ == "__main__":
    main()
