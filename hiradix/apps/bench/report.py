"""The report of a multi-turn run: tokens by source, time to first token by source, and answers compared.

Two answers are identical when every token is the same, or when the first token that differs was a tie: the
two candidates' log probabilities in the reference run lie less than TIE_GAP apart. Such answers are flagged;
more than MAX_FLAGGED of them, or any wider gap, is a difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hiradix.apps.bench.client import Answer
from hiradix.errors import Misuse

TIE_GAP = 1e-4
MAX_FLAGGED = 0.005
LONG_PROMPT_TOKENS = 1000
TIERS = ("device", "host", "storage")
SOURCES = (*TIERS, "computed")


def percentile(values: Iterable[float], q: float) -> float | None:
    """The q-th percentile (0..100) by linear interpolation; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    at = (len(ordered) - 1) * q / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def source_of(answer: Answer) -> str:
    """The source of the largest part of a prompt; reuse of an untold tier counts as device."""
    s = answer.sources
    counts = {
        "device": s.device + s.unspecified,
        "host": s.host,
        "storage": s.storage,
        "computed": s.computed,
    }
    return max(SOURCES, key=lambda name: counts[name])


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a group of requests, its tokens, both runs' times to first token in seconds."""

    name: str
    num_requests: int
    num_tokens: int
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    off_p50_s: float | None
    off_p95_s: float | None


@dataclass(frozen=True, slots=True)
class Difference:
    """An answer unlike the reference: where, both tokens, and how far apart the reference saw them."""

    label: str
    position: int
    ours: bytes
    reference: bytes
    gap: float

    @property
    def is_tie(self) -> bool:
        """Whether the reference could as well have chosen our token."""
        return self.gap < TIE_GAP

    def __str__(self) -> str:
        kind = "tie" if self.is_tie else "DIFFERENT"
        tokens = f"{self.ours!r} / {self.reference!r}"
        return f"{kind}: {self.label} token {self.position}: {tokens}, gap {self.gap:.2e}"


@dataclass(frozen=True, slots=True)
class Identity:
    """The verdict over all answers of two runs."""

    num_answers: int
    differences: tuple[Difference, ...]

    @property
    def flagged(self) -> tuple[Difference, ...]:
        """Differences that are ties."""
        return tuple(d for d in self.differences if d.is_tie)

    @property
    def num_identical(self) -> int:
        """Answers that are the same, ties included."""
        return self.num_answers - len(self.differences) + len(self.flagged)

    @property
    def holds(self) -> bool:
        """Whether the identity rule is met."""
        few = len(self.flagged) <= MAX_FLAGGED * self.num_answers
        return self.num_answers > 0 and self.num_identical == self.num_answers and few

    def line(self) -> str:
        """The line that matters."""
        flagged = f" ({len(self.flagged)} flagged as ties)" if self.flagged else ""
        return f"answers identical to cache-off: {self.num_identical} of {self.num_answers}{flagged}"


def first_difference(ours: Answer, reference: Answer) -> Difference | None:
    """The first place where two answers to one prompt differ, or None. Without log probabilities the whole
    text is compared."""
    if ours.request != reference.request:
        raise Misuse(f"{ours.request.label} compared with {reference.request.label}")
    label = ours.request.label
    if not ours.tokens or not reference.tokens:
        if ours.text == reference.text:
            return None
        return Difference(label, 0, ours.text.encode(), reference.text.encode(), math.inf)
    for position, (a, b) in enumerate(zip(ours.tokens, reference.tokens, strict=False)):
        if a.token != b.token:
            likely = dict(b.top)
            gap = abs(b.logprob - likely[a.token]) if a.token in likely else math.inf
            return Difference(label, position, a.token, b.token, gap)
    if len(ours.tokens) != len(reference.tokens) or ours.text != reference.text:
        return Difference(label, min(len(ours.tokens), len(reference.tokens)), b"", b"", math.inf)
    return None


def compare(ours: Sequence[Answer], reference: Sequence[Answer]) -> Identity:
    """The identity of two runs over the same prompts in the same order."""
    if len(ours) != len(reference):
        raise Misuse(f"{len(ours)} answers compared with {len(reference)}")
    found = (first_difference(a, b) for a, b in zip(ours, reference, strict=True))
    return Identity(len(ours), tuple(d for d in found if d is not None))


def tokens_by_source(answers: Iterable[Answer]) -> dict[str, int]:
    """Prompt tokens served from device, host and storage, and computed."""
    total = dict.fromkeys(SOURCES, 0)
    for answer in answers:
        s = answer.sources
        total["device"] += s.device + s.unspecified
        total["host"] += s.host
        total["storage"] += s.storage
        total["computed"] += s.computed
    return total


def tier_shares(answers: Sequence[Answer]) -> dict[str, float]:
    """Each tier's share of the reused tokens, 0 to 1."""
    tokens = tokens_by_source(answers)
    reused = sum(tokens[tier] for tier in TIERS)
    return {tier: tokens[tier] / reused if reused else 0.0 for tier in TIERS}


Pair = tuple[Answer, Answer | None]


def _row(name: str, num_tokens: int, pairs: Sequence[Pair]) -> Row:
    ours = [a.ttft_s for a, _ in pairs]
    off = [b.ttft_s for _, b in pairs if b is not None]
    times = [percentile(ours, 50), percentile(ours, 95), percentile(off, 50), percentile(off, 95)]
    return Row(name, len(pairs), num_tokens, *times)


def rows(ours: Sequence[Answer], reference: Sequence[Answer] | None) -> list[Row]:
    """One row a source, grouped by each prompt's largest source, and one for all of it."""
    others: Sequence[Answer | None] = reference if reference is not None else [None] * len(ours)
    pairs: list[Pair] = list(zip(ours, others, strict=True))
    tokens = tokens_by_source(ours)
    table = [_row(s, tokens[s], [p for p in pairs if source_of(p[0]) == s]) for s in SOURCES]
    return [*table, _row("all", sum(tokens.values()), pairs)]


def long_rows(ours: Sequence[Answer], reference: Sequence[Answer] | None) -> list[Row]:
    """The same rows over the prompts of LONG_PROMPT_TOKENS and more."""
    keep = [i for i, a in enumerate(ours) if a.prompt_tokens >= LONG_PROMPT_TOKENS]
    return rows([ours[i] for i in keep], None if reference is None else [reference[i] for i in keep])


def summary(ours: Sequence[Answer], reference: Sequence[Answer] | None = None) -> Mapping[str, object]:
    """Everything the table shows, as plain JSON values; times in seconds."""

    def plain(row: Row) -> dict[str, object]:
        return {name: getattr(row, name) for name in Row.__slots__}

    report: dict[str, object] = {
        "num_requests": len(ours),
        "tokens": tokens_by_source(ours),
        "share_of_reused": tier_shares(ours),
        "by_source": [plain(row) for row in rows(ours, reference)],
        "long_prompts": [plain(row) for row in long_rows(ours, reference)],
    }
    if reference is not None:
        identity = compare(ours, reference)
        report["identity"] = {
            "num_answers": identity.num_answers,
            "num_identical": identity.num_identical,
            "num_flagged": len(identity.flagged),
            "holds": identity.holds,
            "differences": [str(d) for d in identity.differences],
        }
    return report
