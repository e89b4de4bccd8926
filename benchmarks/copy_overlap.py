"""What copies cost beside computing: matrix products slowed down, and a load back hidden by a forward pass.

Called by copy_bandwidth.py. Slow-downs are ratios of pairs, one after the other, with a 95 % interval.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from common import interval

from hiradix.memory import DevicePool, HostPool, KVShape, TorchTransport, Transport, make_transport
from hiradix.transfer import HiCacheController

Once = Callable[[Callable[[], None]], float]  # seconds of a call
PAIRS = 15
PAGE_SIZE = 64


@dataclass(frozen=True)
class Slowdown:
    """Time of matrix products beside a transport's copies over their time alone; low, high: 95 % of it."""

    transport: str
    direction: str
    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class Overlap:
    """Seconds of a forward pass, of a load, and of both together; hidden: share of the shorter one."""

    transport: str
    num_tokens: int
    compute_s: float
    load_s: float
    together_s: float
    hidden: float


def report(args: argparse.Namespace, once: Once, found: dict[str, Any]) -> None:
    """Print both tables; the raw numbers, and what failed, into `found`."""
    slowdowns: list[Slowdown] = []
    if args.cuda:
        print("\nmatrix products beside copies     ratio  95 % interval")
        for row in interference(args, once, found["faults"]):
            slowdowns.append(row)
            ends = f"{row.low:.3f} to {row.high:.3f}"
            print(f"{row.transport:16} {row.direction:12} {row.ratio:6.3f}  {ends}", flush=True)
    else:
        print("\nmatrix products beside copies: needs a GPU, where both run at once")
    print("\nload back under a forward pass  tokens  compute    load  together  hidden")
    overlaps = list(overlap(args, once))
    for own in overlaps:
        times = (own.compute_s, own.load_s, own.together_s)
        numbers = " ".join(f"{seconds * 1e3:7.1f}ms" for seconds in times)
        print(f"{own.transport:30} {own.num_tokens:7} {numbers}  {own.hidden:5.0%}", flush=True)
    found["interference"] = [asdict(row) for row in slowdowns]
    found["overlap"] = [asdict(row) for row in overlaps]


# -- matrix products beside copies ------------------------------------------------------


