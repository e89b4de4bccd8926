"""A planted fault is found by its name, whatever the server tells of itself; an exact server is never blamed."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from hiradix.apps.certify import examiner as examiner_module
from hiradix.apps.certify import report
from hiradix.apps.certify.client import ServerUnderTest
from hiradix.apps.certify.examiner import Examiner, RunSettings
from hiradix.apps.certify.ladder import Ladder, begun
from hiradix.apps.certify.main import ARMS
from hiradix.apps.certify.record import Fault, State
from tests.certify.fake import URL, Fake, Traits
from tests.seeds import is_enough, seeded, seeds


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examiner_module, "COUNT_S", ())


class Restarted(Ladder):
    """A ladder whose command restarts the fake."""

    fake: Fake

    async def _run_restart(self, command: str) -> None:
        self.fake.restart()


def certified(traits: Traits, seed: int = 0, **settings: object) -> Restarted:
    """A whole run over a fake."""
    fake = Fake(traits, seed)

    async def run() -> Restarted:
        server = ServerUnderTest(URL, transport=fake.transport, clock=fake.clock, max_tokens=8)
        chosen = RunSettings(f"run{seed}", settle_s=0.0, prompt_tokens=320, restart="yes", minutes=1e6)
        async with server:
            examiner = Examiner(server, replace(chosen, **settings))  # type: ignore[arg-type]
            await begun(examiner)
            ladder = Restarted(examiner)
            ladder.fake = fake
            await ladder.climb()
            return ladder

    return asyncio.run(run())


def found(ladder: Ladder) -> set[tuple[str, Fault]]:
    return {(f.arm, f.fault) for arm in ladder.arms.values() for f in arm.findings}


def shown(ladder: Ladder) -> str:
    findings = [f"{f.arm}: {f.sentence}" for arm in ladder.arms.values() for f in arm.findings]
    return report.table(ladder.arms) + "\n" + "\n".join(findings)


PLANTED = {
    "device": "device",
    "page": "split",
    "salt": "salt",
    "salt below": "salt",
    "pressure": "pressure",
    "flush": "flush",
    "restart": "restart",
    "stream": "stream",
    "tail": "tail",
    "turns": "turns",
    "overload": "overload",
    "abort": "abort",
    "claim": "cold",
}
FAULTS = {"salt": Fault.SALT, "salt below": Fault.SALT, "claim": Fault.CLAIM}
SMALL = {"prompt_tokens": 200, "pressure_tokens": 4000}
SMALL_TRAITS = {"device_pages": 220, "page": 16}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found_in_its_arm(fault: str) -> None:
    ladder = certified(Traits(fault=fault, tiers=True), pressure_tokens=8000)
    assert (PLANTED[fault], FAULTS.get(fault, Fault.ANSWER)) in found(ladder), shown(ladder)
    assert report.status(ladder.examiner, ladder.arms, []) == 1
    if fault in ("flush", "restart", "turns", "tail"):  # nothing before it is blamed
        assert all(ladder.arms[name].state is State.RIGHT for name in ("cold", "device", "split", "salt"))
    if fault == "claim":
        assert {f for _, f in found(ladder)} == {Fault.CLAIM}, "a server that lies is not said to leak"


TELLING = {
    "usage": {},
    "tiers": {"tiers": True},
    "metrics": {"usage": False, "metrics": "vllm"},
    "time": {"usage": False},
    "chat": {"completions": False},
    "no logprobs": {"logprobs": False},
    "copies without logprobs": {"logprobs": False, "copies": True},
    "flush": {"salts": False, "below": False},
    "nothing makes it cold": {"salts": False, "flush": False},
    "nothing but facts": {"salts": False, "flush": False, "copies": True, "logprobs": False},
    "size": {"size_known": True},
    "noise": {"noise": 0.03},
    "noise without logprobs": {"noise": 0.03, "logprobs": False},
    "noise within": {"noise": 0.02, "fault": "noise within"},
    "short context": {"context": 700},
    "pages of 4": {"page": 4, "device_pages": 900},
    "pages of 64": {"page": 64, "device_pages": 60},
}


@seeded
@pytest.mark.parametrize("kind", TELLING)
def test_no_exact_server_is_blamed(kind: str) -> None:
    for seed in seeds(1):
        ladder = certified(Traits(**(SMALL_TRAITS | TELLING[kind])), seed, **SMALL)  # type: ignore[arg-type]
        assert found(ladder) == set(), shown(ladder)
        assert is_enough(ladder.arms["device"].state is State.RIGHT), shown(ladder)
        if kind in ("usage", "tiers", "metrics", "chat", "noise", "size"):
            assert is_enough(report.status(ladder.examiner, ladder.arms, ARMS) == 0), shown(ladder)


@pytest.mark.parametrize(
    "kind", ["metrics", "time", "chat", "no logprobs", "flush", "nothing but facts", "noise"]
)
def test_a_fault_is_found_however_little_is_told(kind: str) -> None:
    traits = Traits(**(SMALL_TRAITS | TELLING[kind] | {"fault": "device"}))  # type: ignore[arg-type]
    ladder = certified(traits, **SMALL)
    assert ladder.arms["device"].state is State.WRONG, shown(ladder)


def test_noise_that_only_hits_have_is_wrong_beyond_what_was_measured() -> None:
    ladder = certified(Traits(noise=0.02, fault="noise beyond"), **SMALL)
    assert ladder.arms["device"].state is State.WRONG, shown(ladder)
    assert ladder.arms["noise"].state is State.RIGHT and ladder.arms["cold"].state is State.RIGHT


def test_without_a_cache_nothing_is_proven() -> None:
    ladder = certified(Traits(device_pages=0, below=False), **SMALL)
    assert found(ladder) == set()
    assert report.status(ladder.examiner, ladder.arms, []) == 2
    assert "device: not proven" in report.verdict(ladder.examiner, ladder.arms, [])


def test_noise_that_hides_everything_is_no_verdict() -> None:
    ladder = certified(Traits(noise=0.35), **SMALL)
    assert ladder.examiner.judge.is_blind and report.status(ladder.examiner, ladder.arms, []) == 2


def test_what_is_below_must_have_been_reached() -> None:
    ladder = certified(Traits(device_pages=10_000, tiers=True), prompt_tokens=200, pressure_tokens=400)
    pressure = ladder.arms["pressure"]
    assert pressure.asked and not pressure.hits and pressure.state is State.NOT_PROVEN
    assert report.status(ladder.examiner, ladder.arms, ["pressure"]) == 2
    assert report.status(ladder.examiner, ladder.arms, []) == 0


def test_time_that_is_over_ends_the_run() -> None:
    ladder = certified(Traits(), minutes=0.4, **SMALL)
    states = [arm.state for arm in ladder.arms.values()]
    assert State.NOT_RUN in states and ladder.arms["restart"].reason == "out of time"
    assert found(ladder) == set()
