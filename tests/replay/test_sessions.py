"""Sessions of agents: both forms, bad input, and fleets of them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from hiradix.apps.traces.readers import read_trace
from hiradix.apps.traces.records import open_records
from hiradix.apps.traces.sessions import Fleet, SessionFile, SubAgent, read_sessions
from hiradix.cli import main as hiradix
from hiradix.errors import ConfigError

AGENTS = Path(__file__).resolve().parents[2] / "benchmarks" / "data" / "agentic_sessions.jsonl.xz"


def request(t: float, *ids: int, **more: object) -> dict:
    return {
        "t": t, "type": "n", "model": "m", "in": 64 * len(ids), "out": 5, "hash_ids": list(ids),
        "stop": "tool_use", "api_time": 1.0, **more,
    }  # fmt: skip


def kept(t: float, keep: int, *new: int) -> dict:
    shown = request(t, **{"keep": keep, "new": list(new), "in": 64 * (keep + len(new))})
    del shown["hash_ids"]
    return shown


def session(name: str, *requests: dict, **more: object) -> dict:
    return {
        "id": name, "models": ["m"], "block_size": 64, "tool_tokens": 512, "system_tokens": 512,
        "requests": list(requests), **more,
    }  # fmt: skip


def written(folder: Path, *sessions: dict) -> Path:
    path = folder / "agents.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in sessions))
    return path


def read(folder: Path, *sessions: dict) -> SessionFile:
    return read_sessions(open_records(written(folder, *sessions)))


IDS = list(range(1, 33))


def test_both_forms_are_the_same_sessions(tmp_path: Path) -> None:
    whole = session("a", request(0, *IDS[:16]), request(9, *IDS[:12], 90, 91), request(20, 5))
    short = session("a", kept(0, 0, *IDS[:16]), kept(9, 12, 90, 91), kept(20, 0, 5))
    assert read(tmp_path, whole).sessions == read(tmp_path, short).sessions


def test_a_sub_agent_has_a_prefix_and_a_clock_of_its_own(tmp_path: Path) -> None:
    below = {
        "t": 7.0,
        "type": "subagent",
        "tool_tokens": 64,
        "requests": [kept(1, 0, *IDS[:8]), kept(2, 8, 50)],
    }
    (one,) = read(tmp_path, session("a", kept(0, 0, *IDS), below, kept(30, 32, 40))).sessions
    assert isinstance(one.requests[1], SubAgent) and one.requests[1].head_tokens == 64
    assert [len(turn.ids) for turn in one.turns] == [32, 33]  # keeps of its own list's request before
    trace = read_trace(tmp_path / "agents.jsonl", fleet=Fleet(seed=3))
    times = [call.time_s - trace.calls[0].time_s for call in trace.calls]
    assert times == pytest.approx([0, 8, 9, 30]) and [len(c.blocks) for c in trace.calls] == [4, 1, 1, 4]


def leading(one: list[int], two: list[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, two)))


@pytest.mark.parametrize(
    "more, shares, common",
    [
        ({}, True, 2),  # 1,024 tokens of tools and system prompt
        ({}, False, 0),
        ({"system_tokens": 513}, True, 0),
        ({"hash_id_scope": "global"}, False, 4),
    ],
)
def test_sessions_share_their_heads_alone(more: dict, shares: bool, common: int, tmp_path: Path) -> None:
    scope = {k: v for k, v in more.items() if k == "hash_id_scope"}
    path = written(tmp_path, session("a", request(0, *IDS), **scope), session("b", request(0, *IDS), **more))
    trace = read_trace(path, fleet=Fleet(shares_heads=shares))
    assert trace.block_tokens == 512 and [call.prompt_tokens for call in trace.calls] == [2048, 2048]
    assert leading(trace.calls[0].blocks.tolist(), trace.calls[1].blocks.tolist()) == common


@pytest.mark.parametrize(
    "one, said",
    [
        (session("a", {**request(0, 1), "t": -1}), r":1: .*requests\[0\]: t is -1"),
        (session("a", {**request(0, 1), "t": "soon"}), r"requests\[0\]: t is no time"),
        (session("a", request(0, 1), {**request(0, 1), "in": -5}), r"requests\[1\]: in is -5"),
        (session("a", {**request(0, 1), "out": 1.5}), r"requests\[0\]: out is 1.5"),
        (session("a", {**request(0, 1), "hash_ids": "x"}), r"requests\[0\]: hash_ids is no list"),
        (session("a", {**request(0, 1), "stop": 5}), r"requests\[0\]: stop is no text"),
        (session("a", {**request(0, 1), "api_time": -2}), r"requests\[0\]: api_time is -2"),
        (session("a", kept(0, 3, 1)), r"requests\[0\]: keep is 3, and the request before has 0"),
        (session("a", {k: v for k, v in request(0, 1).items() if k != "model"}), r"requests\[0\]: no model"),
        (session("a", {k: v for k, v in kept(0, 0, 1).items() if k != "new"}), r"requests\[0\]: no new"),
        (session("a", [1]), r"requests\[0\] is no object"),  # type: ignore[arg-type]
        (session("a", {"t": 0, "type": "subagent", "requests": 5}), r"requests\[0\]: requests is no list"),
        (
            session("a", {"t": 0, "type": "subagent", "requests": [{**request(0, 1), "in": None}]}),
            r"requests\[0\]: requests\[0\]: no in",
        ),
        (
            session("a", {"t": 0, "type": "subagent", "requests": [{"type": "subagent", "requests": []}]}),
            r"requests\[0\]: requests\[0\]: type is subagent inside",
        ),
        (session("a", request(0, 1), block_size=100), "block_size is 100, no divisor of 512"),
        (session("a", request(0, 1), block_size=0), "block_size is 0"),
        (session("a", request(0, 1), tool_tokens="many"), "tool_tokens is many"),
        (session("a", request(0, 1), hash_id_scope="here"), "hash_id_scope is 'here'"),
        ({"requests": [], "block_size": 64}, "id"),
    ],
)
def test_a_bad_session_is_an_error_that_names_line_and_field(one: dict, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        read(tmp_path, one)
    with pytest.raises(ConfigError, match=r"agents.jsonl:2: "):
        read(tmp_path, session("good", request(0, 1)), one)


def test_two_sessions_of_one_id_are_refused(tmp_path: Path) -> None:
    """Found: their own ids were taken for the same blocks; at once, one of them was a bug of the policy's."""
    with pytest.raises(ConfigError, match=r"agents.jsonl:3: .*id is a, as that of a session before"):
        read(tmp_path, session("a", request(0, 1)), session("b", request(0, 1)), session("a", request(0, 2)))


