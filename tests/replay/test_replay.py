"""The replay lab: formats, models against a search, what a run reports."""

from __future__ import annotations

import gzip
import itertools
import json
import lzma
import math
import multiprocessing
import os
import random
import signal
import sys
import threading
from multiprocessing import connection
from pathlib import Path

import numpy as np
import pytest

from hiradix.apps.replay.generate import KINDS, generate
from hiradix.apps.replay.lab import Cell, Source, run, run_cell
from hiradix.apps.replay.models import MODELS, belady
from hiradix.apps.replay.play import Player
from hiradix.apps.replay.report import plot, row
from hiradix.apps.replay.simulated_cache import Tiers
from hiradix.apps.replay.timing import Machine
from hiradix.apps.traces.readers import read_trace
from hiradix.apps.traces.trace import Namer, Trace, TraceRequest
from hiradix.cli import main as hiradix
from hiradix.errors import ConfigError
from tests.seeds import seeded, seeds

TRACE = Path(__file__).resolve().parents[2] / "benchmarks" / "data" / "conversation_trace.jsonl.xz"


def lines(*records: dict) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


MOONCAKE = lines(
    {"timestamp": 0, "input_length": 1500, "output_length": 5, "hash_ids": [7, 8, 9]},
    {"timestamp": 2500, "input_length": 1024, "output_length": 6, "hash_ids": [7, 8]},
)
ANY = {"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": []}
BAILIAN = lines(
    {"chat_id": 1, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 130, "output_length": 5,
     "type": "text", "turn": 1, "hash_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9]},
    {"chat_id": 2, "parent_chat_id": 1, "timestamp": 2.5, "input_length": 70, "output_length": 5,
     "type": "text", "turn": 2, "hash_ids": [1, 2, 3, 4, 10]},
)  # fmt: skip
PLAIN = lines({"tokens": list(range(130))}, {"token_ids": [*range(64), *range(64)], "timestamp": 3})
AZURE = (
    b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,200,44\n2023-11-16 18:17:04,90,9\n"
)
BURST = b"""Timestamp,Session ID,Model,Request tokens,Response tokens,Total tokens,Log Type
5,a,m,200,5,205,x
9,a,m,270,5,275,x
"""
ROUNDS = lines(
    {"session_id": "s", "input_tokens": 64, "output_tokens": 2},
    {"session_id": "t", "input_tokens": 64, "output_tokens": 2},
    {"session_id": "s", "input_tokens": 128, "output_tokens": 2},
)
RECORD = {"time_s": 1.5, "prompt_tokens": 130, "output_tokens": 3, "block_tokens": 64, "blocks": ["a", "b"]}
RECORDED = lines({"hiradix_trace": 1, "block_tokens": 64}, RECORD, RECORD)
FORMATS = {  # contents, tokens per block, blocks per call, leading blocks the last call shares with the first
    "mooncake": (MOONCAKE, 512, [2, 2], 2),
    "bailian": (BAILIAN, 64, [2, 1], 1),
    "plain": (PLAIN, 64, [2, 2], 1),
    "azure": (AZURE, 64, [3, 1], 0),
    "burstgpt": (BURST, 64, [3, 4], 3),
    "rounds": (ROUNDS, 64, [1, 1, 2], 1),
    "recorded": (RECORDED, 64, [2, 2], 2),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_blocks_that_say_what_is_shared(name: str, tmp_path: Path) -> None:
    data, size, counts, shared = FORMATS[name]
    (tmp_path / "trace").write_bytes(data)
    trace = read_trace(tmp_path / "trace")
    assert trace.block_tokens == size and [len(c.blocks) for c in trace.calls] == counts
    first, last = trace.calls[0].blocks.tolist(), trace.calls[-1].blocks.tolist()
    assert sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last))) == shared


