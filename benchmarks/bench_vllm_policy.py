"""Which eviction policy serves more tokens from the host tier behind vLLM's own prefix cache?

    python benchmarks/bench_vllm_policy.py [--limit N] [--device 1M] [--host 1M,3M,10M] [--rounds 5]
                                           [--quick] [--out FILE]

The conversation trace, one request after the other, through the connector's scheduler role. Before it stands
a model of vLLM's prefix cache: blocks in the order of last use, a request's last blocks first. Copies take no
time. Rows: the share of the prompts' tokens in the trace's second half that was found in either tier, and on
the host alone; time of the scheduler's thread in the role, per request of the whole trace (median over the
rounds, policies in turn). Writes build/bench/vllm-policy.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from common import Report, Row  # noqa: E402

from hiradix.adapters.vllm.orders import Orders  # noqa: E402
from hiradix.adapters.vllm.scheduler import SchedulerRole  # noqa: E402
from hiradix.adapters.vllm.scheduler_plan import SchedulerPlan, StepRequest  # noqa: E402
from hiradix.apps.replay.main import tokens  # noqa: E402
from hiradix.apps.traces.readers import read_trace  # noqa: E402
from hiradix.apps.traces.trace import Trace, TraceRequest  # noqa: E402
from hiradix.cache.host_index import HostIndex  # noqa: E402
from hiradix.policy.eviction import make_order  # noqa: E402
from hiradix.policy.prefetch_policy import PrefetchLimits, PrefetchPolicy  # noqa: E402
from hiradix.policy.write_policy import WritePolicy  # noqa: E402
from hiradix.transfer import JobKind, Result  # noqa: E402
from hiradix.tree import FULL  # noqa: E402

TRACE = HERE / "data" / "conversation_trace.jsonl.xz"
POLICIES = ("ghd", "lru", "2q")
OUT = Path("build/bench/vllm-policy.json")


@dataclass(eq=False)
class Request:
    """vLLM's Request as far as the role reads it. The name of each block stands for its tokens."""

    request_id: str
    all_token_ids: Any
    prompt_token_ids: Any
    num_computed_tokens: int = 0
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: Sequence[Any] = ()
    prompt_embeds: Any = None
    resumable: bool = False
    skip_reading_prefix_cache: bool = False
    block_hashes: Sequence[bytes] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def request_of(number: int, call: TraceRequest, block_tokens: int) -> Request:
    """Whole blocks by name; what follows them, the answer too, is nobody else's."""
    prompt = np.full(max(call.prompt_tokens, len(call.blocks) * block_tokens + 1), -1, np.int32)
    prompt[: len(call.blocks) * block_tokens] = np.repeat(call.blocks.astype(np.int32), block_tokens)
    prompt[len(call.blocks) * block_tokens :] = 2**30 + number
    answer = np.full(call.output_tokens, 2**30 + number, np.int32)
    return Request(str(number), np.concatenate([prompt, answer]), prompt)


@dataclass
class PrefixCache:
    """vLLM's own: block of each name, coldest first; a request's last blocks are colder than its first."""

    num_blocks: int
    held: OrderedDict[int, int] = field(default_factory=OrderedDict)

    def hits(self, names: Sequence[int]) -> int:
        """Leading blocks that are there."""
        return next((at for at, name in enumerate(names) if name not in self.held), len(names))

    def take(self, names: Sequence[int]) -> tuple[list[int], list[int]]:
        """A block for each name, and which of them are new. The names are the hottest afterwards."""
        table, new = [], []
        used = {name: self.held.pop(name) for name in names if name in self.held}
        for name in names:
            block = used.get(name)
            if block is None:
                full = len(self.held) + len(used) + len(new) >= self.num_blocks
                block = (
                    self.held.popitem(last=False)[1] if full else len(self.held) + len(used) + len(new) + 1
                )
                new.append(block)
            table.append(block)
        self.held.update(zip(reversed(names), reversed(table), strict=True))
        return table, new


