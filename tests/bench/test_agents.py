"""The player of recorded agents: what it sends when, what it makes of the answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hiradix.apps.bench.agents import AgentPlayer, AgentRun, Smaller, draw_agents, main
from hiradix.apps.bench.client import BenchError, Sources
from hiradix.apps.traces.crowd import Agent, Crowd, Turn
from hiradix.errors import ConfigError
from tests.bench.fake_server import Body, Reply, Seen, fake_server
from tests.replay.test_sessions import request, session, written

FAST = Smaller(scale=64, hurry=1e6, vocabulary=500)


class Completion(Reply):
    """An answer in the form of completions: token ids, one a chunk."""

    def chunks(self) -> Iterator[Body]:
        for chunk in super().chunks():
            for choice in chunk["choices"]:
                if said := choice.pop("delta", {}).get("content"):
                    choice["text"], choice["token_ids"] = said, [len(said)]
            yield chunk


def answer(body: Body) -> Reply:
    """Half of the prompt was on the device."""
    num_tokens = len(body["prompt"])
    return Completion(("a",) * body["max_tokens"], num_tokens, (num_tokens // 2, 1, 0))


def agents() -> list[Agent]:
    def turn(*blocks: int) -> Turn:
        return Turn(np.array(blocks, np.int64), 130, 1.0, "tool_use")

    return [
        Agent("one", 0.0, (turn(1, 2), turn(1, 2, 3), turn(1, 4))),
        Agent("two", 5.0, (turn(1, 7), turn(1, 7, 8))),
    ]


def play(tells: bool = True, answer=answer) -> tuple[AgentRun, Seen]:
    with fake_server(answer) as (url, seen):
        return asyncio.run(AgentPlayer(url, FAST, tells=tells).play(agents())), seen


def test_prompts_share_what_the_recording_shares() -> None:
    played, seen = play()
    prompts = {json.dumps(body["prompt"]): body for body in seen.bodies}
    one = (
        FAST.prompt(agents()[0].turns[0]),
        FAST.prompt(agents()[0].turns[1]),
        FAST.prompt(agents()[1].turns[0]),
    )
    assert [len(prompt) for prompt in one] == [16, 24, 16]
    assert one[1][:16] == one[0] and one[2][:8] == one[0][:8] and one[2][8:] != one[0][8:]
    assert all(json.dumps(prompt) in prompts for prompt in one) and len(prompts) == 5
    assert all(10 <= token < 500 for prompt in one for token in prompt)
    assert {body["max_tokens"] for body in seen.bodies} == {2}
    assert all(body["temperature"] == 0 and body["ignore_eos"] and body["stream"] for body in seen.bodies)
    assert [(turned.agent, turned.turn) for turned in played.turns] == [
        ("one", 0), ("one", 1), ("one", 2), ("two", 0), ("two", 1),
    ]  # fmt: skip


def test_only_the_last_turn_says_that_the_session_ends_and_only_where_it_is_told() -> None:
    told, silent = play()[1].bodies, play(tells=False)[1].bodies
    ends = [body for body in told if body.get("end_of_session")]
    assert [len(body["prompt"]) for body in ends] in ([16, 24], [24, 16])
    assert len(told) == len(silent) == 5 and not any("end_of_session" in body for body in silent)


def test_figures_are_of_all_turns() -> None:
    played, _ = play()
    figures = played.figures()
    assert played.turns[0].sources == Sources(8, 1, 0, 7)
    assert figures["requests"] == 5
    assert figures["hits device"] == pytest.approx(50.0) and figures["hits host"] == pytest.approx(
        100 * 5 / 96
    )
    assert 0 < figures["TTFT p50"] <= figures["TTFT p95"] <= figures["TTFT longest"] <= figures["took"]
    assert set(played.answers()) == {"one/0", "one/1", "one/2", "two/0", "two/1"}
    assert len(set(played.answers().values())) == 1


def test_another_answer_has_another_digest() -> None:
    def other(body: Body) -> Reply:
        return Completion(("a", "bb") if len(body["prompt"]) == 24 else ("a", "a"), len(body["prompt"]))

    one, two = play()[0].answers(), play(answer=other)[0].answers()
    assert [name for name in one if one[name] != two[name]] == ["one/1", "two/1"]


@pytest.mark.parametrize(
    "reply", [Completion(("a",), finish=False), Completion(("a",), usage=False), Completion(())]
)
def test_what_is_no_whole_answer_ends_the_run(reply: Reply) -> None:
    with pytest.raises(BenchError, match="stream ended"):
        play(answer=lambda body: reply)


def test_a_refusal_names_the_turn() -> None:
    with pytest.raises(BenchError, match=r"(one|two)/0: HTTP 503"):
        play(answer=lambda body: Completion(("a",), status=200 if len(body["prompt"]) == 24 else 503))


@pytest.mark.parametrize("fields", [{"scale": 0}, {"scale": 100}, {"hurry": 0.0}, {"vocabulary": 10}])
def test_what_cannot_be_made_small_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"--{next(iter(fields))}"):
        Smaller(**fields)  # type: ignore[arg-type]


def test_the_command_prints_figures_and_keeps_turns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sessions = [
        session(f"s{i}", *(request(9.0 * k, *range(16 + 8 * k)) for k in range(12))) for i in range(3)
    ]
    path, out = written(tmp_path, *sessions), tmp_path / "turns.json"
    assert len(draw_agents(path, Crowd(2, turns=10))) == 2
    flags = ["--sessions", str(path), "--agents", "2", "--turns", "3", "--hurry", "1e6", "--out", str(out)]
    with fake_server(answer) as (url, _):
        assert main([url, *flags]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 6 == len(json.loads(out.read_text())["turns"])
    assert main([url, *flags, "--scale", "7"]) == 2
    assert "--scale must divide 512" in capsys.readouterr().err
