"""The batch of a storage call: the keys of its pages, with their chain, tenant, namespace and component."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, SupportsIndex, overload

Rename = Callable[[Sequence[Any]], list[str]]
"""Keys of pages by their names elsewhere, one for each."""


class LazyKeys(Sequence[str]):
    """Keys that are made of `source` by `rename` when somebody looks at them."""

    __slots__ = ("_rename", "_source")

    def __init__(self, source: Sequence[Any], rename: Rename):
        self._source, self._rename = source, rename

    def __len__(self) -> int:
        return len(self._source)

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> list[str]: ...
    def __getitem__(self, at: int | slice) -> str | list[str]:
        if isinstance(at, slice):
            return self._rename(self._source[at])
        return self._rename([self._source[at]])[0]


class ChainUse:
    """One use of one chain, which comes in as many calls as it takes; `part` makes the batch of one.

    keys: of all its pages, in the order of the chain. before: of the chain's pages in front of them, from its
    start; None where these are not known. after: of the last of these alone, where that is known; "" at a
    chain's start. is_chain: False for pages that a tool moves, which are in no order.
    tenant: whose pages they are, as `Namespace.tenant` names him; "" for nobody's in particular.
    extra_key: of the pages' namespace. component: which one's pages they are, 0 being the backbone.
    """

    __slots__ = ("_began", "after", "before", "component", "extra_key", "is_chain", "keys", "tenant")

    def __init__(
        self,
        keys: Sequence[str],
        before: Sequence[str] | None = None,
        after: str = "",
        tenant: str = "",
        extra_key: str | None = None,
        component: int = 0,
        is_chain: bool = True,
    ):
        self.keys = keys
        self.before = before if is_chain else None
        self.after = "" if not is_chain else before[-1] if before else after
        self.tenant = tenant
        self.extra_key = extra_key
        self.component = component
        self.is_chain = is_chain
        self._began: dict[Hashable, int] = {}

    def part(self, start: int, stop: int) -> Batch:
        """The batch of keys [start, stop)."""
        return _batch(self.keys[start:stop], self, range(start, min(stop, len(self.keys))))

    def began(self, store: Hashable, now_ns: int) -> int:
        """The time (ns, by its own clock) of the first call that `store` had of this use; `now_ns` if this is
        the first."""
        return self._began.setdefault(store, now_ns)

    def renamed(self, rename: Rename) -> ChainUse:
        """The same use, by the names that its pages have elsewhere."""
        before = None if self.before is None else LazyKeys(self.before, rename)
        after = rename([self.after])[0] if self.after and before is None else ""
        use = ChainUse(
            LazyKeys(self.keys, rename),
            before,
            after,
            self.tenant,
            self.extra_key,
            self.component,
            self.is_chain,
        )
        use._began = self._began
        return use


class Batch(tuple[str, ...]):
    """The keys of one call, in the order of their chain, and what is known of them. Immutable.

    A backend that does not care takes it for the sequence of keys that it is. A slice of a batch is the batch
    of a part of the same use, which knows what is in front of it:

    >>> batch = Batch.of(["c", "d", "e"], before=["a", "b"], tenant="salt:alice")
    >>> list(batch), batch.before, batch.after, batch.tenant
    (['c', 'd', 'e'], ('a', 'b'), 'b', 'salt:alice')
    >>> rest = batch[1:]
    >>> list(rest), rest.before, rest.fronts()
    (['d', 'e'], ('a', 'b', 'c'), ['c', 'd'])
    >>> [key for key, page in zip(rest, ["page d", "page e"])]
    ['d', 'e']

    What is used together leaves from its end, in whatever parts it came: each page counts as used a little
    before the page in front of it, by the clock of the store.

    >>> batch[:2].used_ns("a store", 1000), batch[2:].used_ns("a store", 1005)
    ([1000, 999], [998])
    """

    use: ChainUse
    _places: range | list[int]  # in the use; a range where they follow each other

    @staticmethod
    def of(
        keys: Sequence[str],
        before: Sequence[str] | None = None,
        after: str = "",
        tenant: str = "",
        extra_key: str | None = None,
        is_chain: bool = True,
    ) -> Batch:
        """`keys` as one use; the further arguments are as `ChainUse` has them. A batch is returned unchanged."""
        if isinstance(keys, Batch):
            return keys
        own = tuple(keys)  # whatever the caller does with his lists meanwhile
        before = None if before is None else tuple(before)
        return _batch(own, ChainUse(own, before, after, tenant, extra_key, 0, is_chain), range(len(own)))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled, it is the tuple of its keys: what makes names, and the stores' clocks, are this process's."""
        return tuple, (list(self),)

    @overload
    def __getitem__(self, at: SupportsIndex) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> Batch: ...
    def __getitem__(self, at: SupportsIndex | slice) -> str | Batch:
        if isinstance(at, slice):
            places = self._places[at]
            if places == self._places:
                return self
            if isinstance(places, range) and places.step != 1:
                places = list(places)
            return _batch(super().__getitem__(at), self.use, places)
        return super().__getitem__(at)

    def pick(self, which: Sequence[int]) -> Batch:
        """The batch of the keys at some places, which ascend: of this one, if these are all."""
        if len(which) == len(self):
            return self
        if which and which[-1] - which[0] + 1 == len(which):
            return self[which[0] : which[-1] + 1]
        return _batch([self[at] for at in which], self.use, [self._places[at] for at in which])

    def renamed(self, rename: Rename) -> Batch:
        """The same batch, by the names that its pages have elsewhere."""
        return _batch(rename(self), self.use.renamed(rename), self._places)

    @property
    def tenant(self) -> str:
        """Whose pages they are; "" for nobody's in particular."""
        return self.use.tenant

    @property
    def extra_key(self) -> str | None:
        """The extra key of the pages' namespace; None without one."""
        return self.use.extra_key

    @property
    def component(self) -> int:
        """The number of the component whose pages they are; 0: the backbone's."""
        return self.use.component

    @property
    def is_chain(self) -> bool:
        """Whether each page depends on the one in front of it, as all do that a cache moves."""
        return self.use.is_chain

    @property
    def start(self) -> int:
        """The number of pages of the use in front of the batch's first; 0 if the batch is empty."""
        return self._places[0] if self._places else 0

    @property
    def before(self) -> tuple[str, ...] | None:
        """The chain in front of these keys from its start; None where it is not known, or they have gaps."""
        before = self.use.before
        if before is None or not isinstance(self._places, range):
            return None
        return *before[:], *self.use.keys[: self.start]  # slices: lazy keys are made all at once

    @property
    def after(self) -> str:
        """The key in front of the first in the chain; "" at its start, and where that is not known."""
        if not self.use.is_chain:
            return ""
        return self.use.keys[self.start - 1] if self.start else self.use.after

    def earlier(self, most: int) -> Sequence[str]:
        """Keys of the same use in front of these: the last `most` of them."""
        return self.use.keys[max(0, self.start - most) : self.start]

    def fronts(self) -> list[str]:
        """The key in front of each in the chain, as `after` has it."""
        if not self.use.is_chain:
            return [""] * len(self)
        if isinstance(self._places, range):
            return [self.after, *super().__getitem__(slice(-1))] if self else []
        keys = self.use.keys
        return [keys[place - 1] if place else self.use.after for place in self._places]

    def used_ns(self, store: Hashable, now_ns: int) -> list[int]:
        """The time at which each page counts as used in `store`: a page is as many ns before the use's begin
        as pages lie in front of it. now_ns: by the clock of the store."""
        began_ns = self.use.began(store, now_ns)
        return [began_ns - place for place in self._places]


def _batch(keys: Sequence[str], use: ChainUse, places: range | list[int]) -> Batch:
    batch = Batch(keys)
    batch.use, batch._places = use, places
    return batch
