"""The parts of one guarded call: its pages, the thread it runs on, and the answers it may give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar, cast

import numpy as np

from hiradix.errors import StorageError, described
from hiradix.storage.batch import Batch
from hiradix.storage.kit.call_threads import CallThread, CallTimeout
from hiradix.storage.kit.meters import FAULTS, MissReason
from hiradix.storage.protocol import Page, page_bytes

T = TypeVar("T")


class BadAnswer(Exception):
    """A backend returned something that is no answer to its call."""


class FlagsWithReason(list[bool]):
    """A backend's flags of a `get` or `put`, and why those that are False are.

    why: one reason, or how many pages have each. number: of how many it is, if not of all. Of the others the
    backend says no more.
    """

    def __init__(
        self,
        flags: Sequence[bool],
        why: MissReason | Mapping[MissReason, int],
        number: int | None = None,
    ):
        super().__init__(flags)
        unexplained = self.count(False)
        self.reasons: dict[MissReason, int] = {}
        if isinstance(why, MissReason):
            why = {why: unexplained if number is None else number}
        for reason, count in why.items():
            if unexplained and count > 0:
                self.reasons[reason] = min(count, unexplained)
                unexplained -= self.reasons[reason]


def reasons_of(answer: Sequence[bool]) -> Mapping[MissReason, int]:
    """The number of missing pages of a `get` or `put` for each known reason."""
    return answer.reasons if isinstance(answer, FlagsWithReason) else {}


def has_failed(answer: Sequence[bool]) -> bool:
    """Whether a fault is why pages of a `get` or `put` are missing, so that they may be there all the same."""
    return not FAULTS.isdisjoint(reasons_of(answer))


class CountWithDamaged(int):
    """How many leading pages a lookup found. num_damaged: pages right behind them that are there and are served
    to nobody, as damage was found."""

    num_damaged: int

    @classmethod
    def of(cls, count: int, num_damaged: int) -> CountWithDamaged:
        found = cls(count)
        found.num_damaged = num_damaged
        return found


def damaged_behind(count: int) -> int:
    """How many pages right behind those that a lookup found damage keeps back, as far as that is known."""
    return count.num_damaged if isinstance(count, CountWithDamaged) else 0


def as_answered(
    flags: list[bool], *answers: Sequence[bool], more: Mapping[MissReason, int] = MappingProxyType({})
) -> list[bool]:
    """`flags`, made of those of `answers`, which are all about these pages, with their reasons: of the first
    as far as it has any, then of the next. more: reasons of pages that were lost after that.

    An answer counts reasons and names no page: where another answer has made up for some of its pages, only
    as many of a reason are passed on as pages that are still missing must have.
    """
    reasons = Counter({why: number for why, number in more.items() if number})
    unexplained = flags.count(False) - reasons.total()
    for answer in answers if unexplained else ():
        made_up_for = max(0, answer.count(False) - flags.count(False))
        for why, number in reasons_of(answer).items():
            number = min(unexplained, max(0, number - made_up_for - reasons[why]))
            reasons[why] += number
            unexplained -= number
    return FlagsWithReason(flags, reasons) if reasons.total() else flags


@dataclass
class PageMove:
    """The pages of one `get` or `put`, and what became of them. names: the keys as the backend knows them."""

    keys: Sequence[str]
    names: Batch
    pages: Sequence[Page]
    ok: list[bool] = field(init=False)
    refused: dict[MissReason, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ok = [False] * len(self.keys)

    def answered(self, chunk: range, answer: object) -> None:
        """Take a backend's flags for a chunk; raises BadAnswer."""
        self.ok[chunk.start : chunk.stop] = self.flags(chunk, answer)

    def flags(self, chunk: range, answer: object) -> list[bool]:
        """The flags of an answer, noting why pages are missing where it says so; raises BadAnswer."""
        flags = checked_flags(answer, len(chunk))
        for why, number in reasons_of(answer).items() if isinstance(answer, FlagsWithReason) else ():
            self.refused[why] = self.refused.get(why, 0) + number
        return flags


class OtherKind(CallTimeout):
    """A call of another kind, made on the way of this one, did not end in time: no failure of this kind."""


@dataclass(slots=True)
class Session:
    """One call: until when it may take, by `clock`, and where it runs. This one runs on the caller's thread."""

    clock: Callable[[], float]
    deadline: float

    def remaining_s(self) -> float:
        """Seconds until the deadline; less than 0 behind it."""
        return self.deadline - self.clock()

    def run(self, work: Callable[[], T]) -> T:
        """Run `work`; returns or raises what it does. CallTimeout, without running it, when no time is left."""
        if self.clock() > self.deadline:
            raise CallTimeout("no time left for the rest of the batch")
        try:
            return work()
        except (Exception, KeyboardInterrupt):  # the latter is the caller's own
            raise
        except BaseException as error:  # a caller's thread is no backend's to end
            raise StorageError(described(error)) from error


@dataclass(slots=True)
class ThreadSession(Session):
    """Runs on a call thread, which can be left behind. afterwards: to be called there when the work has
    ended.
    """

    thread: CallThread
    afterwards: Callable[[], None]

    def run(self, work: Callable[[], T]) -> T:
        return self.start(work)()

    def start(self, work: Callable[[], T]) -> Callable[[], T]:
        """Begin `work`. What comes back waits for it; it is to be called whatever happens meanwhile, as the
        call thread is the backend's until then."""

        def work_and_more() -> T:
            value = work()
            self.afterwards()
            return value

        call = self.thread.start(work_and_more)
        return lambda: cast(T, self.thread.finish(call, self.remaining_s()))

    def stage(self, moved: PageMove, chunk: range, extra_bytes: int, which: int = 0) -> list[memoryview]:
        """Staging memory for each page of the chunk, `extra_bytes` longer than the page.

        which: 0 or 1, as a call thread has two pieces of memory.
        """
        sizes = [page_bytes(moved.pages[index]) + extra_bytes for index in chunk]
        memory = self.thread.staging(sum(sizes), which)
        views, start = [], 0
        for size in sizes:
            views.append(memory[start : start + size])
            start += size
        return views


def checked_count(answer: object, limit: int) -> int:
    """`answer` as a count in [0, limit]; raises BadAnswer for anything else."""
    if type(answer) is int and 0 <= answer <= limit:
        return answer
    if isinstance(answer, bool) or not isinstance(answer, int | np.integer) or not 0 <= answer <= limit:
        raise BadAnswer(f"exists answered {answer!r:.80} for {limit} keys")
    return int(answer)


def checked_flags(answer: object, num_pages: int) -> list[bool]:
    """`answer` as one bool per page; raises BadAnswer unless it is exactly that."""
    if not isinstance(answer, list | tuple) or len(answer) != num_pages:
        raise BadAnswer(f"answered {answer!r:.80} for {num_pages} pages")
    if set(map(type, answer)) <= {bool}:
        return list(answer)
    if not all(isinstance(ok, bool | np.bool_) for ok in answer):
        raise BadAnswer(f"answered {answer!r:.80}, which are not all bool")
    return [bool(ok) for ok in answer]
