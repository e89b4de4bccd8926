"""Generations: pages in a store are attributed to a set of weights by comparing them, not by a model's name.

Two models may claim one identity: names say little of weights. So a store holds *generations* of a
fingerprint: each is what one set of weights computed, under a random label that is part of every page's name
there. Which labels there are is said by records under reserved names, at most `NUM_SLOTS` at a time. A page
of a generation is served only after a page that this engine has computed by itself was compared with the same
page there, and was the same but for rounding (`ComponentPages.compare`):

    adopted   they are the same: it is read, and what is computed here is put there too
    rejected  they are not: a warning says so, and this process never uses it
    unknown   nothing could be compared yet: what it has counts as a miss

What is computed while nothing is adopted goes into a generation of this process's own, which others adopt or
reject likewise. An engine that can be asked computes fixed pages for it, before it serves (`Witness`). Of one
that cannot, the first page that storage would serve is computed once more by its request, and compared when
it is put. A store that is read-only is compared likewise, and gets no generation of this process's own.

A record, or a generation's pages, may be evicted like any page: what is behind it is a miss then, never
wrong. A record is a page with random numbers in front
and zeros behind them; the label is their digest, so that there is nothing to parse. Adapters have
generations of their own: a comparison with one of their pages says nothing about the model's, nor the other way.

All of it runs on the transfer workers, where pages are read and put, not on the scheduler's thread.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hiradix.storage.batch import Batch
from hiradix.storage.components import ComponentPages, PageDifference
from hiradix.storage.guard.breaker import Troubles
from hiradix.storage.guard.calls import CountWithDamaged, as_answered, has_failed, reasons_of
from hiradix.storage.guard.stores import PageStore, StoragePart, Stores
from hiradix.storage.kit.meters import MissReason
from hiradix.storage.opening import StoreSettings
from hiradix.storage.protocol import Page
from hiradix.storage.wrappers import quantise

logger = logging.getLogger(__name__)

NUM_SLOTS = 8
"""Records a store has at a time for one fingerprint and adapter."""
MAX_SCOPES = 4096
"""Adapters whose generations a process knows; the one that was used longest ago is forgotten."""
LOOK_AGAIN_PUTS = 64
"""Records are read again with each so many puts: whether others have come, and whether ours is there."""
COMPARED_PUTS = 64
"""Puts that are compared with further generations, after one has been adopted or an own one been made."""
MOST_REMEMBERED = 8
"""Stores of several identities that a process remembers; of more none."""
MOST_REJECTED = 1024
"""Of more generations that were rejected, those without a record are forgotten."""

_BITS = 256
_NUMBER_ONE = {"bfloat16": b"\x80\x3f", "float16": b"\x00\x3c", "float32": b"\x00\x00\x80\x3f"}
_NO_LABEL = bytes(32)
_UNREAD = b"a record that a fault kept from being read"


@dataclass(frozen=True)
class Witness:
    """Pages that the engine has computed to be compared, by name; of each component one page for each name.

    None: that component has none under that name.
    """

    keys: tuple[str, ...]
    pages: tuple[tuple[bytes | None, ...], ...]

    def of(self, component: int) -> Iterator[tuple[str, bytes]]:
        """The names and pages of a component."""
        for key, page in zip(self.keys, self.pages[component], strict=True):
            if page is not None:
                yield key, page


def whole_key(extra_key: str | None) -> str:
    """Each extra key is an adapter of its own."""
    return extra_key or ""


def no_adapters(_: str | None) -> str:
    """Extra keys separate clients, whose pages the same weights compute."""
    return ""


@dataclass(frozen=True)
class Trust:
    """The rule by which an engine finds the generations that its pages belong to.

    identity: a label given by whoever knows: nothing is compared, and pages are under this label alone.
    adapter_of: what tells adapters apart in an extra key. witness: of an engine that can be asked. stores:
    False where another rank puts the same pages, and this one compares only. shared_names: pages keep the
    names they have for other software too, which puts them there unasked: these are compared as well.
    rounds: storage codes pages with loss; what was computed here is coded likewise to be compared.
    remembered: what stores that were open before have shown, as long as the weights stay; whoever changes
    them forgets it.
    """

    identity: str | None = None
    adapter_of: Callable[[str | None], str] = whole_key
    witness: Witness | None = None
    stores: bool = True
    shared_names: bool = False
    rounds: bool = False
    remembered: dict[Hashable, OrderedDict[str, _Scope]] = field(default_factory=dict, compare=False)


class Generations(Stores):
    """A model's stores, which serve pages of trusted generations only. Owns them; thread-safe.

    components: what the stores were opened for, in their order.
    """

    def __init__(self, stores: Stores, components: Sequence[ComponentPages], trust: Trust) -> None:
        super().__init__(stores.guards, [one.fingerprint.component for one in components])
        self._trust = trust
        self._name = components[0].fingerprint.model_id
        self._components = tuple(components)
        key = components[0].fingerprint.digest(), trust.identity, trust.shared_names, trust.rounds
        if key not in trust.remembered and len(trust.remembered) >= MOST_REMEMBERED:
            trust.remembered.clear()
        self._scopes = trust.remembered.setdefault(key, OrderedDict())
        for scope in self._scopes.values():
            scope.is_due = True
        self._lock = threading.Lock()
        self._num_adopted = [0] * len(components)
        self._figures = {"lookups_unverified": 0, "pages_compared": 0, "generations_rejected": 0}
        self.parts = tuple(_Part(self, number, guard) for number, guard in enumerate(self.guards))
        stores.when_joined(lambda _: self._look_again())  # also for each half of a tier that joins later

    def clear(self) -> bool:
        """Forget all pages of all generations; this engine's go on under the labels they had."""
        ok = super().clear()
        self._look_again()
        return ok

    def stats(self) -> Mapping[str, float]:
        """The stores' figures and, as `canary_*`, of how many adapters (the model itself is one) the pages
        are of an adopted generation, of an own one only, or not verified yet."""
        adopted = own = 0
        scopes = self._known_scopes()
        for scope in scopes:
            adopted += bool(scope.adopted)
            own += not scope.adopted and scope.own is not None
        states = {"adopted": adopted, "own": own, "unverified": len(scopes) - adopted - own}
        figures = {**states, **self._figures}
        return {**super().stats(), **{f"canary_{name}": float(value) for name, value in figures.items()}}

    # -- whose pages these are --------------------------------------------------------------

    def prove(self) -> None:
        """Compare the witness's pages with each generation's: adopt those that are the same, or make one of
        our own. Without a witness nothing is done. Takes as long as the store does."""
        scope = self.scope_of(None)
        if self._trust.witness is not None and self._trust.identity is None:
            with scope.lock:
                self._prove(scope, self._trust.witness)

    def scope_of(self, extra_key: str | None) -> _Scope:
        """The generations of the adapter that an extra key names."""
        name = self._trust.adapter_of(extra_key)
        with self._lock:
            scope = self._scopes.get(name)
            if scope is None:
                scope = self._scopes[name] = _Scope(name, len(self.guards), self._given_label())
                if len(self._scopes) > MAX_SCOPES:
                    self._scopes.popitem(last=False)
            self._scopes.move_to_end(name)
            return scope

    def readable(self, scope: _Scope, component: int) -> tuple[bytes, ...]:
        """The labels under which pages may be read now."""
        if not scope.trusted[component]:
            self._retry(scope)
        found = scope.trusted[component]
        if not found:
            self._figures["lookups_unverified"] += 1
        return found

    def writable(
        self, scope: _Scope, component: int, keys: Sequence[str], pages: Sequence[Page]
    ) -> bytes | None:
        """The label under which pages that were computed here are to be put, which are compared first with
        what generations have that are not known yet; None: under none."""
        if self._trust.identity is not None:
            return scope.trusted[component][0]
        with scope.lock:
            scope.num_puts += 1
            if scope.is_due or scope.num_puts % LOOK_AGAIN_PUTS == 0:
                self._look(scope)
            is_early = not scope.trusted[component] or scope.num_puts <= COMPARED_PUTS
            if scope.may_compare and is_early:
                self._compare(scope, component, keys, pages)
            if not self._trust.stores:
                return None
            if not scope.trusted[component]:
                self._begin(scope)
            self._enlist(scope)
            trusted = scope.trusted[component]
            return trusted[0] if trusted else None

    def labels_to_forget(self, scope: _Scope) -> list[bytes] | None:
        """All labels that pages may be under, trusted or not; None where the records cannot be read."""
        if self._trust.identity is None:
            with scope.lock:
                if scope.is_due:
                    self._look(scope)
                if scope.is_unread:
                    return None
        return scope.known_labels()

    def num_adopted(self, component: int) -> int:
        """The number of generations of this component that were adopted since it was opened."""
        return self._num_adopted[component]

    @property
    def is_settled(self) -> bool:
        """Whether nothing is compared for want of trust: of an engine whose ranks do not all store."""
        return all(all(scope.trusted) for scope in self._known_scopes()) and bool(self._scopes)

    @property
    def stores(self) -> bool:
        return self._trust.stores

    # -- inside: with the scope's lock held -------------------------------------------------

    def _known_scopes(self) -> list[_Scope]:
        with self._lock:
            return list(self._scopes.values())

    def _look_again(self) -> None:
        """Have the records read again by the next put of each adapter, or lookup where there is a witness,
        and ours put again: a store that has joined may lack it."""
        for scope in self._known_scopes():
            scope.is_due = scope.must_put = True
            scope.num_unserved = 0

    def _given_label(self) -> bytes | None:
        identity = self._trust.identity
        if identity is None:
            return None
        return hashlib.sha256(b"hiradix-storage-identity\0" + identity.encode()).digest()

    def _retry(self, scope: _Scope) -> None:
        """The witness was compared before the store could be asked, or before another rank had put its pages:
        again, with lookups ever further apart; where records could not be read, as soon as reads are let
        through again."""
        if self._trust.witness is None or (scope.is_unread and not self.guards[0].may_read):
            return
        scope.num_unserved += 1
        number = scope.num_unserved
        is_its_turn = scope.is_unread or number <= 16 or not number & (number - 1)
        if not is_its_turn or not scope.lock.acquire(blocking=False):
            return
        try:
            self._prove(scope, self._trust.witness)
        finally:
            scope.lock.release()

    def _prove(self, scope: _Scope, witness: Witness) -> None:
        self._look(scope)
        if scope.may_compare:
            self._compare_witness(scope, witness)
        if not all(scope.trusted) and self._trust.stores:
            self._begin(scope)

    def _compare_witness(self, scope: _Scope, witness: Witness) -> None:
        for component in range(len(self.guards)):
            for label in scope.unknown(component):
                self._compare_one(scope, component, label, list(witness.of(component)), needs_all=True)

    def _look(self, scope: _Scope) -> None:
        """Read the records; what is ours and has gone is put again.

        With the first that a fault keeps from being read it ends, and says nothing of what is there: what
        could not be read is not taken for gone, and looked at again. Where a half of a tier is away, what the
        other half has is taken as it is.
        """
        scope.is_due = not self.is_joined
        scope.is_unread = scope.is_in_part = False
        found: dict[bytes, bytes] = {}
        if self._trust.shared_names:
            found[_NO_LABEL] = b""
        slots: dict[bytes, int] = {}
        for slot in range(NUM_SLOTS):
            record = self._read_record(scope, slot)
            if record is _UNREAD:
                scope.is_due = scope.is_unread = True
                if not self.guards[0].reads_in_part:
                    return
            elif record is not None:
                label = _label_of(record)
                slots[label] = slot
                found.setdefault(label, record)
        if scope.is_unread:
            scope.saw_some(found)
            return
        scope.saw(found, set(slots.values()))
        if scope.is_unlisted:  # compared with these, before it is one of them
            scope.num_puts = 0
            return
        mine = scope.put_label
        if mine is None or not self._trust.stores or not scope.records.get(mine):
            return
        if mine not in found:
            self._put_record(scope, scope.records[mine], mine)
        elif scope.must_put and not self.guards[0].is_read_only:
            self._put_witness(mine)
            page = self._record_page(scope.records[mine])
            self.guards[0].put([record_key(scope.name, slots[mine])], [[page]])
        scope.must_put = not self.is_joined

    def _compare(self, scope: _Scope, component: int, keys: Sequence[str], pages: Sequence[Page]) -> None:
        """Compare the first and the last of pages computed here with those that unknown generations have."""
        guard = self.guards[component]
        for label in scope.unknown(component):
            count = guard.exists(renamed(keys, label))
            which = sorted({0, count - 1}) if count else []
            mine = [(keys[at], b"".join(pages[at])) for at in which]
            self._compare_one(scope, component, label, mine)

    def _compare_one(
        self,
        scope: _Scope,
        component: int,
        label: bytes,
        mine: Sequence[tuple[str, bytes]],
        needs_all: bool = False,
    ) -> None:
        """Adopt or reject a generation by what it has of `mine`; neither where it has nothing of it.

        needs_all: or not all of it.
        """
        of, num_same = self._components[component], 0
        for key, page in mine:
            theirs = bytearray(len(page))
            answer = self.guards[component].get(renamed([key], label), [[memoryview(theirs)]])
            if has_failed(answer):
                scope.is_due = scope.is_unread = True
                return
            if not answer[0]:
                if MissReason.DAMAGED in reasons_of(answer):
                    scope.keep_back(component, label)
                continue
            self._figures["pages_compared"] += 1
            own = quantise.rounded(page, of.elements) if self._trust.rounds else memoryview(page)
            apart = of.compare([own], [memoryview(theirs)], self._trust.rounds)
            if not apart.is_same:
                self._reject(scope, label, component, apart)
                return
            num_same += 1
        if num_same == len(mine) if needs_all else num_same:
            scope.adopt(component, label)
            self._num_adopted[component] += 1
            logger.info("storage: pages of generation %s of %s are used", label.hex()[:8], self._name)

    def _reject(self, scope: _Scope, label: bytes, component: int, apart: PageDifference) -> None:
        scope.reject(label)
        self._figures["generations_rejected"] += 1
        of = self._components[component].fingerprint.component or "attention"
        logger.warning(
            "storage holds pages under the name of %s%s that other weights have computed: %s pages of "
            "generation %s differ in %s; they are not used, and what is computed here is stored apart",
            self._name,
            f" (adapter {scope.name!r})" if scope.name else "",
            of,
            label.hex()[:8],
            apart,
        )  # fmt: skip

    def _begin(self, scope: _Scope) -> None:
        """Have a generation of our own, if its record can be written."""
        if scope.is_due and not scope.is_in_part:  # what others have could not be looked at
            return
        if self._trust.shared_names and _NO_LABEL not in scope.rejected:
            scope.begin(_NO_LABEL, b"")
            return
        if scope.own is None:
            record = _new_record(self._components[0])
            if self._trust.rounds:
                page = quantise.rounded(bytes(self._record_page(record)), self._components[0].elements)
                record = bytes(page[: len(record)])
            label = _label_of(record) if scope.is_in_part else self._put_record(scope, record)
            if label is None:
                return
            scope.begin(label, record)
            scope.is_unlisted = scope.is_in_part
        else:
            scope.begin(scope.own, scope.records.get(scope.own, b""))

    def _enlist(self, scope: _Scope) -> None:
        """Put the record of a generation that was begun while a half of a tier was away, now that all records
        have been read; none where one of these is of the same weights, which gets our pages from now on."""
        if not scope.is_unlisted or scope.is_due:
            return
        if self._trust.witness is not None:
            self._compare_witness(scope, self._trust.witness)
        own = scope.own
        if scope.is_due:
            return
        if own is not None and scope.put_label == own:
            if self._put_record(scope, scope.records[own], own) is None:
                return
        scope.is_unlisted = False

    def _put_witness(self, label: bytes) -> None:
        witness = self._trust.witness
        if witness is None:
            return
        for component, guard in enumerate(self.guards):
            for key, page in witness.of(component):
                guard.put(renamed([key], label), [[memoryview(page)]])

    def _put_record(self, scope: _Scope, record: bytes, known: bytes | None = None) -> bytes | None:
        """Put a record where there is room: its label, or None where it could not be, or cannot as the store
        is read-only.

        known: the label, of a record that was there before. Where several write at once, one is there and
        the others, who find that out, go on to the next slot.
        """
        if self.guards[0].is_read_only:
            return None
        label, page = known or _label_of(record), self._record_page(record)
        self._put_witness(label)  # before others can find it
        free = [slot for slot in range(NUM_SLOTS) if slot not in scope.used_slots]
        if not free:  # which is the oldest is not known: any
            free = [int.from_bytes(os.urandom(2), "big") % NUM_SLOTS]
            self.guards[0].delete([record_key(scope.name, free[0])])
        for slot in free:
            key = record_key(scope.name, slot)
            if not self.guards[0].put([key], [[page]])[0]:
                return None
            back = self._read_record(scope, slot)
            if back is _UNREAD:
                scope.is_due = scope.is_unread = True
                return None
            if back is None:  # something else has the name
                continue
            scope.used_slots.add(slot)
            if _label_of(back) == label:
                return label
        return None

    def _record_page(self, record: bytes) -> memoryview:
        """The page that says a record: its numbers, and zeros."""
        page = bytearray(self._components[0].page_bytes)
        page[: len(record)] = record
        return memoryview(page)

    def _read_record(self, scope: _Scope, slot: int) -> bytes | None:
        """The numbers of a slot's record; None where there is none, `_UNREAD` where a fault hides
        whether there is one."""
        page, length = bytearray(self._components[0].page_bytes), _record_bytes(self._components[0])
        answer = self.guards[0].get([record_key(scope.name, slot)], [[memoryview(page)]])
        if not answer[0]:
            return _UNREAD if has_failed(answer) else None
        return bytes(page[:length]) if page.count(0, length) == len(page) - length else None