def interference(args: argparse.Namespace, once: Once, faults: list[dict[str, Any]]) -> Iterator[Slowdown]:
    """A row per competitor and direction; one that raises is told in `faults`."""
    shape = KVShape(32, 8, 128, 128, torch.bfloat16)
    num_pages = max(2, int(args.megabytes * 1e6) // (PAGE_SIZE * 32 * 4096))
    device = DevicePool(shape, num_pages, PAGE_SIZE, args.device)
    host = HostPool(shape, num_pages + 1, PAGE_SIZE, device=args.device)
    pages = np.arange(1, num_pages + 1)
    sides = torch.randn(2, 4096, 4096, device=args.device, dtype=torch.bfloat16)
    for name, transport in competitors(args, device, host):
        for direction, src, dst in (("to device", host, device), ("to host", device, host)):

            def copies(src: Any = src, dst: Any = dst, transport: Transport = transport) -> None:
                transport.copy_pages(src, dst, pages, pages, None)

            try:
                once(copies)  # compiles, makes tables and buffers
                ratios = paired(once, sides, copies, once(copies))
            except Exception as error:
                told = f"{type(error).__name__}: {str(error):.200}"
                print(f"FAILED: {name} {direction}: {told}", flush=True)
                faults.append({"transport": name, "direction": direction, "error": told})
                continue
            yield slowdown(name, direction, ratios)


def competitors(
    args: argparse.Namespace, device: DevicePool, host: HostPool
) -> Iterator[tuple[str, Transport]]:
    from hiradix.memory.triton_transport import TritonTransport

    yield "direct", make_transport("direct", args.device)
    for count in (2, 4, 8, 16):
        yield f"triton x{count}", TritonTransport("", count)
    yield "auto", make_transport("auto", args.device, (device, host))


def paired(once: Once, sides: torch.Tensor, copies: Callable[[], None], copy_s: float) -> list[float]:
    """Ratios of the products' time with copies under way all along, over their time alone."""
    out = torch.empty_like(sides[0])

    def product() -> None:
        torch.mm(sides[0], sides[1], out=out)

    once(product)  # the first one sets the library up
    count = max(8, int(copy_s / max(1e-6, once(product))))

    def products() -> None:
        for _ in range(count):
            product()

    stream, ratios = torch.cuda.Stream(), []
    once(products)
    for _ in range(PAIRS):
        alone = once(products)
        with torch.cuda.stream(stream):
            for _ in range(3):
                copies()
        ratios.append(once(products) / alone)
        torch.cuda.synchronize()
    return ratios


def slowdown(name: str, direction: str, ratios: list[float]) -> Slowdown:
    low, high = interval(ratios, np.random.default_rng(0))
    return Slowdown(name, direction, statistics.median(ratios), low, high)


# -- a load back under a forward pass ---------------------------------------------------


def overlap(args: argparse.Namespace, once: Once) -> Iterator[Overlap]:
    """A pass of one product per layer over 512 new tokens, with a prefix of so many tokens to load."""
    layers = 32 if args.cuda else 8
    shape = KVShape(layers, 8, 128, 128, torch.bfloat16 if args.cuda else torch.float32)
    width = 4096 if args.cuda else 256
    for num_tokens in (2048, 8192) if args.cuda else (1024, 2048):
        num_pages = num_tokens // PAGE_SIZE
        device = DevicePool(shape, num_pages, PAGE_SIZE, args.device)
        host = HostPool(shape, num_pages, PAGE_SIZE, device=args.device)
        chosen = make_transport("auto", args.device, (device, host)) if args.cuda else TorchTransport()
        controller = HiCacheController(device, host, transport=chosen)
        weights = torch.randn(layers, width, width, device=args.device, dtype=shape.dtype)
        try:
            yield overlapped(Pass(controller, device, weights), chosen.name, num_tokens, once)
        finally:
            controller.close(10.0)


@dataclass(frozen=True)
class Pass:
    """A forward pass: in each layer the pool's keys are read, behind the gate, and some products computed."""

    controller: HiCacheController
    device: DevicePool
    weights: torch.Tensor

    def compute(self) -> None:
        rows = self.weights.new_ones(512, self.weights.shape[1])
        for layer, weight in enumerate(self.weights):
            keys = self.device.get_key_buffer(layer)
            for _ in range(4):
                rows = torch.mm(rows, weight) * 1e-3
            rows[0, 0] += keys[-1].sum()

    def load(self) -> int:
        """Queue and start a load of every page; the gate's index."""
        pages = np.arange(1, self.device.num_pages + 1)
        self.controller.load(pages - 1, pages)
        return self.controller.start_loading()

    def load_and_wait(self) -> None:
        gate, index = self.controller.layer_done_counter, self.load()
        gate.set_consumer(index)
        gate.wait_until(self.device.shape.num_layers - 1)
        self.controller.wait_any(30.0)
        self.controller.poll()
        gate.set_consumer(-1)

    def both(self) -> None:
        gate = self.controller.layer_done_counter
        gate.set_consumer(self.load())
        self.compute()
        self.controller.wait_any(30.0)
        self.controller.poll()
        gate.set_consumer(-1)


def overlapped(work: Pass, name: str, num_tokens: int, once: Once) -> Overlap:
    calls = (work.compute, work.load_and_wait, work.both)
    for call in calls:
        once(call)
    rounds = [[once(call) for call in calls] for _ in range(5)]
    compute_s, load_s, together_s = (statistics.median(own) for own in zip(*rounds, strict=True))
    hidden = (compute_s + load_s - together_s) / min(compute_s, load_s)
    return Overlap(name, num_tokens, compute_s, load_s, together_s, min(1.0, max(0.0, hidden)))
