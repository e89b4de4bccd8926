"""Agents that wait for their answers, on the real cache and the real order of service."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from hiradix.apps.replay.closed_loop import Answered, ClosedLoop, ServerRates
from hiradix.apps.replay.closed_report import ClosedCell, most_agents
from hiradix.apps.replay.simulated_cache import Tiers
from hiradix.apps.replay.timing import Machine
from hiradix.apps.traces.crowd import Agent, Crowd, Turn
from hiradix.apps.traces.sessions import BLOCK, AgentRequest, AgentSession, SessionFile
from hiradix.cli import main as hiradix
from hiradix.errors import ConfigError
from hiradix.policy.admission import admission_policies, make_admission
from hiradix.tree import Tier
from tests.replay.test_sessions import request, session, written
from tests.seeds import seeded, seeds

SERVER = ServerRates(Machine(prefill_rate=5_000.0, bytes_per_token=1000.0, host_rate=1e8, storage_rate=2e7))


def agents_of(seed: int, count: int = 8, turns: int = 6) -> list[Agent]:
    """Prompts that grow, some of which lose their tail; short and long thoughts."""
    rng, made = random.Random(seed), []
    for number in range(count):
        blocks, fresh, own = [], iter(range(1000 * number, 1000 * number + 999)), []
        for _ in range(turns):
            blocks = blocks[: len(blocks) - rng.choice((0, 0, 1))]
            blocks += [next(fresh) for _ in range(rng.randint(2, 9))]
            think_s = rng.choice((1.0, 4.0, 60.0))
            own.append(Turn(np.array(blocks, np.int64), rng.randint(1, 900), think_s, "tool_use"))
        made.append(Agent(f"agent {number}", rng.random() * 20, tuple(own)))
    return made


def play(agents: list[Agent], schedule: str, tiers: Tiers, eviction: str = "lru") -> Answered:
    loop = ClosedLoop(agents, eviction, tiers, make_admission(schedule, tiers.device + tiers.host), SERVER)
    found = loop.play()
    loop.simulated.cache.check()
    assert loop.simulated.tree.protected_pages(Tier.DEVICE) == 0, "a lock is left"
    assert loop.simulated.cache.supply.device_room() == tiers.device // BLOCK, "a page is lost"
    if tiers.host:
        assert loop.simulated.cache.supply.host_room() == tiers.host // BLOCK, (
            "host pages are held for nobody"
        )
    return found


SMALL = Tiers(90 * BLOCK)


@seeded
@pytest.mark.parametrize("schedule", admission_policies())
@pytest.mark.parametrize("eviction", ["lru", "ghd"])
@pytest.mark.parametrize("seed", seeds(3))
def test_every_turn_is_served_once_and_equal_runs_are_equal(schedule: str, eviction: str, seed: int) -> None:
    agents = agents_of(seed)
    one, two = (play(agents, schedule, SMALL, eviction) for _ in range(2))
    assert len(one.wait_s) == 48 and one.wait_s.min() > 0
    assert one.prompt_tokens == sum(len(turn.blocks) for agent in agents for turn in agent.turns) * BLOCK
    assert 0 < sum(one.hit_tokens.values()) < one.prompt_tokens
    assert one.decisions == two.decisions and one.wait_s.tolist() == two.wait_s.tolist()


@pytest.mark.parametrize("schedule", admission_policies())
def test_lower_tiers_serve_what_the_device_has_lost(schedule: str) -> None:
    agents = agents_of(5)
    device = play(agents, schedule, SMALL)
    host = play(agents, schedule, Tiers(SMALL.device, 150 * BLOCK))
    stored = play(agents, schedule, Tiers(SMALL.device, 100 * BLOCK, 10_000 * BLOCK))
    assert device.hit_tokens["host"] == 0 < host.hit_tokens["host"]
    assert stored.hit_tokens["storage"] > 0 and device.hit_percent < stored.hit_percent
    assert host.wait_s.mean() < device.wait_s.mean()


def test_alone_and_with_room_an_agent_waits_for_what_is_new() -> None:
    (agent,) = agents_of(1, count=1)
    found = play([agent], "cached", Tiers(1000 * BLOCK))
    before: list[int] = []
    for turn, wait_s in zip(agent.turns, found.wait_s.tolist()):
        blocks = turn.blocks.tolist()
        same = next(
            (i for i, (a, b) in enumerate(zip(before, blocks)) if a != b), min(len(before), len(blocks))
        )
        assert wait_s == pytest.approx(0.02 + (len(blocks) - same) * BLOCK / 5000)
        before = blocks


@seeded
@pytest.mark.parametrize("seed", seeds(12))
def test_nobody_waits_past_its_deadline_but_for_want_of_pages(seed: int) -> None:
    """As long at most as whoever was next had none: whoever has them is answered."""
    found = play(agents_of(seed, count=14), "cached", SMALL)
    assert (found.wait_s - found.due_s - found.short_s).max() <= 1e-5


def test_sessions_are_told_by_their_prefixes_where_nobody_names_them() -> None:
    agents, tiers = agents_of(3), SMALL
    loop = ClosedLoop(agents, "lru", tiers, make_admission("cached", tiers.device), SERVER, is_anonymous=True)
    found = loop.play()
    assert len(found.wait_s) == 48 and found.hit_percent > play(agents, "fcfs", SMALL).hit_percent


def test_a_prompt_longer_than_the_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="--capacities"):
        play(agents_of(1), "fcfs", Tiers(20 * BLOCK))


def file_of(count: int, turns: int = 12) -> SessionFile:
    made = []
    for number in range(count):
        own = tuple(
            AgentRequest(20.0 * k, 64 * (16 + 8 * k), 40, "m", tuple(range(16 + 8 * k)), "tool_use", 5.0)
            for k in range(turns)
        )
        made.append(AgentSession(f"s{number}", 64, 0, own))
    return SessionFile("made", "0", tuple(made))


def test_a_crowd_is_drawn_by_its_seed_and_thinks_as_recorded() -> None:
    file = file_of(6)
    crowd = Crowd(4, turns=10, spread_s=30.0, seed=2)
    one, two, other = (c.drawn(file) for c in (crowd, crowd, Crowd(4, 10, 30.0, 3)))
    assert [(a.name, a.start_s) for a in one] == [(a.name, a.start_s) for a in two]
    assert [a.name for a in one] != [a.name for a in other]
    assert all(len(a.turns) == 10 and 0 <= a.start_s < 30 for a in one)
    assert [turn.think_s for turn in one[0].turns] == [15.0] * 9 + [0.0]
    with pytest.raises(ConfigError, match="--sessions 7: made has 6"):
        Crowd(7).drawn(file)
    with pytest.raises(ConfigError, match="--sessions 1: made has 0"):
        Crowd(1).drawn(file_of(3, turns=5))


def test_the_most_agents_are_those_who_wait_no_longer() -> None:
    file = file_of(40)
    cell = ClosedCell(Crowd(1, 10, 5.0, shares_heads=False), "lru", Tiers(60 * BLOCK), "cached", SERVER)
    most = most_agents(cell, file, 1.0)
    assert 1 < most < 40
    assert most_agents(cell, file, 1e-6) == 0 and most_agents(cell, file, 1e9) == 40
    assert most_agents(cell, file, 1e9, most=5) == 5


def test_the_command_plays_agents_by_each_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sessions = [
        session(f"s{i}", *(request(9.0 * k, *range(16 + 8 * k)) for k in range(12))) for i in range(4)
    ]
    path, out = str(written(tmp_path, *sessions)), tmp_path / "rows.json"
    flags = "--closed-loop --sessions 3 --turns 10 --spread 5 --capacities 20k,1M --p95 5"
    assert hiradix(["replay", path, *flags.split(), "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    rows = json.loads(out.read_text())["rows"]
    assert [(r["schedule_policy"], r["device_tokens"]) for r in rows] == [
        (name, size) for size in (20_000, 1_000_000) for name in admission_policies()
    ]
    assert all(r["requests"] == 30 and r["most_agents"] <= 4 for r in rows)
    assert "lru, cached" in shown and "longest" in shown and "per GiB" in shown


@pytest.mark.parametrize(
    "flags, said",
    [
        ("", "--sessions"),
        ("--sessions 2 --schedule-policy best", "--schedule-policy: 'best' is not one of fcfs, lpm, cached"),
        ("--sessions 2 --decode-rate 0", "--decode-rate"),
        ("--sessions 2 --chunk 0", "--chunk"),
        ("--sessions 2 --turns 0", "--turns"),
        ("--sessions 2 --spread -1", "--spread"),
        ("--sessions 2 --p95 0", "--p95"),
        ("--sessions 0", "--sessions"),
        ("--sessions 9", "--sessions 9"),
        ("--sessions 2 --capacities 1k", "--capacities"),
    ],
)
def test_a_bad_flag_is_named(
    flags: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sessions = [session(f"s{i}", *(request(9.0 * k, *range(16 + k)) for k in range(12))) for i in range(3)]
    path = str(written(tmp_path, *sessions))
    assert hiradix(["replay", path, "--closed-loop", *flags.split()]) == 2
    assert said in capsys.readouterr().err


def test_a_trace_without_sessions_is_no_closed_loop(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n')
    assert hiradix(["replay", str(path), "--closed-loop", "--sessions", "1"]) == 2
    assert "--closed-loop needs sessions" in capsys.readouterr().err