@dataclass(eq=False)
class _Scope:
    """The known generations of one adapter, or of the model without any.

    trusted: per component the labels to read, those that are put to first. records: of each label that was
    seen. damaged: per component the unknown labels of which a page to be compared was damaged. is_due: the
    records are to be looked at; is_unread: as a fault kept them from being read; is_in_part: but for those of
    the half of a tier that is not away; is_unlisted: our own has no record yet, as it was begun then; must_put:
    and ours is to be put again. lock: of all but reading `trusted`.
    """

    name: str
    num_components: int
    given: bytes | None = None
    trusted: list[tuple[bytes, ...]] = field(default_factory=list)
    own: bytes | None = None
    rejected: set[bytes] = field(default_factory=set)
    adopted: set[bytes] = field(default_factory=set)
    records: dict[bytes, bytes] = field(default_factory=dict)
    damaged: list[tuple[bytes, ...]] = field(default_factory=list)
    used_slots: set[int] = field(default_factory=set)
    is_due: bool = True
    is_unread: bool = False
    is_in_part: bool = False
    is_unlisted: bool = False
    must_put: bool = False
    num_puts: int = 0
    num_unserved: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.trusted = [() if self.given is None else (self.given,)] * self.num_components
        self.damaged = [()] * self.num_components

    @property
    def put_label(self) -> bytes | None:
        """The label under which the backbone's pages are put."""
        return self.trusted[0][0] if self.trusted[0] else None

    @property
    def may_compare(self) -> bool:
        """Whether there is something that was read to be compared with."""
        return not self.is_unread or self.is_in_part

    def unknown(self, component: int) -> list[bytes]:
        """Labels that are neither trusted nor rejected."""
        return [
            label
            for label in self.records
            if label not in self.trusted[component] and label not in self.rejected
        ]

    def known_labels(self) -> list[bytes]:
        """All labels, trusted or not: of pages that are to be gone whoever computed them."""
        labels = [*self.records, *(label for labels in self.trusted for label in labels), *self.rejected]
        return list(dict.fromkeys(labels))

    def saw_some(self, found: Mapping[bytes, bytes]) -> None:
        """Note that these records are there, and perhaps others."""
        self.is_in_part = True
        for label, record in found.items():
            self.records.setdefault(label, record)

    def saw(self, found: Mapping[bytes, bytes], used_slots: set[int]) -> None:
        """Note that these are all the records there are, in the order of their slots. One that has gone is
        kept if it is trusted."""
        self.used_slots = used_slots
        kept = {label: record for label, record in self.records.items() if self._is_trusted(label)}
        self.records = {**found, **{label: record for label, record in kept.items() if label not in found}}
        if len(self.rejected) > MOST_REJECTED:
            self.rejected &= set(found)
        self.damaged = [tuple(label for label in labels if label in found) for labels in self.damaged]
        self._order()

    def _is_trusted(self, label: bytes) -> bool:
        return any(label in labels for labels in self.trusted)

    def _order(self) -> None:
        """Generations of the first slots come first, so that all engines come to put to the same."""
        places = {label: place for place, label in enumerate(self.records)}
        for component, labels in enumerate(self.trusted):
            self.trusted[component] = tuple(sorted(labels, key=lambda label: places.get(label, len(places))))

    def adopt(self, component: int, label: bytes) -> None:
        self.adopted.add(label)
        self.trusted[component] = (*self.trusted[component], label)
        self.damaged[component] = _without(self.damaged[component], label)
        self._order()

    def keep_back(self, component: int, label: bytes) -> None:
        """It cannot be compared, as a page of it is damaged."""
        self.damaged[component] = (*_without(self.damaged[component], label), label)

    def reject(self, label: bytes) -> None:
        self.rejected.add(label)
        self.adopted.discard(label)
        self.trusted = [_without(labels, label) for labels in self.trusted]
        self.damaged = [_without(labels, label) for labels in self.damaged]

    def begin(self, label: bytes, record: bytes) -> None:
        """A generation of our own: what is there under its label was computed here."""
        self.own = label
        self.records.setdefault(label, record)
        self.trusted = [labels if label in labels else (*labels, label) for labels in self.trusted]
        self._order()


