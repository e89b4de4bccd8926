"""The quick form of each benchmark: how it is run in seconds, and which rows it promises.

`tests/project/test_benchmarks.py` fails where a program of `benchmarks/` or a `bench-*` target of the
Makefile has none; `make test-bench` runs them all.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.project.repo import ROOT

BUILD = ROOT / "build"
PEERS = BUILD / "peers"
VLLM = BUILD / "vllm-venv" / "bin" / "python"
SGLANG = BUILD / "sglang-venv" / "bin" / "python"


@dataclass(frozen=True)
class Promise:
    """Rows whose case begins with `case` are there, one of them at least with all of `peers`."""

    case: str
    metric: str = ""
    peers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Quick:
    """How one program runs. target: the Makefile's. needs: what must be there, by name, as files or programs.

    python: whose environment it runs in, `-m` then. out: the name of what is behind --out.
    """

    program: str
    promises: tuple[Promise, ...]
    target: str = ""
    needs: tuple[Path | str, ...] = ()
    python: Path | None = None
    out: str = "rows.json"

    def missing(self) -> list[str]:
        """What is not installed here."""
        return [str(need) for need in self.needs if not _is_there(need)]

    def command(self, out: Path, *more: str) -> list[str]:
        """The program with its quick form's flags."""
        how = (
            [f"benchmarks/{self.program}.py"] if self.python is None else ["-m", f"benchmarks.{self.program}"]
        )
        return [str(self.python or sys.executable), *how, "--quick", "--out", str(out), *more]


def _is_there(need: Path | str) -> bool:
    return need.exists() if isinstance(need, Path) else shutil.which(need) is not None


def _cases(*names: str, metric: str = "", peers: tuple[str, ...] = ()) -> tuple[Promise, ...]:
    return tuple(Promise(name, metric, peers) for name in names)


SGLANG_WHEELS = (PEERS / "sglang-0.5.9", PEERS / "sglang-0.5.23")
TREE_PEERS = ("sglang-0.5.9", "sglang-0.5.23-rust")
VLLM_TREES = ("vllm-0.32", "vllm-0.32-hashed")
DISK_PEERS = ("sglang-file", "lmcache-disk", "lmcache-direct", "nixl")
CODINGS = ("exact", "zstd", "fp8-zstd", "memcpy")

