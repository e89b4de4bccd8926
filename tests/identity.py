"""The identity rule: when two greedy fp32 answers to one prompt count as the same.

They are compared token by token. Where they first differ, the log probabilities of the two candidates after
the common beginning must differ by less than 1e-4: a tie that rounding may break either way. Such answers
are flagged and counted; more than 0.5 % of them fail, and so does any other difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

MAX_TIE = 1e-4
MAX_FLAGGED_SHARE = 0.005
FIRST_LOGPROBS = 1e-4  # the first token's log probabilities: nothing but rounding lies between two of them

LogprobsAfter = Callable[[list[int]], torch.Tensor]  # tokens so far -> float [vocab]


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """Index of the first token that differs (or is missing), None when the answers are equal."""
    for at, (a, b) in enumerate(zip(expected, got, strict=False)):
        if a != b:
            return at
    return None if len(expected) == len(got) else min(len(expected), len(got))


@dataclass
class Identity:
    """Counts answers that are equal, flagged (a tie) or different."""

    equal: int = 0
    flagged: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)

    def add(self, name: str, expected: Sequence[int], got: Sequence[int], tie: float | None) -> None:
        """Judge one answer; `tie`: how far the candidates' log probabilities are apart where they differ."""
        at = first_difference(expected, got)
        if at is None:
            self.equal += 1
        elif tie is not None and tie < MAX_TIE and at < min(len(expected), len(got)):
            self.flagged.append(f"{name}: a tie at token {at} ({tie:.1e})")
        else:
            self.different.append(f"{name}: token {at} differs by {tie}: {expected[at:][:4]} {got[at:][:4]}")

    def compare(
        self,
        prompt: Sequence[int],
        expected: Sequence[int],
        got: Sequence[int],
        logprobs_after: LogprobsAfter,
    ) -> None:
        """Judge one answer with a model at hand: `logprobs_after` is asked only where they differ."""
        at = first_difference(expected, got)
        tie = None
        if at is not None and at < min(len(expected), len(got)):
            logprobs = logprobs_after([*prompt, *expected[:at]])
            tie = abs(float(logprobs[expected[at]] - logprobs[got[at]]))
        self.add(f"prompt of {len(prompt)} tokens", expected, got, tie)

    @property
    def num_answers(self) -> int:
        return self.equal + len(self.flagged) + len(self.different)

    @property
    def holds(self) -> bool:
        """Whether the rule is kept."""
        return not self.different and len(self.flagged) <= MAX_FLAGGED_SHARE * self.num_answers

    def assert_holds(self) -> None:
        assert self.num_answers > 0
        assert self.holds, f"{self.equal} of {self.num_answers} equal; {self.flagged}; {self.different}"


def judged_by_logprobs(expected: Sequence[dict[str, Any]], got: Sequence[dict[str, Any]]) -> Identity:
    """Each answer held against the one expected.

    An answer has `tokens`, and `logprobs`: of each token the likeliest ones' log probabilities, by their ids
    as texts. Without those of a candidate there is no tie.
    """
    identity = Identity()
    for number, (want, have) in enumerate(zip(expected, got, strict=True)):
        at = first_difference(want["tokens"], have["tokens"])
        tie = None
        if at is not None and at < min(len(want["tokens"]), len(have["tokens"])):
            top = want["logprobs"][at]
            pair = [top.get(str(answer["tokens"][at])) for answer in (want, have)]
            tie = None if None in pair else abs(pair[0] - pair[1])
        identity.add(f"answer {number}", want["tokens"], have["tokens"], tie)
    return identity
