"""What went to the backend in front of a call: a chain longer than one call comes as several, head first, and
a guard hands a long call on in parts.

For backends that order pages by use: what is one use of one chain has an end that is the first to leave.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class ChainUse:
    """Calls that are one use of one chain. began_ns: when the backend had the first part, by its clock.

    after: the page of the chain in front of them, where that is known. is_chain: whether it is one; pages
    that a tool moves are in no order. names: of all its calls so far. inside: what a guard makes of them for
    its backend. extra_key: of the pages' namespace, None for none.
    """

    after: str = ""
    is_chain: bool = True
    began_ns: int | None = None
    names: list[str] = field(default_factory=list)
    inside: dict[Hashable, ChainUse] = field(default_factory=dict)
    extra_key: str | None = None


@dataclass(slots=True)
class CallPart:
    """A part of a call that the backend is given. The call's names begin at `first` of `whole`, its own at
    `start`."""

    whole: ChainUse = field(default_factory=ChainUse)
    first: int = 0
    start: int = 0

    @property
    def before(self) -> Sequence[str]:
        """Names of the call in front of this part."""
        return self.whole.names[self.first : self.start]

    def fronts(self, names: Sequence[str]) -> list[str]:
        """Which page of the chain is in front of each of this part's `names`; "" where nobody knows."""
        if not self.whole.is_chain:
            return [""] * max(1, len(names))
        at = min(self.start, len(self.whole.names))
        return [self.whole.names[at - 1] if at else self.whole.after, *names[:-1]]

    def began(self, now_ns: int) -> int:
        """When the first page of this part counts as used: so much before the whole began as it is long."""
        if self.whole.began_ns is None:
            self.whole.began_ns = now_ns
        return self.whole.began_ns - self.start


class _UnderWay(threading.local):
    """What this thread's calls are a part of."""

    use: ChainUse | None = None
    part: CallPart | None = None


_under_way = _UnderWay()


def current_part() -> CallPart:
    """Of the call that this thread is in; all of one where nobody said otherwise."""
    return _under_way.part or CallPart()


def parts_of(guard: Hashable, names: Sequence[str]) -> Callable[[int], CallPart]:
    """The parts of a call that this thread makes of `guard`, by where in the call they start.

    It is a part of what the thread said, or of the call above that it is made in; else it is by itself.
    """
    part = _under_way.part
    outer = _under_way.use if part is None else part.whole
    use = (
        ChainUse() if outer is None else outer.inside.setdefault(guard, ChainUse(outer.after, outer.is_chain))
    )
    first = len(use.names)
    use.names += names
    return lambda start: CallPart(use, first, first + start)


@contextmanager
def as_part(part: CallPart) -> Iterator[None]:
    """This thread's calls are that part meanwhile."""
    _under_way.part = part
    try:
        yield
    finally:
        _under_way.part = None


@contextmanager
def as_use(use: ChainUse) -> Iterator[None]:
    """This thread's calls are a part of that use meanwhile."""
    before, _under_way.use = _under_way.use, use
    try:
        yield
    finally:
        _under_way.use = before


def current_use() -> ChainUse | None:
    """What this thread has said its calls are a part of."""
    return _under_way.use