FORMS = (
    Quick(
        "bench_agents",
        _cases("fleet 8 2M", peers=("lru", "2q", "belady"))
        + _cases("40 agents over 2M, all seeds", metric="TTFT mean", peers=("fcfs", "lpm", "admit"))
        + _cases("most agents, 2M", peers=("fcfs", "lpm", "admit")),
        target="bench-agents",
    ),
    Quick(
        "bench_agents_vllm",
        _cases("agents, seed 1", metric="TTFT mean", peers=("vllm",))
        + _cases("agents, fits", peers=("vllm",)),
        target="bench-agents-vllm",
        needs=(VLLM,),
        python=VLLM,
    ),
    Quick(
        "bench_agents_live",
        _cases("4 agents, half", metric="TTFT mean", peers=("fcfs", "lpm"))
        + _cases("4 agents, half", metric="answers that differ"),
        target="bench-agents-live",
    ),
    Quick(
        "bench_boundaries",
        _cases("window of 3 pages, each 1 ", "window of 3 pages, each 5 ", peers=("looking back",)),
    ),
    Quick(
        "bench_calibration",
        _cases("SmolLM2-fp32 page_first page 16, to host", metric="copy", peers=("torch", "dma")),
    ),
    Quick(
        "bench_canary",
        _cases("bfloat16: build: ", "fp8 cache: build: ", "lossy storage: other: ", "bfloat16: other: "),
        target="bench-canary",
    ),
    Quick("bench_events", _cases("events off", "events published", "events taken", peers=("off",))),
    Quick(
        "bench_host_hits",
        _cases("prompt of 128 ", "prompt of 256 ", metric="first token", peers=("computed", "device")),
    ),
    Quick(
        "bench_policy",
        _cases("conversation second 3M", peers=("lru", "belady"))
        + _cases("conversation second, times x10", "synthetic agents", "conversation 3M cost", peers=("lru",))
        + _cases("conversation 3M again"),
        target="bench-policy",
    ),
    Quick(
        "bench_policy_e2e",
        _cases("conversation_trace", metric="hits", peers=("lab",))
        + _cases("conversation_trace", metric="ttft", peers=("model",)),
    ),
    Quick(
        "bench_policy_turn",
        _cases(
            *(f"{case}, page 64 (plain)" for case in ("request calls", "bare turns", "host-tier sliding")),
            peers=("lru",),
        ),
        target="bench-policy",
    ),
    Quick(
        "bench_quantise",
        _cases("encode 256KiB", "decode 256KiB", peers=CODINGS[1:])
        + _cases("redis put 256KiB", "redis get 256KiB", peers=CODINGS)
        + _cases(
            "disk put 256KiB",
            "disk get as stored 256KiB",
            "disk get cold 256KiB",
            "answers",
            peers=("exact",),
        ),
        target="bench-quantise",
        needs=("redis-server",),
    ),
    Quick("bench_ranks", _cases("tick, one rank", "tick, 2 ranks over gloo", peers=("collective call",))),
    Quick(
        "bench_sglang",
        _cases("host", metric="cached tokens", peers=("sglang",))
        + _cases("host", metric="TTFT p50", peers=("sglang",)),
        target="bench-sglang",
        needs=(SGLANG,),
    ),
    Quick(
        "bench_storage",
        _cases(
            *(f"disk {case} 2MiB" for case in ("put", "get as stored", "get cold", "get warm")),
            peers=DISK_PEERS,
        )
        + _cases("disk exists of 128 reused keys", peers=DISK_PEERS)
        + _cases("disk get cold, every page verified", peers=("raw", "hiradix-unverified"))
        + _cases("disk get warm, every page verified", peers=("memcpy", "hiradix-unverified"))
        + _cases("disk reopening"),
        target="bench-storage",
        needs=(PEERS / "sglang-0.5.23-storage", PEERS / "lmcache-0.5.6"),
    ),
    Quick(
        "bench_storage_mapped",
        _cases("written, 256 KiB: mapped", "read ahead, 2048 KiB: preadv", peers=("memcpy",)),
    ),
    Quick(
        "bench_storage_remote",
        _cases("redis set", "redis get", peers=("redis-py", "library"))
        + _cases("s3 set", "s3 get", "s3 in memory set", "s3 in memory get", peers=("boto3", "library"))
        + _cases(
            "mooncake own memory get", "mooncake another process get", peers=("library", "checked", "tcp")
        ),
        target="bench-storage-remote",
        needs=("redis-server",),
    ),
    Quick(
        "bench_transfer",
        _cases("tick", "drain", "faulty", peers=("limit",)) + _cases("no hits", peers=("limit", "floor")),
        target="bench-transfer",
    ),
    Quick(
        "bench_tree",
        _cases(
            *(f"multi-turn 20 x 8, page 64{how} (plain, lru)" for how in ("", ", request calls")),
            peers=TREE_PEERS,
        )
        + _cases("multi-turn 20 x 8, page 64 (plain, ghd)", "host-tier sliding 20 x 8, page 64 (plain, ghd)")
        + _cases("multi-turn 20 x 8, page 64, bare tree (plain, lru)", "conservation check")
        + _cases("host-tier round robin 20 x 8, page 64 (plain, lru)", metric="p99 us", peers=TREE_PEERS)
        + _cases("turn-at 8192", metric="us/turn, warm", peers=TREE_PEERS + VLLM_TREES)
        + _cases("turn-at 8192", metric="us/turn, cold", peers=TREE_PEERS + VLLM_TREES)
        + _cases("match 8192 tokens, one node, page 64", metric="us, warm", peers=TREE_PEERS + VLLM_TREES)
        + _cases("match 8192 tokens, one node, page 64", metric="us, cold", peers=TREE_PEERS + VLLM_TREES)
        + _cases(
            "insert 1024 under 4096, page 64", "evict 1000 tokens of 1000 leaves, page 64", peers=TREE_PEERS
        ),
        target="bench-tree",
        needs=(*SGLANG_WHEELS, VLLM),
    ),
    Quick(
        "bench_vllm",
        _cases(
            "prefix cache + hiradix", metric="TTFT p50", peers=("no cache", "prefix cache + LMCache 0.5.6")
        ),
        target="bench-vllm",
        needs=(VLLM,),
        python=VLLM,
    ),
    Quick(
        "bench_vllm_cost",
        _cases(
            "no hits, prompt of 320 tokens",
            metric="added to engine's thread",
            peers=("does nothing", "limit"),
        )
        + _cases("no hits, answer of 16 tokens", metric="copies per step", peers=("memcpy",)),
        target="bench-vllm",
        needs=(VLLM,),
        python=VLLM,
    ),
    Quick("bench_vllm_policy", _cases("device 1M, host 1M", metric="found in all", peers=("lru", "2q"))),
    Quick(
        "bench_waiting",
        _cases("12 prompts of 401 tokens, 12 at once", metric="used", peers=("nothing held",)),
        target="bench-waiting",
    ),
    Quick("bench_wake", _cases("woken on ", metric="put, median", peers=("nobody sleeps",))),
    Quick(
        "bench_window",
        _cases("window pool 900", "window pool 900, host", metric="found", peers=("unlimited", "keep")),
    ),
    Quick("chitchat_trace", (), out="chitchat.jsonl.gz"),
    Quick(
        "copy_bandwidth",
        _cases("SmolLM2-fp32 page_first page 64 to host", metric="rate", peers=("torch", "ceiling"))
        + _cases("load under a forward pass", peers=("compute alone",)),
    ),
    Quick("gpu_session", (), target="bench-gpu", out="session"),
    Quick(
        "serve_multiturn",
        _cases("all", metric="ttft_p50") + _cases("all", metric="total_p95"),
        target="bench-serve",
    ),
)

Check = Callable[[Path, str], None]