def _without(labels: tuple[bytes, ...], label: bytes) -> tuple[bytes, ...]:
    return tuple(one for one in labels if one != label)


class _Part(PageStore):
    """One component's store, by the names that trusted generations give its pages."""

    def __init__(self, whole: Generations, component: int, guard: StoragePart) -> None:
        self._whole = whole
        self._component = component
        self._guard = guard

    @property
    def troubles(self) -> Troubles:
        return self._guard.troubles

    @property
    def num_adopted(self) -> int:
        return self._whole.num_adopted(self._component)

    @property
    def wants_computed(self) -> bool:
        """True until it is known to which generation the pages belong that another rank puts."""
        return not self._whole.stores and not self._whole.is_settled

    def register(self, memory: memoryview) -> bool:
        return self._guard.register(memory)

    def stats(self) -> Mapping[str, float]:
        return self._guard.stats()

    def exists(self, keys: Sequence[str]) -> int:
        """The number of leading keys that trusted generations have, and behind them of those that damage keeps
        from being trusted."""
        batch = Batch.of(keys)
        scope = self._whole.scope_of(batch.extra_key)
        labels = self._whole.readable(scope, self._component)
        found = before = 0
        while labels:
            for label in labels:
                if found < len(batch):
                    found += self._guard.exists(_in_generation(batch[found:], label))
            if found in (before, len(batch)) or len(labels) == 1:
                break
            before = found
        for label in scope.damaged[self._component] if found < len(batch) else ():
            num_damaged = self._guard.exists(_in_generation(batch[found:], label))
            if num_damaged:
                return CountWithDamaged.of(found, num_damaged)
        return found

    def get(self, keys: Sequence[str], into: Sequence[Page]) -> list[bool]:
        """Read each page from the first generation that has it; the answer is the guard's."""
        batch = Batch.of(keys)
        ok = [False] * len(batch)
        answers: list[list[bool]] = []
        for label in self._labels(batch):
            which = [at for at, done in enumerate(ok) if not done]
            if not which:
                break
            answer = self._guard.get(_in_generation(batch.pick(which), label), [into[at] for at in which])
            answers.append(answer)
            for at, done in zip(which, answer, strict=True):
                ok[at] = done
        return as_answered(ok, *answers)

    def put(self, keys: Sequence[str], pages: Sequence[Page]) -> list[bool]:
        """Put pages into the generation that pages computed here belong to; the answer is the guard's."""
        batch, whole = Batch.of(keys), self._whole
        label = whole.writable(whole.scope_of(batch.extra_key), self._component, batch, pages)
        if label is not None:
            return self._guard.put(_in_generation(batch, label), pages)
        if whole.stores and self._guard.is_read_only:
            return self._guard.refuse(len(batch))
        return [not whole.stores] * len(batch)

    def delete(self, keys: Sequence[str]) -> bool:
        """Delete pages from every generation that has a record, whoever computed them; whether all calls
        succeeded."""
        batch = Batch.of(keys)
        labels = self._whole.labels_to_forget(self._whole.scope_of(batch.extra_key))
        return labels is not None and all(
            [self._guard.delete(_in_generation(batch, label)) for label in labels]
        )

    def clear(self) -> bool:
        """Delete all pages of all generations; whether that succeeded."""
        return self._guard.clear()

    def forget_tenant(self, tenant: str) -> int | None:
        """Delete a tenant's pages of all generations; their number, None if the store cannot tell."""
        return self._guard.forget_tenant(tenant)

    def forget_behind(self, keys: Sequence[str]) -> int | None:
        """Delete the pages behind `keys` in every generation that has a record; their number, None if the
        store cannot tell."""
        batch = Batch.of(keys)
        labels = self._whole.labels_to_forget(self._whole.scope_of(batch.extra_key))
        if labels is None:
            return None
        counts = [self._guard.forget_behind(_in_generation(batch, label)) for label in labels]
        return None if None in counts else sum(count or 0 for count in counts)

    def scrub(self) -> bool:
        """Have the guard scrub the store; whether that succeeded."""
        return self._guard.scrub()

    def _labels(self, batch: Batch) -> tuple[bytes, ...]:
        return self._whole.readable(self._whole.scope_of(batch.extra_key), self._component)