def many(count: int) -> list[dict]:
    return [
        session(f"s{i}", *(request(10.0 * k, *range(100 * i, 100 * i + 16 + 8 * k)) for k in range(3)))
        for i in range(count)
    ]


def test_equal_fleets_are_equal_and_other_seeds_are_not(tmp_path: Path) -> None:
    path = written(tmp_path, *many(9))

    def shown(fleet: Fleet, limit: int | None = None) -> list[tuple[float, list[int]]]:
        return [(call.time_s, call.blocks.tolist()) for call in read_trace(path, limit, fleet).calls]

    fleet = Fleet(5, 30.0, 4)
    assert shown(fleet) == shown(fleet) and len(shown(fleet)) == 15
    assert shown(fleet) != shown(Fleet(5, 30.0, 5))
    assert shown(fleet, 7) == shown(fleet)[:7]
    assert [time_s for time_s, _ in shown(fleet)] == sorted(time_s for time_s, _ in shown(fleet))


def test_a_fleets_requests_say_whose_they_are_and_why_their_answers_ended(tmp_path: Path) -> None:
    below = {"type": "subagent", "t": 3.0, "requests": [request(0, 7, stop="end_turn")], "tool_tokens": 0}
    path = written(tmp_path, session("a", request(0, *IDS[:16]), below, request(9, *IDS, stop="end_turn")))
    calls = read_trace(path).calls
    assert [(call.session, call.stop) for call in calls] == [
        ("a", "tool_use"), ("a/1", "end_turn"), ("a", "end_turn"),
    ]  # fmt: skip


def test_too_few_sessions_and_bad_flags_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(written(tmp_path, *many(3)))
    for flags, said in (
        ("--sessions 4", "--sessions 4: agents has 3"),
        ("--sessions 0", "--sessions"),
        ("--mean-gap 0", "--mean-gap"),
        ("--mean-gap nan", "--mean-gap"),
    ):
        assert hiradix(["replay", path, "--processes", "1", *flags.split()]) == 2
        assert said in capsys.readouterr().err


def test_the_committed_sessions_are_those_of_the_notice() -> None:
    file = read_sessions(open_records(AGENTS))
    assert file.source == "cdcd16b9c796d1de007d84cd1adefd3a5bce3cf13fa69c157b3088210e50c23b"
    requests = [r for s in file.sessions for r in s.requests]
    assert len(file.sessions) == 350 and sum(isinstance(r, SubAgent) for r in requests) == 25
    below = sum(len(r.requests) for r in requests if isinstance(r, SubAgent))
    assert len(requests) - 25 + below == 25_226


# -- the public collection's own files ------------------------------------------------------

