"""How fast do pages move between the pools, and how near is that to what the machine can do at all?

    python benchmarks/copy_bandwidth.py [--device cuda] [--out results.json]

Prints the ceilings (one large copy each way and, on CUDA, both ways at once), then every transport per page
size, layout and model shape, as GB/s and as a share of the ceiling. Every transport's copy is compared byte
for byte with the torch transport's before it is timed. On a CPU the ceiling is one contiguous copy on one
thread.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from hiradix.memory import (
    CacheShape,
    DevicePool,
    HostPool,
    KVShape,
    MLAShape,
    TorchTransport,
    Transport,
    token_bytes,
)
from hiradix.memory.choose import choose_transport
from hiradix.memory.copy_plan import plan_copies
from hiradix.memory.dma_transport import DmaTransport, memmove_pieces

SHAPES: dict[str, CacheShape] = {
    "MHA-8B": KVShape(32, 8, 128, 128, torch.bfloat16),
    "MHA-70B-TP8": KVShape(80, 1, 128, 128, torch.bfloat16),
    "MLA": MLAShape(61, 512, 64, torch.bfloat16),
    "SmolLM2-fp32": KVShape(30, 3, 64, 64, torch.float32),
}
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_blob")
PAGE_SIZES = (1, 16, 64)
PROGRAMS = (2, 4, 8, 16, 32)


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
    """Median seconds of a call: wall clock on a CPU, events on the current stream on CUDA."""

    def __init__(self, cuda: bool, repeats: int) -> None:
        self._cuda = cuda
        self._repeats = repeats

    def seconds(self, call: Callable[[], None]) -> float:
        call()
        return statistics.median(self._once(call) for _ in range(self._repeats))

    def _once(self, call: Callable[[], None]) -> float:
        if not self._cuda:
            begin = time.perf_counter()
            call()
            return time.perf_counter() - begin
        begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin_event.record()
        call()
        end_event.record()
        end_event.synchronize()
        return begin_event.elapsed_time(end_event) / 1000


@dataclass(frozen=True)
class Case:
    """Two pools of random bytes and a shuffled list of pages of each."""

    shape_name: str
    device: DevicePool
    host: HostPool
    device_pages: np.ndarray
    host_pages: np.ndarray

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
    num_pages = max(2, int(args.megabytes * 1e6) // (token_bytes(shape) * page_size))
    device = DevicePool(shape, 2 * num_pages, page_size, args.device)
    host = HostPool(shape, 2 * num_pages, page_size, layout=layout, device=args.device)
    host.buffer.random_(0, 255)
    random = np.random.default_rng(0)
    device_pages = random.permutation(2 * num_pages)[:num_pages] + 1
    return Case(shape_name, device, host, device_pages, random.permutation(2 * num_pages)[:num_pages])


def check(case: Case, transport: Transport) -> None:
    """Load, wipe and write back with `transport`; the host pages must be what they were."""
    before = case.host.buffer.clone()
    case.copy(transport, to_device=True)
    settle(case)
    for page in case.host_pages.tolist():
        for view in case.host.page_views(page):
            view[:] = bytes(len(view))
    case.copy(transport, to_device=False)
    settle(case)
    assert torch.equal(case.host.buffer, before), f"{transport.name} changed bytes"
    reference, seen = (contents(case, each) for each in (TorchTransport(), transport))
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
    return case.device.layer_views(0)[0].cpu().view(torch.uint8)


class KernelWith:
    """The kernel with a fixed number of programs, for the sweep."""

    note = ""

    def __init__(self, num_programs: int) -> None:
        from hiradix.memory.triton_transport import TritonTransport

        self.name = f"triton x{num_programs}"
        self.copy_pages = TritonTransport(num_programs=num_programs).copy_pages


def transports(device: str) -> list[Transport]:
    """What there is to compare on `device`."""
    if not device.startswith("cuda"):
        return [TorchTransport(), DmaTransport(memmove_pieces)]
    return [choose_transport("direct", torch.device(device)), *(KernelWith(count) for count in PROGRAMS)]


def ceilings(args: argparse.Namespace, clock: Clock) -> dict[str, float]:
    """GB/s of one contiguous copy of 1 GiB (CPU: of the case's size) to the device, to the host, and both."""
    cuda = args.device.startswith("cuda")
    num_bytes = 1 << 30 if cuda else int(args.megabytes * 1e6)
    host, host_out = (torch.ones(num_bytes, dtype=torch.uint8, pin_memory=cuda) for _ in range(2))
    device, device_in = (torch.ones(num_bytes, dtype=torch.uint8, device=args.device) for _ in range(2))

    def loads() -> None:
        device_in.copy_(host, non_blocking=True)

    def writes() -> None:
        host_out.copy_(device, non_blocking=True)

    found = {
        "to device": num_bytes / clock.seconds(loads) / 1e9,
        "to host": num_bytes / clock.seconds(writes) / 1e9,
    }
    if cuda:
        found["both ways"] = 2 * num_bytes / clock.seconds(lambda: both(loads, writes)) / 1e9
    return found


def both(loads: Callable[[], None], writes: Callable[[], None]) -> None:
    """Both copies at once, each on a stream of its own."""
    current, streams = torch.cuda.current_stream(), [torch.cuda.Stream() for _ in range(2)]
    for stream, copy in zip(streams, (loads, writes), strict=True):
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            copy()
        current.wait_stream(stream)


def measure(case: Case, args: argparse.Namespace, clock: Clock, ceiling: dict[str, float]) -> Iterator[Row]:
    plan = plan_copies(case.host, case.device)[0].collapsed()
    for transport in transports(args.device):
        check(case, transport)
        for direction in ("to host", "to device"):
            to_device = direction == "to device"
            speed = case.num_bytes / clock.seconds(partial(case.copy, transport, to_device)) / 1e9
            yield Row(
                direction, transport.name, case.shape_name, case.host.layout.name, case.host.page_size,
                plan.src.row_bytes, speed, speed / ceiling[direction],
            )  # fmt: skip


def machine(device: str) -> dict[str, str]:
    """What the numbers were measured on."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.processor() or "CPU"
    return {
        "device": name,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--megabytes", type=float, default=None, help="bytes per copy; 1000 on CUDA, 64 on a CPU"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shape", action="append", choices=list(SHAPES))
    parser.add_argument("--layout", action="append", choices=LAYOUTS)
    parser.add_argument("--out", type=Path, help="write the raw results here as JSON")
    args = parser.parse_args()
    cuda = args.device.startswith("cuda")
    args.megabytes = args.megabytes or (1000 if cuda else 64)
    torch.set_num_threads(1)
    clock = Clock(cuda, args.repeats)
    stream = torch.cuda.stream(torch.cuda.Stream()) if cuda else torch.no_grad()
    with stream:
        run(args, clock)


def run(args: argparse.Namespace, clock: Clock) -> None:
    """Measure everything asked for, a printed line each, and keep the raw numbers."""
    about, ceiling, rows = machine(args.device), ceilings(args, clock), []
    print(*(f"{key} {value}" for key, value in about.items()), sep=", ")
    print("ceiling:", ", ".join(f"{name} {speed:.1f} GB/s" for name, speed in ceiling.items()))
    head = ("direction", "transport", "shape", "layout", "page", "piece", "GB/s", "share")
    print("{:10} {:11} {:13} {:18} {:>4} {:>7} {:>6} {}".format(*head))
    for shape_name in args.shape or SHAPES:
        for layout in args.layout or LAYOUTS:
            for page_size in PAGE_SIZES:
                for row in measure(make_case(shape_name, layout, page_size, args), args, clock, ceiling):
                    rows.append(row)
                    print(
                        f"{row.direction:10} {row.transport:11} {row.shape:13} {row.layout:18} "
                        f"{row.page_size:4} {row.piece:7} {row.gb_per_s:6.1f} {row.share:4.0%}",
                        flush=True,
                    )
    if args.out is not None:
        result = {"machine": about, "ceiling": ceiling, "rows": [asdict(row) for row in rows]}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