class Engine:
    """One policy's run over the trace. times: of the scheduler's thread, per request."""

    def __init__(self, policy: str, trace: Trace, device_blocks: int, host_pages: int) -> None:
        self.trace, self.page = trace, trace.block_tokens
        self.index = HostIndex(self.page, (FULL,), make_order(policy, {}))
        plan = SchedulerPlan(
            self.index,
            (0,),
            1,
            True,
            WritePolicy.from_name("write_through"),
            PrefetchPolicy.from_name("timeout", PrefetchLimits(self.page)),
        )
        self.role = SchedulerRole(plan)
        self.role.open([host_pages], [1], False)
        self.prefix = PrefixCache(device_blocks)
        self.local, self.external, self.seconds = [0] * len(trace.calls), [0] * len(trace.calls), 0.0

    def play(self) -> None:
        for number, call in enumerate(self.trace.calls):
            self._serve(number, request_of(number, call, self.page), call.blocks.tolist())
        self.index.check()

    def _serve(self, number: int, request: Request, names: list[int]) -> None:
        if len(names) >= self.prefix.num_blocks:
            return  # vLLM refuses it
        limit = min(len(names), (len(request.prompt_token_ids) - 1) // self.page)
        local = min(self.prefix.hits(names), limit) * self.page
        begun = time.thread_time()
        self.role.arrived(request)
        external = self.role.lookup(request, local)
        assert external is not None, "nothing is under way that it could wait for"
        self.seconds += time.thread_time() - begun
        blocks, new = self.prefix.take(names)
        self.local[number], self.external[number] = local, external
        begun = time.thread_time()
        self.role.allocated(request, lambda: (blocks,), external)
        if external:
            self._obey(self.role.step((), lambda _: (blocks,)))
        request.num_computed_tokens = local + external
        rest = len(request.prompt_token_ids) - request.num_computed_tokens
        self._obey(self.role.step([StepRequest(request.request_id, rest, new)], lambda _: (blocks,)))
        request.num_computed_tokens = len(names) * self.page  # answers fill blocks of nobody else's
        self.role.finished(request, (blocks,))
        self._obey(self.role.step((), lambda _: (blocks,)))
        self.seconds += time.thread_time() - begun

    def _obey(self, orders: Orders) -> None:
        """Workers whose copies take no time."""
        done = [Result(one.ticket, JobKind.LOAD, 0) for one in orders.jobs.loads]
        done += [Result(one.ticket, JobKind.WRITE, 0) for one in orders.jobs.saves]
        self.role.apply(done)

    def shares(self) -> tuple[float, float]:
        """Of the second half's prompt tokens: found in either tier, and on the host alone."""
        half = len(self.local) // 2
        asked = sum(call.prompt_tokens for call in self.trace.calls[half:])
        return sum(self.local[half:] + self.external[half:]) / asked, sum(self.external[half:]) / asked


def measured(trace: Trace, device: str, host: str, rounds: int) -> list[Row]:
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in POLICIES}
    for _ in range(rounds):
        for name in POLICIES:
            size = trace.block_tokens
            engine = Engine(name, trace, tokens(device) // size, tokens(host) // size)
            engine.play()
            found[name].append((*engine.shares(), 1e6 * engine.seconds / len(trace.calls)))
    rows = []
    for metric, unit, at in (
        ("found in all", "share", 0),
        ("found on the host", "share", 1),
        ("CPU", "us", 2),
    ):
        values = {name: statistics.median(run[at] for run in runs) for name, runs in found.items()}
        rows.append(Row(f"device {device}, host {host}", metric, unit, values.pop("ghd"), values))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=int, help="requests of the trace (default: all)")
    parser.add_argument("--device", default="1M", help="tokens of vLLM's own prefix cache")
    parser.add_argument("--host", default="1M,3M,10M", help="tokens of the host tier, several with commas")
    parser.add_argument("--rounds", type=int, default=5, help="of each policy; hits are the same in all")
    parser.add_argument("--quick", action="store_true", help="300 requests, hosts of 1M tokens, one round")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    if args.quick:
        args.limit, args.host, args.rounds = 300, "1M", 1
    trace = read_trace(TRACE, args.limit)
    with Report(args.out, POLICIES[1:], ours=POLICIES[0]) as report:
        for host in args.host.split(","):
            report.add(measured(trace, args.device, host, args.rounds))


if __name__ == "__main__":
    main()