@pytest.mark.parametrize("suffix, pack", [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_a_compressed_trace_has_the_name_of_its_contents(suffix: str, pack, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(MOONCAKE)
    (tmp_path / f"b.jsonl{suffix}").write_bytes(pack(MOONCAKE))
    plain, packed = read_trace(tmp_path / "a.jsonl"), read_trace(tmp_path / f"b.jsonl{suffix}")
    assert plain.source == packed.source and len(plain.source) == 64


@pytest.mark.parametrize(
    "data, said",
    [
        (b"", "no requests"),
        (b'{"a": 1}\n', "unknown format"),
        (b"[1]\n[2]\n", "JSON array"),
        (MOONCAKE + b"{broken\n", ":3: not JSON"),
        (MOONCAKE + b"[]\n", ":3: not an object"),
        (MOONCAKE + lines({"timestamp": 1, "input_length": -5, "output_length": 1, "hash_ids": []}), ":3:"),
        (MOONCAKE + lines({"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": "x"}), ":3:"),
        (MOONCAKE + lines({"timestamp": 1, "input_length": 5}), ":3:"),
        (MOONCAKE + lines({**ANY, "input_length": math.inf}), ":3:"),
        (MOONCAKE + lines({**ANY, "timestamp": math.nan}), ":3:"),
        (MOONCAKE + b'{"timestamp": ' + b"9" * 5000 + b"}\n", ":3: not JSON"),
        (MOONCAKE + b'{"timestamp": 1', ":3: not JSON"),
        (BURST + b"9,a,m," + b"1" * 200_000 + b",5,275,x\n", ":4: field larger"),
        (RECORDED + lines({**RECORD, "prompt_tokens": 127}), ":4: .*2 blocks"),
        (RECORDED + lines({**RECORD, "block_tokens": 32}), ":4: .*32"),
        (RECORDED + lines({**RECORD, "blocks": [1, {}]}), ":4: .*blocks is no list of texts"),
        (RECORDED + lines({**RECORD, "hint": "stay"}), ":4: .*hint: 'stay' is not one of end_of_session"),
        (RECORDED + lines({**RECORD, "blocks": "ab"}), ":4: .*blocks is no list of texts"),
        (lines({**RECORD, "block_tokens": True}), "block_tokens must be a whole number >= 1, got True"),
        (lines({**RECORD, "block_tokens": None}), "block_tokens must be .* got None"),
        (lines({**RECORD, "output_tokens": False}), ":1: .*output_tokens is False"),
        (MOONCAKE + lines({**ANY, "input_length": 10.5}), ":3: .*input_length is 10.5"),
        (MOONCAKE + lines({**ANY, "input_length": "ten"}), ":3: .*input_length is ten"),
        (MOONCAKE + lines({**ANY, "timestamp": True}), ":3: .*timestamp is no time: True"),
        (MOONCAKE + lines({**ANY, "timestamp": "soon"}), ":3: .*timestamp is no time: soon"),
        (MOONCAKE + lines({**ANY, "timestamp": None, "delay": -5}), ":3: .*delay is -5"),
        (lines({"tokens": [1, 2], "output_tokens": -1}), ":1: .*-1"),
        (lines({"tokens": [1, True]}), ":1: .*tokens is no list of whole numbers"),
    ],
)
def test_a_bad_trace_is_an_error_that_names_the_line(data: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_bytes(data)
    with pytest.raises(ConfigError, match=said):
        read_trace(tmp_path / "trace.jsonl")


def test_a_recording_that_was_cut_off_is_read_up_to_there(tmp_path: Path) -> None:
    (tmp_path / "trace").write_bytes(RECORDED + lines(RECORD)[:50])
    assert len(read_trace(tmp_path / "trace").calls) == 2
    (tmp_path / "trace").write_bytes(RECORDED + lines(RECORD)[:50] + b"\n")
    with pytest.raises(ConfigError, match=":4: not JSON"):
        read_trace(tmp_path / "trace")


@pytest.mark.parametrize("data", [MOONCAKE, BURST])
def test_a_byte_order_mark_is_no_part_of_a_trace(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "trace").write_bytes(b"\xef\xbb\xbf" + data)
    assert len(read_trace(tmp_path / "trace").calls) == 2


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_text_of_another_encoding_is_named(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "trace").write_bytes(MOONCAKE.decode().encode(encoding))
    with pytest.raises(ConfigError, match="trace: is no UTF-8 text"):
        read_trace(tmp_path / "trace")


@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_array_is_named(indent: int | None, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text(json.dumps([ONE, ONE], indent=indent))
    with pytest.raises(ConfigError, match="trace:1: is a JSON array"):
        read_trace(tmp_path / "trace")


def test_a_damaged_archive_is_an_error_that_names_it(tmp_path: Path) -> None:
    packed = gzip.compress(random.Random(0).randbytes(1000))
    for at in range(10, len(packed)):
        damaged = bytearray(packed)
        damaged[at] ^= 0xFF
        (tmp_path / "trace.gz").write_bytes(damaged)
        with pytest.raises(ConfigError, match="trace.gz"):
            read_trace(tmp_path / "trace.gz")


def test_the_committed_trace_is_the_published_one() -> None:
    trace = read_trace(TRACE)
    assert trace.source == "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df"
    assert len(trace.calls) == 12_031


@pytest.mark.parametrize("kind", KINDS)
def test_equal_seeds_give_equal_traces(kind: str) -> None:
    one, two, other = generate(kind, 5, 200), generate(kind, 5, 200), generate(kind, 6, 200)
    assert one.is_synthetic and "synthetic" in one.name
    shown = [[(c.time_s, c.prompt_tokens, c.blocks.tolist()) for c in t.calls] for t in (one, two, other)]
    assert shown[0] == shown[1] and (shown[0] != shown[2] or kind == "loop")


def random_trace(seed: int, count: int) -> Trace:
    rng, namer = random.Random(seed), Namer()
    paths = [[rng.randint(0, 1) for _ in range(rng.randint(1, 4))] for _ in range(count)]
    calls = (TraceRequest(0.0, len(p) * 4, 1, namer.blocks(list(p))) for p in paths)
    return Trace("random", str(seed), 4, tuple(calls))


def best_possible(trace: Trace, capacity: int) -> int:
    """Most tokens any choice of what to keep after each request can serve: a search over all of them."""
    parents = {
        b: a for c in trace.calls for a, b in zip([None, *c.blocks.tolist()], c.blocks.tolist(), strict=False)
    }
    best = {frozenset(): 0}
    for call in trace.calls:
        names, after = call.blocks.tolist(), {}
        for kept, hits in best.items():
            found = next((i for i, name in enumerate(names) if name not in kept), len(names))
            for size in range(capacity + 1):
                for keep in itertools.combinations(sorted(kept | set(names)), size):
                    if all(parents[name] is None or parents[name] in keep for name in keep):
                        new = hits + found
                        after[frozenset(keep)] = max(after.get(frozenset(keep), 0), new)
        best = after
    return max(best.values()) * trace.block_tokens


@seeded
@pytest.mark.parametrize("seed", seeds(12))
def test_belady_is_what_a_search_over_all_choices_finds(seed: int) -> None:
    trace = random_trace(seed, 9)
    assert int(belady(trace, 3).sum()) == best_possible(trace, 3)


@seeded
@pytest.mark.parametrize("policy", ["lru", "2q", "ghd", "lfu", *MODELS])
@pytest.mark.parametrize("seed", seeds(3))
def test_nobody_beats_belady_and_nobody_serves_what_was_never_sent(policy: str, seed: int) -> None:
    trace = random_trace(seed, 120)
    source = Cell(Source("unused"), policy, Tiers(20))
    hits = run_cell(source, trace).hits["device"]
    assert 0 < hits.sum() <= belady(trace, 5).sum()
    seen: set[int] = set()
    for call, hit in zip(trace.calls, hits.tolist()):
        found = next((i for i, b in enumerate(call.blocks.tolist()) if b not in seen), len(call.blocks))
        assert hit <= found * 4
        seen.update(call.blocks.tolist())


def whole(played) -> np.ndarray:
    return sum(played.hits.values()) + sum(played.misses.values())


@pytest.mark.parametrize("policy", ["lru", "ghd"])
@pytest.mark.parametrize("tiers", [Tiers(60_000), Tiers(60_000, 200_000), Tiers(60_000, 100_000, 400_000)])
def test_every_token_is_a_hit_of_one_tier_or_a_miss_for_one_reason(policy: str, tiers: Tiers) -> None:
    trace = generate("chat", 3, 250)
    player = Player(trace, policy, tiers)
    played = player.play()
    player.simulated.cache.check()
    assert whole(played).tolist() == [call.prompt_tokens for call in trace.calls]
    assert (played.hits["host"].sum() > 0) == (tiers.host > 0)
    assert (played.hits["storage"].sum() > 0) == (tiers.storage > 0)


@pytest.mark.parametrize("host_blocks", [1, 2, 3, 5])
def test_a_fetch_that_the_host_has_too_little_room_for_leaves_nothing_behind(host_blocks: int) -> None:
    for seed in range(3):
        trace = random_trace(seed, 60)
        player = Player(trace, "lru", Tiers(16, host_blocks * 4, 160))
        assert player.play().hits["storage"].sum() > 0
        prefetcher = player.simulated.cache.prefetcher
        assert not [n for n in range(len(trace.calls)) if prefetcher.pop_withheld(n) is not None]
        assert prefetcher.state() == (0, 0, 0)


def test_a_lower_tier_adds_hits() -> None:
    trace = generate("chat", 3, 300)
    rates = []
    for tiers in (Tiers(60_000), Tiers(60_000, 200_000), Tiers(60_000, 200_000, 2_000_000)):
        played = Player(trace, "lru", tiers).play()
        rates.append(sum(int(hits.sum()) for hits in played.hits.values()))
    assert rates[0] < rates[1] < rates[2]


def test_ghd_writes_less_to_the_host_for_at_least_as_many_hits() -> None:
    written, served = {"lru": 0, "ghd": 0}, {"lru": 0, "ghd": 0}
    for seed in range(4, 8):
        trace = generate("chat", seed, 900)
        for policy in written:
            played = Player(trace, policy, Tiers(60_000, 500_000)).play()
            written[policy] += played.writes["host"]
            served[policy] += sum(int(hits.sum()) for hits in played.hits.values())
    assert written["ghd"] < 0.9 * written["lru"] and served["ghd"] >= served["lru"]


def test_processes_find_what_one_process_finds() -> None:
    cells = [Cell(Source("synthetic:chat", 1, 120), policy, Tiers(100_000)) for policy in ("lru", "ghd")]
    alone = {o.cell.policy: o.played.decisions for o in run(cells, 1)}
    told: list[int] = []
    beside = {o.cell.policy: o.played.decisions for o in run(cells, 2, lambda cell, done: told.append(done))}
    assert alone == beside and 120 in told


def test_a_killed_process_ends_the_run_with_an_error() -> None:
    """As by the system when memory is short; the others are ended, too."""
    source = Source("synthetic:chat", 1, 100_000)  # long enough to be killed in
    cells = [Cell(source, policy, Tiers(100_000)) for policy in ("lru", "ghd")]
    others = set(multiprocessing.active_children())

    def kill(cell: int, done: int) -> None:
        for child in set(multiprocessing.active_children()) - others:
            if child.pid is not None and not killed:
                killed.append(child)
                os.kill(child.pid, signal.SIGKILL)

    killed: list[multiprocessing.process.BaseProcess] = []
    failed: list[BaseException] = []

    def play() -> None:
        try:
            run(cells, 2, kill)
        except ConfigError as error:
            failed.append(error)

    thread = threading.Thread(target=play, daemon=True)
    thread.start()
    thread.join(120.0)
    left = set(multiprocessing.active_children()) - others
    # not `join`: the pool's own thread may be about to say that it has seen them end
    ended = [bool(connection.wait([child.sentinel], 60.0)) for child in left]
    assert killed and not thread.is_alive(), "the run waits for ever"
    assert "--processes" in str(failed[0]) and all(ended)


def test_the_time_model_counts_each_tier_at_its_rate() -> None:
    cell = Cell(Source("synthetic:chat", 1, 150), "lru", Tiers(60_000, 200_000))
    (result,) = run([cell], 1)
    machine = Machine(prefill_rate=1000, bytes_per_token=10, host_rate=5000, storage_rate=100, overhead_s=1)
    seconds = machine.ttft_s(result)
    hits = result.played.hits
    computed = result.prompt_tokens - hits["device"] - hits["host"]
    assert seconds == pytest.approx(1 + computed / 1000 + hits["host"] * 10 / 5000)
    assert row(result, 0.5, machine)["ttft_ms"]["mean"] > 1000


def test_the_command_prints_a_table_and_writes_the_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "rows.json"
    arguments = "replay synthetic:chat --limit 80 --policies lru,ghd,belady --capacities 50k,1M --processes 1"
    assert hiradix([*arguments.split(), "--advice", "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "belady" in shown and "seed 0" in shown and "hits per added GB" in shown
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 6 and all(r["synthetic"] and 0 <= r["hit_percent"] <= 100 for r in rows)


SIGNATURES = {"png": b"\x89PNG\r\n", "svg": b"<?xml"}


@pytest.mark.parametrize("kind", SIGNATURES)
def test_the_command_draws_hit_rates_over_capacities(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "deep" / f"plot.{kind}"
    arguments = "replay synthetic:chat --limit 40 --policies lru,ghd --capacities 50k,1M --processes 1"
    assert hiradix([*arguments.split(), "--plot", str(out)]) == 0
    drawn = out.read_bytes()
    assert drawn.startswith(SIGNATURES[kind]) and len(drawn) > 5000


def test_a_plot_without_what_draws_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"hiradix\[plots\]"):
        plot(tmp_path / "plot.svg", [])


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--policies nosuch", "nosuch"),
        ("--policies belady --host 1M", "belady"),
        ("--capacities x", "--capacities"),
        ("--warm 1", "--warm"),
        ("--storage 1M", "--host"),
        ("--prefill-rate 0", "--prefill-rate"),
        ("--prefill-rate nan", "--prefill-rate"),
        ("--capacities inf", "--capacities"),
        ("--write-policy x", "--hicache-write-policy"),
    ],
)
def test_a_bad_flag_is_named(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    host = ["--host", "1M"] if "--write-policy" in flags else []
    assert (
        hiradix(["replay", "synthetic:chat", "--limit", "5", "--processes", "1", *host, *flags.split()]) == 2
    )
    assert said in capsys.readouterr().err


def trace_of(folder: Path, *records: dict, before: str = "") -> Trace:
    path = folder / "trace.jsonl"
    path.write_text(before + "".join(json.dumps(record) + "\n" for record in records))
    return read_trace(path)


ONE = {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}


@pytest.mark.parametrize("before", ["\n", "\r\n \n", "\ufeff\n"])
def test_blank_first_lines_are_skipped(before: str, tmp_path: Path) -> None:
    assert len(trace_of(tmp_path, ONE, before=before).calls) == 1


def test_hash_ids_are_any_64_bits(tmp_path: Path) -> None:
    ids = [0, 2**63 - 1, 2**63, 2**64 - 1, -5]
    (call,) = trace_of(tmp_path, {**ONE, "input_length": 512 * 5, "hash_ids": ids}).calls
    assert [block % 2**64 for block in call.blocks.tolist()] == [one % 2**64 for one in ids]
    for bad in (2**64, -(2**63) - 1, 1.5, "a", True):
        with pytest.raises(ConfigError, match="trace.jsonl:1: .*hash_ids"):
            trace_of(tmp_path, {**ONE, "hash_ids": [1, bad]})


def test_a_delay_counts_from_the_sessions_request_before(tmp_path: Path) -> None:
    first = {"input_length": 512, "output_length": 1, "hash_ids": [1]}
    calls = trace_of(
        tmp_path,
        {**first, "session_id": "a", "timestamp": 1000},
        {**first, "session_id": "a", "delay": 500},
        {**first, "session_id": "a", "delay": 2000},
        {**first, "session_id": "b"},
        {**first, "session_id": "b", "delay": 1100},
    ).calls
    assert [call.time_s for call in calls] == [0.0, 1.0, 1.1, 1.5, 3.5]
    with pytest.raises(ConfigError, match="trace.jsonl:2: .*timestamp or delay"):
        trace_of(tmp_path, ONE, first)


def test_zstandard_is_read_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "trace.jsonl.zst"
    text = (json.dumps(ONE) + "\n").encode()
    path.write_bytes(zstandard.compress(text) + zstandard.compress(text))
    assert len(read_trace(path).calls) == 2
    path.write_bytes(b"no archive")
    with pytest.raises(ConfigError, match="trace.jsonl.zst: cannot be read"):
        read_trace(path)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match="zstandard"):
        read_trace(path)