def record_key(adapter: str, slot: int) -> str:
    """The reserved name of a record."""
    return hashlib.sha256(f"hiradix-generation-1\0{slot}\0{adapter}".encode()).hexdigest()


def renamed(keys: Sequence[str], label: bytes) -> list[str]:
    """Pages' names in the generation of that label: each key's digits with the label's added (xor).

    Names that are no page hashes get the label in front. 30 us for 128.
    """
    if label == _NO_LABEL:
        return list(keys)
    count, size = len(keys), len(label)
    try:
        digits = bytes.fromhex("".join(keys))
    except ValueError:
        digits = b""
    if len(digits) != count * size or list(map(len, keys)).count(2 * size) != count:
        return [renamed([key], label)[0] if count > 1 else f"{label.hex()[:32]}-{key}" for key in keys]
    number = int.from_bytes(digits, "big") ^ int.from_bytes(label * count, "big")
    text = number.to_bytes(len(digits), "big").hex()
    return [text[at : at + 2 * size] for at in range(0, len(text), 2 * size)]


def _in_generation(batch: Batch, label: bytes) -> Batch:
    """The same pages by their names in the generation of that label."""
    return batch if label == _NO_LABEL else batch.renamed(lambda keys: renamed(keys, label))


def _label_of(record: bytes) -> bytes:
    return hashlib.sha256(record).digest()


