"""Judges whether two greedy answers to one prompt count as the same, on an engine that may not be exact.

Rounding differs with what else is in a batch, so equal requests get log probabilities that differ a little, and
a tie may fall either way. How much that is, is measured first, on answers that used no cache (`Noise`). An
answer is wrong where more than that stands between the token it has and the one it should have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from hiradix.apps.certify.client import Reply, Token

FACTOR = 5.0
"""Noise is a maximum over some hundred tokens; what is judged are thousands."""
TIE_FLOOR = 1e-4
"""Natural units of log probability: what fp32 alone may do to a tie."""
DRIFT_FLOOR = 0.01
"""The same token with another log probability is judged more coarsely: no answer has changed yet."""
GROSS = 1.0
"""No engine's rounding does this: such a difference between cold answers is no noise."""


class Likeness(Enum):
    """The result of a comparison."""

    EQUAL = "equal"
    TIE = "tie"
    DRIFT = "drift"
    WRONG = "wrong"
    TEXT = "text"
    """Other text on a server that tells no log probabilities: decided by how often cold answers do that."""


@dataclass(frozen=True)
class AnswerDifference:
    """at: index of the first token (without logprobs: character) that differs; gap: by how much it should
    have won; moved: how far equal tokens' log probabilities are apart at most."""

    kind: Likeness
    at: int | None = None
    expected: str = ""
    got: str = ""
    gap: float = 0.0
    moved: float = 0.0

    def sentence(self) -> str:
        """The difference, in words."""
        match self.kind:
            case Likeness.EQUAL:
                return "equal"
            case Likeness.DRIFT:
                token = f"token {self.at} ({self.expected!r})"
                return f"the same tokens, but the log probability of {token} moved by {self.moved:.4g}"
            case Likeness.TEXT:
                return f"from character {self.at} on {self.got!r} in place of {self.expected!r}"
        shown = f"at least {self.gap:.4g}" if self.gap < math.inf else "more than is told"
        return f"token {self.at} is {self.got!r} in place of {self.expected!r}, which is ahead by {shown}"


@dataclass(frozen=True)
class Noise:
    """The differences between cold answers to equal requests: at most `logprob`, over `num_tokens` compared;
    of `num_answers` compared, `num_texts` had another text."""

    logprob: float = 0.0
    num_tokens: int = 0
    num_answers: int = 0
    num_texts: int = 0


def first_difference(expected: Sequence[str], got: Sequence[str]) -> int | None:
    """Index of the first item that differs or is missing, None where both are equal."""
    for at, (a, b) in enumerate(zip(expected, got, strict=False)):
        if a != b:
            return at
    return None if len(expected) == len(got) else min(len(expected), len(got))


def _lead(token: Token, other: str) -> float:
    """The log probability of `token` less that of `other`; a lower bound if `other` is not among those told."""
    if other in token.top:
        return token.logprob - token.top[other]
    rest = sorted((value for name, value in token.top.items() if name != token.name), reverse=True)
    if not rest:
        return math.inf
    # The other one is none of those that are told, or bears no name of its own, as the end of an answer.
    return token.logprob - (rest[0] if other == _END else rest[-1])


def _apart(token: Token, other: Token) -> float:
    """The distance between their log probabilities; infinite if one is not a number."""
    apart = 0.0 if token.logprob == other.logprob else abs(token.logprob - other.logprob)
    return math.inf if math.isnan(apart) else apart


_END = "(end of the answer)"


def _gap(expected: Reply, got: Reply, at: int) -> float:
    """The lead of the expected token in the reference; in the answer itself where the reference has ended."""
    if at < len(expected.tokens):
        other = got.tokens[at].name if at < len(got.tokens) else _END
        return _lead(expected.tokens[at], other)
    return _lead(got.tokens[at], _END)


