"""The record of a run: the arms of the ladder, the faults found in them, and whether a hit really was one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from hiradix.apps.certify.client import Reply
from hiradix.apps.certify.judge import AnswerDifference, Likeness


class Fault(Enum):
    """The faults that a server may have."""

    ANSWER = "wrong answer"
    SALT = "salt leak"
    CLAIM = "false claim"


class State(Enum):
    """The result of an arm. FAILED: requests were not answered."""

    RIGHT = "right"
    WRONG = "WRONG"
    FAILED = "failed"
    NOT_PROVEN = "not proven"
    NOT_OFFERED = "not offered"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Finding:
    """One wrong thing. steps: what had been done, in order; reference and got: the requests to send again."""

    arm: str
    fault: Fault
    prompt: str
    sentence: str
    steps: Sequence[str]
    reference: Reply | None
    got: Reply


@dataclass(frozen=True)
class Seen:
    """An answer, and the prompt tokens that it had from the cache, all and by tier: None where nobody tells."""

    reply: Reply
    cached: int | None
    tiers: Mapping[str, int] | None

    @property
    def below_device(self) -> int:
        """Tokens that came from below the device, as far as it is told."""
        return sum(number for tier, number in (self.tiers or {}).items() if tier != "device")


@dataclass
class Arm:
    """One rung. needs_hits: without a hit that is shown to be one it is not proven; hits counts those.

    without: answers that there was no cold one to compare with; texts: those that differ from cold ones and
    have no logprobs. unproven: why the arm proves nothing though answers are right.
    """

    name: str
    what: str
    needs_hits: bool = True
    asked: int = 0
    hits: int = 0
    refused: int = 0
    without: int = 0
    failures: list[str] = field(default_factory=list)
    tokens: Counter[str] = field(default_factory=Counter)
    kinds: Counter[Likeness] = field(default_factory=Counter)
    moved: float = 0.0
    findings: list[Finding] = field(default_factory=list)
    texts: list[tuple[Reply, Reply]] = field(default_factory=list)
    note: str = ""
    unproven: str = ""
    outcome: State | None = None

    def see(self, seen: Seen, is_hit: bool) -> None:
        """Count an answer."""
        self.asked += 1
        self.hits += is_hit
        if seen.tiers is not None:
            self.tokens.update(seen.tiers)
        elif seen.cached:
            self.tokens["cached"] += seen.cached

    def add(self, difference: AnswerDifference) -> None:
        """Count a verdict."""
        self.kinds[difference.kind] += 1
        self.moved = max(self.moved, difference.moved)

    @property
    def num_compared(self) -> int:
        """Answers that were held against a reference."""
        return sum(self.kinds.values())

    @property
    def state(self) -> State:
        """The arm's verdict."""
        if self.findings:
            return State.WRONG
        if self.outcome is not None:
            return self.outcome
        if self.failures:
            return State.FAILED
        if not self.asked:
            return State.NOT_RUN
        if self.unproven or not self.num_compared or (self.needs_hits and not self.hits):
            return State.NOT_PROVEN
        return State.RIGHT

    @property
    def reason(self) -> str:
        """The reason why the arm is not right, in a few words."""
        if self.findings:
            return self.findings[0].sentence
        if self.failures and self.state is State.FAILED:
            return f"{len(self.failures)} requests failed: {self.failures[0]}"
        if self.state is State.NOT_PROVEN:
            if self.unproven:
                return self.unproven
            return "no hit was seen" if self.num_compared else "no cold answer to compare with"
        return self.note