def _record_bytes(backbone: ComponentPages) -> int:
    """The length in bytes of a record's numbers, at the start of its page."""
    length, one = backbone.page_bytes, _NUMBER_ONE.get(backbone.elements, b"")
    return _BITS * len(one) if one and length >= _BITS * len(one) else min(32, length)


def _new_record(backbone: ComponentPages) -> bytes:
    """Random numbers: zeros and ones, which lossy stores keep as they are."""
    length, one = _record_bytes(backbone), _NUMBER_ONE.get(backbone.elements, b"")
    if length != _BITS * len(one):
        return os.urandom(length)
    bits = int.from_bytes(os.urandom(_BITS // 8), "big")
    zero = bytes(len(one))
    return b"".join(one if bits >> at & 1 else zero for at in range(_BITS))


def trusted_stores(stores: Stores, components: Sequence[ComponentPages], trust: Trust) -> Generations:
    """`stores`, serving what may be trusted. Compares the witness, where there is one; closes them if it
    cannot."""
    try:
        found = Generations(stores, components, trust)
        found.prove()
    except BaseException:
        stores.close()
        raise
    return found


def trust_of(name: str, keys: Mapping[str, Any] | StoreSettings, trust: Trust) -> Trust:
    """`trust` as a backend with these keys allows: files that SGLang writes too have its names."""
    settings = StoreSettings.read(keys)
    shared = name == "file" and settings.own.get("naming") == "sglang"
    return replace(trust, shared_names=shared, rounds=settings.wraps.quantise != "none")