def compared(expected: Reply, got: Reply) -> AnswerDifference:
    """The difference between two answers and its size, as if nothing were noise: EQUAL, TEXT or WRONG."""
    if not (expected.tokens and got.tokens):
        at = first_difference(expected.text, got.text)
        if at is None:
            return AnswerDifference(Likeness.EQUAL)
        return AnswerDifference(Likeness.TEXT, at, expected.text[at:][:20], got.text[at:][:20])
    names = [token.name for token in expected.tokens], [token.name for token in got.tokens]
    at = first_difference(*names)
    same = len(names[0]) if at is None else at
    moves = [_apart(a, b) for a, b in zip(expected.tokens[:same], got.tokens[:same], strict=True)]
    moved = max(moves, default=0.0)
    if at is None:
        where = moves.index(moved) if moves else None
        return AnswerDifference(Likeness.EQUAL, where, "" if where is None else names[0][where], moved=moved)
    shown = [row[at] if at < len(row) else _END for row in names]
    return AnswerDifference(Likeness.WRONG, at, shown[0], shown[1], _gap(expected, got, at), moved)


def measured(groups: Iterable[Sequence[Reply]]) -> tuple[Noise, list[tuple[Reply, Reply, AnswerDifference]]]:
    """The noise among cold answers, each group to one prompt, and what of them is no noise: gross."""
    logprob, tokens, answers, texts = 0.0, 0, 0, 0
    gross: list[tuple[Reply, Reply, AnswerDifference]] = []
    for group in groups:
        for other in group[1:]:
            found = compared(group[0], other)
            answers += 1
            texts += found.kind is Likeness.TEXT
            apart = max(abs(found.gap), found.moved)  # behind by so much: the first one was not the likeliest
            if apart > GROSS:
                gross.append((group[0], other, found))
                continue
            num_both = min(len(group[0].tokens), len(other.tokens))
            tokens += found.at + 1 if found.kind is Likeness.WRONG and found.at is not None else num_both
            logprob = max(logprob, apart)
    return Noise(logprob, tokens, answers, texts), gross


def is_drawn(reply: Reply, at: int | None) -> bool:
    """Whether the token there is not the likeliest by the answer's own account, so that it was drawn."""
    if at is None or at >= len(reply.tokens):
        return False
    token = reply.tokens[at]
    return max(token.top.values(), default=token.logprob) - token.logprob > DRIFT_FLOOR


@dataclass(frozen=True)
class Judge:
    """Judges answers by the noise that was measured."""

    noise: Noise
    factor: float = FACTOR

    @property
    def is_blind(self) -> bool:
        """The noise is so large that no answer could be called wrong."""
        return self.factor * self.noise.logprob > GROSS

    @property
    def most_tie(self) -> float:
        """A token that is ahead by less may lose."""
        return max(TIE_FLOOR, self.factor * self.noise.logprob)

    @property
    def most_drift(self) -> float:
        """A token's log probability may move by this."""
        return max(DRIFT_FLOOR, self.factor * self.noise.logprob)

    def compare(self, expected: Reply, got: Reply) -> AnswerDifference:
        """The verdict on one answer."""
        found = compared(expected, got)
        if found.kind is Likeness.EQUAL and found.moved > self.most_drift:
            return AnswerDifference(
                Likeness.DRIFT, found.at, found.expected, found.got, found.gap, found.moved
            )
        if found.kind is Likeness.EQUAL:
            return AnswerDifference(Likeness.EQUAL, moved=found.moved)
        if found.kind is Likeness.WRONG and found.gap <= self.most_tie and found.moved <= self.most_drift:
            return AnswerDifference(Likeness.TIE, found.at, found.expected, found.got, found.gap, found.moved)
        return found

    def is_more_than_chance(self, num_texts: int, num_answers: int) -> bool:
        """Whether so many other texts are more than cold answers' own share explains (p < 1e-4)."""
        share = (self.noise.num_texts + 1) / (self.noise.num_answers + 2)
        chance = sum(
            math.comb(num_answers, k) * share**k * (1 - share) ** (num_answers - k)
            for k in range(num_texts, num_answers + 1)
        )
        return num_texts > 0 and chance < 1e-4