# As its documentation and its files have them, in all their fields; ids of our own making.
ASKED = {
    "t": 0.0, "type": "s", "model": "claude-sonnet-4-20250514", "in": 1060, "out": 86,
    "hash_ids": list(range(1, 17)), "input_types": ["text"], "output_types": ["text", "thinking", "tool_use"],
    "stop": "tool_use", "api_time": 7.34, "think_time": 0.0,
}  # fmt: skip
PUBLISHED = {
    "id": "f64a8d4c-12d", "models": ["claude-sonnet-4-20250514", "claude-haiku-4-5-20251001"],
    "block_size": 64, "hash_id_scope": "local", "tool_tokens": 448, "system_tokens": 64,
    "requests": [
        ASKED,
        {**ASKED, "type": "n"},  # the same prompt once more, not streamed
        {
            "t": 10.0, "type": "subagent", "agent_id": "agent_001", "subagent_type": "Explore",
            "duration_ms": 3000, "total_tokens": 1200, "tool_use_count": 1, "status": "completed",
            "models": ["claude-haiku-4-5-20251001"], "tool_tokens": 0, "system_tokens": 0,
            "requests": [
                {**ASKED, "model": "claude-haiku-4-5-20251001", "in": 512, "hash_ids": list(range(40, 48))},
                {**ASKED, "t": 4.0, "in": 1024, "hash_ids": list(range(40, 56)), "stop": "end_turn"},
            ],
        },
        {**ASKED, "t": 32.0, "in": 1600, "hash_ids": list(range(1, 26)), "stop": "", "api_time": None},
    ],
    "totals": {"parent_tokens": {"input": 3720, "output": 258}, "subagent_count": 1},
}  # fmt: skip


def published(**more: object) -> dict:
    """As it is in a file, for a test to change."""
    return {**json.loads(json.dumps(PUBLISHED)), **more}


@pytest.mark.parametrize("indent", [None, 2])
def test_a_file_of_the_public_collection_is_a_session(indent: int | None, tmp_path: Path) -> None:
    path = tmp_path / "trace_0001.json"
    path.write_text(json.dumps(PUBLISHED, indent=indent))
    (one,) = read_sessions(open_records(path)).sessions
    assert (one.name, one.block_tokens, one.head_tokens, one.is_local) == ("f64a8d4c-12d", 64, 512, True)
    assert [(r.time_s, r.prompt_tokens, r.output_tokens, len(r.ids), r.stop, r.api_s) for r in one.turns] == [
        (0.0, 1060, 86, 16, "tool_use", 7.34),
        (0.0, 1060, 86, 16, "tool_use", 7.34),
        (32.0, 1600, 86, 25, "", 0.0),
    ]
    below = one.requests[2]
    assert isinstance(below, SubAgent) and (below.time_s, below.head_tokens) == (10.0, 0)
    assert [(r.time_s, len(r.ids), r.stop) for r in below.requests] == [
        (0, 8, "tool_use"),
        (4, 16, "end_turn"),
    ]
    trace = read_trace(path)
    first = trace.calls[0].time_s
    assert [(round(c.time_s - first, 6), len(c.blocks), c.session, c.stop) for c in trace.calls] == [
        (0, 2, "f64a8d4c-12d", "tool_use"), (0, 2, "f64a8d4c-12d", "tool_use"),
        (10, 1, "f64a8d4c-12d/2", "tool_use"), (14, 2, "f64a8d4c-12d/2", "end_turn"),
        (32, 3, "f64a8d4c-12d", ""),
    ]  # fmt: skip
    asked = [c.blocks.tolist() for c in trace.calls]
    assert asked[0] == asked[1] == asked[4][:2] and not set(asked[3]) & set(asked[4])
    assert not set(asked[2]) & set(asked[3])  # another model, another prefix


def test_times_of_a_sub_agent_may_be_those_of_the_session(tmp_path: Path) -> None:
    later = published()
    for asked in later["requests"][2]["requests"]:
        asked["t"] += 10.0
    del later["tool_tokens"]
    later["system_tokens"] = None
    del later["requests"][0]["stop"]
    (one,) = read(tmp_path, later).sessions
    below = one.requests[2]
    assert isinstance(below, SubAgent) and below.time_s == 10.0 and one.head_tokens == 0
    assert [r.time_s for r in below.requests] == [0.0, 4.0] and one.turns[0].stop == ""


def test_a_folder_of_the_collection_is_all_its_sessions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    for name in ("b", "a"):
        (folder / f"trace_{name}.json").write_text(json.dumps(published(id=name)))
    (folder / "cache_hit_rates.txt").write_text("a 0.9\n")
    trace = read_trace(folder)
    assert len(trace.calls) == 10 and {c.session for c in trace.calls} == {"a", "b", "a/2", "b/2"}
    assert trace.name.startswith("traces, 2 sessions") and len(trace.source) == 64
    assert (
        hiradix(["replay", str(folder), "--capacities", "1M", "--policies", "lru", "--processes", "1"]) == 0
    )
    assert "traces, 2 sessions" in capsys.readouterr().out
    (folder / "trace_c.json").write_text(json.dumps(published(id="a")))
    with pytest.raises(ConfigError, match="trace_c.json:1: .*id is a, as that of a session before"):
        read_trace(folder)
    (folder / "trace_c.json").write_text('{\n"id": ')
    with pytest.raises(ConfigError, match="trace_c.json:1: not one JSON object"):
        read_trace(folder)
    (folder / "trace_c.json").write_text('{"tokens": [1]}')
    with pytest.raises(ConfigError, match="trace_c.json: no session"):
        read_trace(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="empty: a folder without sessions"):
        read_trace(tmp_path / "empty")
