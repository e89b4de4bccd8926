"""Explanations: where each token of a prompt came from, and why what was computed had to be. Standard library.

A request's prompt is cut into spans that cover it once. A span is either a hit, in a tier, or computed for one
reason of a closed list (`Reason`).
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from hiradix.errors import ConfigError, Misuse

PATH: Final = "/explain"  # of explanations over HTTP
MOST_KEPT: Final = 1024
MOST_SHOWN: Final = 1000
SHOWN: Final = 20


class TokenSource(Enum):
    """The source of a span's KV."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"
    COMPUTED = "computed"

    __hash__ = object.__hash__


class Reason(Enum):
    """The reason why a span was computed. The value is the metrics' label."""

    NEVER_SEEN = "never_seen"  # goes on from what is cached where nothing has gone on before
    PARTED = "parted"  # differs, from `Span.start` on, from what follows the same tokens here
    EVICTED = "evicted"  # was here; the eviction policy took it from its last tier
    FLUSHED = "flushed"
    FORGOTTEN = "forgotten"  # deleted because somebody asked for it
    OTHER_NAMESPACE = "other_namespace"  # begins as what is here under another cache_salt or extra_key
    DAMAGED = "damaged"  # a tier said that it had it and did not give it whole, or as another model's
    BELOW_THRESHOLD = "below_threshold"  # too short to ask storage for
    PREDICTED_SLOWER = "predicted_slower"  # than computing: the no-regret gate
    NO_ROOM = "no_room"  # in the tier that it was to be brought to
    DEADLINE = "deadline"  # storage did not bring it in time
    STORAGE_FAILED = "storage_failed"  # it could not be asked, or broke off
    UNDER_WAY = "under_way"  # another request computed the same meanwhile, or its copy had not ended
    BOUNDARY = "boundary"  # no usable prefix ends there: part of a page, a window, a state, the last token

    __hash__ = object.__hash__


PUBLIC_REASONS: Final = {reason.value: reason.value for reason in Reason} | {
    Reason.OTHER_NAMESPACE.value: Reason.NEVER_SEEN.value
}


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) of a prompt. reason: of a computed one, else None. detail: for people, one line.

    waited_s: how long the request waited for it.
    """

    start: int
    end: int
    source: TokenSource
    reason: Reason | None = None
    detail: str = ""
    waited_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise Misuse(f"a span of tokens [{self.start}, {self.end})")
        if (self.reason is None) is (self.source is TokenSource.COMPUTED):
            raise Misuse(
                f"{self.source} for {self.reason}: what is computed has a reason, what is not has none"
            )

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    def as_json(self) -> dict[str, object]:
        """The span as a JSON object, without empty fields."""
        shown: dict[str, object] = {"start": self.start, "end": self.end, "source": self.source.value}
        if self.reason is not None:
            shown["reason"] = self.reason.value
        if self.detail:
            shown["detail"] = self.detail
        if self.waited_s:
            shown["waited_s"] = round(self.waited_s, 6)
        return shown


@dataclass(frozen=True, slots=True)
class Explanation:
    """The sources of the prompt of `request_id`: spans in order that cover its tokens once.

    >>> new = Span(64, 70, TokenSource.COMPUTED, Reason.NEVER_SEEN)
    >>> found = Explanation("r1", (Span(0, 64, TokenSource.DEVICE), new))
    >>> found.num_tokens, found.tokens_by_source()["device"], found.tokens_by_reason()["never_seen"]
    (70, 64, 6)
    """

    request_id: str
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        end = 0
        for span in self.spans:
            if span.start != end:
                raise Misuse(f"{self.request_id}: a span begins at token {span.start} behind token {end}")
            end = span.end

    @property
    def num_tokens(self) -> int:
        return self.spans[-1].end if self.spans else 0

    def tokens_by_source(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for span in self.spans:
            found[span.source.value] += span.num_tokens
        return found

    def tokens_by_reason(self) -> Counter[str]:
        """The computed tokens, counted by reason."""
        found: Counter[str] = Counter()
        for span in self.spans:
            if span.reason is not None:
                found[span.reason.value] += span.num_tokens
        return found

    def as_json(self) -> dict[str, object]:
        return {
            "id": self.request_id,
            "prompt_tokens": self.num_tokens,
            "by_source": dict(self.tokens_by_source()),
            "by_reason": dict(self.tokens_by_reason()),
            "spans": [span.as_json() for span in self.spans],
        }


def public_counts(by_reason: Mapping[str, int]) -> Counter[str]:
    """Tokens by reason, for figures that anybody may read.

    Those of `other_namespace` are under `never_seen`: a tenant could ask by them what others have sent.
    """
    found: Counter[str] = Counter()
    for reason, count in by_reason.items():
        found[PUBLIC_REASONS[reason]] += count
    return found


class RecentExplanations:
    """The explanations of the last `MOST_KEPT` requests, by their ids. Thread-safe."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, Explanation] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, explanation: Explanation) -> None:
        """Remember one; the oldest is forgotten for it."""
        with self._lock:
            self._by_id.pop(explanation.request_id, None)
            self._by_id[explanation.request_id] = explanation
            if len(self._by_id) > MOST_KEPT:
                self._by_id.popitem(last=False)

    def one(self, request_id: str) -> dict[str, object]:
        """The request with this id, as JSON. Raises ConfigError where it is not among the last."""
        with self._lock:
            found = self._by_id.get(request_id)
        if found is None:
            raise ConfigError(f"id: {request_id[:64]!r} is not among the last {MOST_KEPT} requests")
        return found.as_json()

    def latest(self, last: str | None) -> dict[str, object]:
        """So many requests as the text `last` says, SHOWN without it, the latest first, as JSON. Raises
        ConfigError where it says no number, or too large a one."""
        text = str(SHOWN) if last is None else last
        is_number = text.isdecimal() and text.isascii() and len(text) <= len(str(MOST_SHOWN))
        count = int(text) if is_number else 0
        if not 1 <= count <= MOST_SHOWN:
            raise ConfigError(f"last: expected a number in 1..{MOST_SHOWN}")
        with self._lock:
            latest = list(reversed(self._by_id.values()))[:count]
        return {"requests": [one.as_json() for one in latest]}
