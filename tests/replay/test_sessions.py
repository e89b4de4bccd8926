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
