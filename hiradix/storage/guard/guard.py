"""The guard every backend gets: deadline, circuit breaker, identity, checksum and figures, wrapped once.

`GuardedStorage` answers, it never raises: whatever a backend does, a page that was not proven good in time is
a miss with a reason. A caller waits at most the deadline, and its pages are never in a backend's hands
(`threads`). The exception are backends with the trait `direct`: theirs are the caller's thread and pages, and
a call that is past its deadline is waited for, while everybody else gets misses (`direct`).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hiradix.errors import Misuse, described
from hiradix.os_memory import address_of, staging_memory
from hiradix.settings import MAX_COUNT, MAX_TIMEOUT_S, OPEN, OverHttp, Type, field_of, group, setting
from hiradix.storage.batch import Batch
from hiradix.storage.fingerprint import PageFingerprint
from hiradix.storage.guard.breaker import (
    NO_TROUBLES,
    Breaker,
    BreakerLimits,
    Breakers,
    BreakerState,
    Troubles,
)
from hiradix.storage.guard.calls import (
    BadAnswer,
    FlagsWithReason,
    OtherKind,
    PageMove,
    Session,
    ThreadSession,
    checked_count,
)
from hiradix.storage.guard.direct import DIRECT_PIECE_BYTES, DirectCalls
from hiradix.storage.guard.staged import Staged, Work
from hiradix.storage.guard.stores import StoragePart
from hiradix.storage.kit.call_threads import (
    CallThreadPool,
    CallTimeout,
    NoFreeThread,
    OthersBusy,
    chunks,
    growing,
)
from hiradix.storage.kit.meters import Histogram, Meters, MissReason, Op
from hiradix.storage.kit.options import CHECKSUM
from hiradix.storage.kit.seal import DEFAULT_ALGORITHM, NONE, Sealer
from hiradix.storage.kit.states import StoreStates
from hiradix.storage.protocol import BadKey, Page, StorageBackend, Traits, check_keys, sizes_of

logger = logging.getLogger(__name__)

SHORT_PIECE_BYTES = 1 << 20
WIDE_PIECE_BYTES = 64 << 20
"""Most that `Traits.width` makes of a part."""
DELETE_KEY_S = 0.001
"""Seconds that a deletion may take for each key, beside the deadline."""
AWAITED = (Op.EXISTS, Op.GET)
"""Calls that requests wait for: one that takes most of its time is as bad as one that takes all of it."""
_CLOSED = BreakerState.CLOSED
_NAMES = {Op.EXISTS: "lookups", Op.GET: "reads", Op.PUT: "writes", Op.DELETE: "deletions"}


@dataclass(frozen=True)
class GuardLimits:
    """Limits of a call to a backend.

    deadline_s: longest wait of one call, plus one second for every `bytes_per_s` of its pages. A lookup or
    read that takes more than half of it, plus what its pages may take, counts as a failure; its answer is
    used.
    num_workers: calls that may be in a backend at once; with all of them hung, calls are misses.
    staging_bytes: memory of each worker; longer batches pass in pieces, and two of these are in memory then.
    checksum: False stores and checks identity and length only.
    """

    deadline_s: float = setting(
        "deadline_s",
        Type.SECONDS,
        2.0,
        "longest wait of one call, plus the time its bytes take at `bytes_per_s`",
        minimum=0.001,
        maximum=MAX_TIMEOUT_S,
        over_http=OPEN,
    )
    bytes_per_s: float = setting(
        "bytes_per_s",
        Type.NUMBER,
        100e6,
        "the slowest rate that is worth waiting for",
        minimum=1.0,
        over_http=OPEN,
    )
    num_workers: int = setting(
        "num_workers",
        Type.INTEGER,
        4,
        "calls that may be in the backend at once; with all of them hung in calls of a kind, more of that "
        "kind are misses. Those that closing the store does not end go on; at 64 in a process no store is "
        "opened until they end",
        minimum=1,
        maximum=MAX_COUNT,
        over_http=OverHttp(256),
    )
    staging_bytes: int = setting(
        "staging_size",
        Type.SIZE,
        8 << 20,
        "memory of each worker, twice that while it moves more: a longer batch passes in pieces, and one is "
        "checked while the next is read, or sealed while the one before is stored. At least one page; for "
        "`s3` room for `num_connections` pages, up to 64 MiB. Reads of `s3`, `redis` and `valkey` need none",
        over_http=OverHttp(float(1 << 30)),
    )
    checksum: bool = field_of(CHECKSUM)
    breaker: BreakerLimits = group(BreakerLimits)
    admin_timeout_s: float = setting(
        "admin_timeout_s",
        Type.SECONDS,
        60.0,
        "longest wait for clearing and deleting",
        minimum=0.001,
        maximum=MAX_TIMEOUT_S,
        over_http=OPEN,
    )


class GuardedStorage(StoragePart):
    """A backend that cannot hurt its caller. Keys are page hashes in hex; thread-safe. Owns the backend.

    Keys that are no `Batch` are taken for one use of a chain of which nothing else is known.
    """

    def __init__(
        self,
        backend: StorageBackend,
        fingerprint: PageFingerprint,
        limits: GuardLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        threads: CallThreadPool | None = None,
        name: str = "",
    ):
        self.name = name or type(backend).__name__
        self.limits = limits = limits or GuardLimits()
        self._backend = backend
        self._clock = clock
        self._traits = getattr(backend, "traits", Traits())
        self._ping = getattr(backend, "ping", _nothing)
        self._stats = getattr(backend, "stats", dict)
        self._register = getattr(backend, "register", _nothing)
        self._digest = fingerprint.digest()
        sealer = Sealer(self._digest, DEFAULT_ALGORITHM if limits.checksum else NONE, limits.checksum)
        self._staged = Staged(None if self._traits.verifies else sealer, self._delete_within)
        self._direct = DirectCalls() if self._traits.direct else None
        if not (self._traits.verifies or not self._traits.direct):
            raise Misuse("a direct backend must verify its pages")
        self.breakers = Breakers(limits.breaker, clock)
        self._threads = threads or CallThreadPool(limits.num_workers)
        self._meters = Meters()
        self._page_bytes = 0  # of a page that was read or stored here
        self._states = StoreStates(type(backend).__name__)
        self._registered: dict[tuple[int, int], bool] = {}  # by place and length: whether the backend took it
        self._backend_stats: Mapping[str, float] = {}
        self._closed = False
        self._ends_threads = True

    def beside(self, backend: StorageBackend, fingerprint: PageFingerprint) -> GuardedStorage:
        """A guard of other pages in the same store, with this one's workers, breakers and figures of calls.

        Close it before this one.
        """
        other = GuardedStorage(backend, fingerprint, self.limits, self._clock, self._threads, self.name)
        other.breakers, other._meters, other._ends_threads = self.breakers, self._meters, False
        return other

    @property
    def backend(self) -> StorageBackend:
        """The guarded backend. Another one in its place must hold the same pages and have the same traits."""
        return self._backend

    @backend.setter
    def backend(self, backend: StorageBackend) -> None:
        self._backend = backend

    @property
    def is_joined(self) -> bool:
        """True: a guard has its backend. See `joining` for stores that are not there yet."""
        return True

    def when_joined(self, call: Callable[[Any], None]) -> None:
        """`call` with this store, now; later with each store within it that is joined then."""
        call(self)
        getattr(self._backend, "when_joined", _nothing)(call)

    # -- pages --------------------------------------------------------------------------

    def exists(self, keys: Sequence[str]) -> int:
        """The number of leading keys that are there: a hint. 0 on any fault, and while nothing can be read.

        The first lookup that finds something after reads' retry interval reads a page, to see whether that
        works again.
        """
        batch, found, reads = Batch.of(keys), 0, self.breakers.of(Op.GET)

        def ask(session: Session) -> None:
            nonlocal found
            work = partial(self._backend.exists, self._named(batch))
            found = checked_count(session.run(work), len(batch))

        if reads.may_pass:
            reason, duration_s = self._call(Op.EXISTS, batch, 0, ask)
        else:
            reason, duration_s = MissReason.BREAKER_OPEN, None
        if found and reads.state is not _CLOSED and not self._can_read(reads, batch[:1]):
            reason, found = MissReason.BREAKER_OPEN, 0
        absent = len(batch) - found
        missed = ((reason or MissReason.ABSENT, absent),) if absent else ()
        self._meters.of(Op.EXISTS).ended(duration_s, found, 0, missed)
        return found

    def get(self, keys: Sequence[str], into: Sequence[Page]) -> list[bool]:
        """Read pages into `into`; True only for pages proven to be what was stored.

        Others are untouched, or undefined if the backend is direct or fills pages in place. `has_failed` of
        the answer tells whether a fault has kept pages from being read.
        """
        return self._move(Op.GET, Batch.of(keys), into)

    def put(self, keys: Sequence[str], pages: Sequence[Page]) -> list[bool]:
        """Store pages. They are copied before the call can be abandoned: reuse them as soon as this returns."""
        return self._move(Op.PUT, Batch.of(keys), pages)

    @property
    def may_read(self) -> bool:
        """Whether a read would be let through now, be it as the one that finds out."""
        return not self._closed and self.breakers.of(Op.GET).may_pass

    @property
    def reads_in_part(self) -> bool:
        """Whether some of the stores within can be read now, and others cannot."""
        return bool(getattr(self._backend, "reads_in_part", False))

    @property
    def troubles(self) -> Troubles:
        """The troubles of lookups and reads, here and in stores within."""
        within: Troubles = getattr(self._backend, "troubles", NO_TROUBLES)
        lookups, reads = self.breakers.of(Op.EXISTS), self.breakers.of(Op.GET)
        changes = lookups.num_changes + reads.num_changes
        return within.and_those(Troubles(changes, lookups.num_failed, reads.num_failed))

    @property
    def wants_computed(self) -> bool:
        """False: pages are compared by `Generations` alone."""
        return False

    @property
    def frees_deleted(self) -> bool:
        """Whether a deleted page's bytes are given back."""
        return self._traits.deletes

    @property
    def is_read_only(self) -> bool:
        """Whether the store takes no pages, as its folder cannot be written."""
        return bool(getattr(self._backend, "read_only", False))

    def refuse(self, num_pages: int) -> list[bool]:
        """The answer to a put of so many pages in a store that is read-only, without asking it."""
        self._meters.of(Op.PUT).ended(None, 0, 0, ((MissReason.READ_ONLY, num_pages),))
        return FlagsWithReason([False] * num_pages, MissReason.READ_ONLY)

    def delete(self, keys: Sequence[str]) -> bool:
        """Forget keys; False when the backend failed, or did not answer within the deadline."""
        keys = Batch.of(keys)
        work = partial(self._backend.delete, self._named(keys))
        num_bytes = int(DELETE_KEY_S * len(keys) * self.limits.bytes_per_s)
        reason, duration_s = self._call(Op.DELETE, keys, num_bytes, lambda session: session.run(work))
        missed = () if reason is None else ((reason, len(keys)),)
        self._meters.of(Op.DELETE).ended(duration_s, 0 if reason else len(keys), 0, missed)
        return reason is None

    def forget_tenant(self, tenant: str) -> int | None:
        """Forget all pages of a tenant: how many there were. None where the backend cannot tell whose its pages
        are, failed, or did not answer in time."""
        forget = getattr(self._backend, "forget_tenant", _cannot_tell)
        return self._counted("forget_tenant", partial(forget, tenant))

    def forget_behind(self, keys: Sequence[str]) -> int | None:
        """Forget all pages that continue one of these: how many there were. None as for `forget_tenant`."""
        forget = getattr(self._backend, "forget_behind", _cannot_tell)
        return self._counted("forget_behind", partial(forget, self._named(Batch.of(keys))))

    def _counted(self, what: str, work: Callable[[], int | None]) -> int | None:
        found: list[int | None] = []
        return found[0] if self._admin(what, lambda: found.append(work())) else None

    def scrub(self) -> bool:
        """Leave no bytes and no names of what was forgotten; False when the backend failed, was late, or does
        not give bytes back."""
        return self.frees_deleted and self._admin("scrub", getattr(self._backend, "scrub", _nothing))

    # -- lifecycle ----------------------------------------------------------------------

    def clear(self) -> bool:
        """Forget all pages of this fingerprint; False when the backend failed or did not answer in time."""
        return self._admin("clear", self._backend.clear)

    def ping(self) -> bool:
        """Whether the store can be reached now."""
        return self._admin("ping", self._ping, self.limits.deadline_s)

    def register(self, memory: memoryview) -> bool:
        """Tell the backend of a host pool's memory, once: what came of it is remembered."""
        place = address_of(memory), memory.nbytes
        if place not in self._registered:
            self._registered[place] = self._admin("register", lambda: self._register(memory))
        return self._registered[place]

    def close(self, timeout_s: float = 5.0) -> None:
        """Close the backend, waiting at most `timeout_s`; calls from now on are misses. Idempotent.

        With all workers hung one more closes it, which may be what ends their calls.
        """
        if not self._closed:
            self._closed = True
            self._admin("close", self._backend.close, timeout_s, extra=True)
            if self._ends_threads:
                self._threads.close()

    @property
    def state(self) -> BreakerState:
        """The worst state of the breakers of all kinds of calls; `breakers` has them one by one."""
        return self.breakers.state

    def histograms(self) -> Mapping[Op, Histogram]:
        """Durations of calls that reached the backend."""
        return {op: self._meters.of(op).histogram() for op in Op}

    def stats(self) -> Mapping[str, float]:
        """Figures by name; the backend's own as `backend_*`, as of its last call. Never waits for I/O."""
        if self._direct is not None:
            self._refresh_stats()
        return {
            **self._meters.snapshot(),
            **self.breakers.figures(),
            "workers_busy": self._threads.num_busy,
            "late_answers": self._threads.num_ended_abandoned,
            "joined": 1.0,
            "read_only": float(self.is_read_only or self._backend_stats.get("read_only", 0)),
            **{f"backend_{name}": value for name, value in self._backend_stats.items()},
        }

    # -- one call -----------------------------------------------------------------------

    def _named(self, batch: Batch) -> Batch:
        """The batch as the backend knows it."""
        return batch if self._traits.namespaced else batch.renamed(self._names)

    def _names(self, keys: Sequence[str]) -> list[str]:
        return [f"{self._digest[:32]}-{key}" for key in keys]

    def _move(self, op: Op, batch: Batch, pages: Sequence[Page]) -> list[bool]:
        sizes = sizes_of(pages)
        if len(batch) != len(sizes):
            raise Misuse(f"{len(batch)} keys for {len(sizes)} pages")
        moved = PageMove(list(batch), self._named(batch), pages)
        if sizes and not self._page_bytes:
            self._page_bytes = sizes[0]
        total_bytes = sum(sizes)

        def move(session: Session) -> None:
            more = self._staged.seal_bytes
            staged = [size + more for size in sizes] if more else sizes
            self._move_chunks(op, session, moved, self._pieces(op, staged))

        reason, duration_s = self._call(op, batch, total_bytes, move)
        lost = moved.ok.count(False) - sum(moved.refused.values())
        missed = (*moved.refused.items(), (reason or _UNEXPLAINED[op], lost))
        if not self._traits.verifies:
            self._log_damage(moved)
        num_done = moved.ok.count(True)
        if num_done < len(sizes):
            total_bytes = sum([size for size, ok in zip(sizes, moved.ok) if ok])
        self._meters.of(op).ended(duration_s, num_done, total_bytes, missed)
        if num_done == len(sizes) or (reason is None and not moved.refused):
            return moved.ok
        reasons = Counter(moved.refused)
        if reason is not None:
            reasons[reason] += lost
        return FlagsWithReason(moved.ok, reasons)

    def _log_damage(self, moved: PageMove) -> None:
        """Log that pages did not pass the checks here, and the end of that: a backend that verifies does so."""
        bad = moved.refused.get(MissReason.DAMAGED, 0) + moved.refused.get(MissReason.FOREIGN, 0)
        if bad:
            self._states.enter("damaged", f"{bad} pages of a call are not what was stored: misses")
        else:
            self._states.leave("damaged")

    def _is_in_place(self, op: Op) -> bool:
        """Whether pages are filled in place, each checked as it comes."""
        return op is Op.GET and self._traits.in_place and not self._traits.verifies

    def _pieces(self, op: Op, sizes: Sequence[int]) -> list[range]:
        """The parts in which pages of such sizes go to the backend. A staged piece is filled while the backend
        has the one before: so the first of a put, which it waits for, is a short one."""
        if self._direct is not None or self._is_in_place(op):
            return chunks(sizes, DIRECT_PIECE_BYTES)
        wide = min(self._traits.width * max(sizes, default=0), WIDE_PIECE_BYTES)
        runs = chunks(sizes, max(self.limits.staging_bytes, wide))
        if op is Op.PUT and runs:
            runs[:1] = growing(runs[0], sizes, max(SHORT_PIECE_BYTES, wide))
        return runs

    def _call(
        self, op: Op, keys: Sequence[str], num_bytes: int, body: Callable[[Session], None]
    ) -> tuple[MissReason | None, float | None]:
        """Run `body` behind breaker and deadline: why it did not come to its end, and the seconds it took.

        None for these: it did; it was not begun.
        """
        if not (self._traits.checks_keys or _keys_ok(op, keys)):
            return MissReason.BAD_KEY, None
        start_s = self._clock()
        if self._closed:
            return MissReason.CLOSED, None
        if self._direct is not None and self._direct.overdue(start_s):
            return MissReason.BUSY, None
        breaker = self.breakers.of(op)
        admission = breaker.admit()
        if admission is None:
            return MissReason.BREAKER_OPEN, None
        bytes_s = num_bytes / self.limits.bytes_per_s
        limit_s = self.limits.deadline_s + bytes_s
        is_timed = op in AWAITED and not self._traits.guarded
        quick_s = self.limits.deadline_s / 2 + bytes_s if is_timed else limit_s
        if breaker.state is BreakerState.HALF_OPEN:
            limit_s = quick_s
        reason: MissReason | None = None
        ok: bool | None = True
        why, waited_s = "", 0.0
        try:
            waited_s = self._within(op, start_s, start_s + limit_s, body)
        except BadKey as error:
            reason, why, ok = MissReason.BAD_KEY, str(error), None
        except (CallTimeout, NoFreeThread, BadAnswer) as error:
            is_of_others = isinstance(error, OtherKind | OthersBusy)
            is_of_others |= self._traits.guarded and isinstance(error, CallTimeout)
            reason, why, ok = _FAULTS[type(error)], str(error), None if is_of_others else False
        except Exception as error:  # a backend may raise anything; none of it may reach a request
            reason, why, ok = MissReason.ERROR, described(error), False
        duration_s = self._clock() - start_s
        if ok and duration_s - waited_s > quick_s:
            why, ok = f"took {duration_s - waited_s:.3f} s, more than {quick_s:.3f} s", False
        self._record(op, breaker.record(admission, ok), why)
        return reason, duration_s

    def _record(self, op: Op, is_news: bool, why: str) -> None:
        """Say how a call ended: where that changes what is done with calls of its kind, in a warning."""
        breaker, what = self.breakers.of(op), f"{_NAMES[op]} of {self.name}"
        if is_news and breaker.state is _CLOSED:
            logger.warning("storage breaker is now closed for %s: they work again", what)
        elif is_news:
            also = "; lookups are misses until then" if op is Op.GET else ""
            logger.warning(
                "storage breaker is now open for %s, the last one: %s; one is tried in %g s%s",
                what, why or "no answer", breaker.retry_s, also,
            )  # fmt: skip
        elif why:
            logger.info("storage %s failed: %s", op.value, why)

    def _within(self, op: Op, start_s: float, deadline: float, body: Callable[[Session], None]) -> float:
        """Run `body`; the seconds that it waited for a worker, which others had."""
        if self._direct is None:
            with self._threads.thread(deadline - self._clock(), kind=op) as thread:
                waited_s = self._clock() - start_s
                body(ThreadSession(self._clock, deadline, thread, self._refresh_stats))
            return waited_s
        session = Session(self._clock, deadline)
        number = self._direct.begin(deadline)
        try:
            body(session)
        finally:
            self._direct.end(number)
        late_s = -session.remaining_s()
        if late_s > 0:
            raise CallTimeout(f"ended {late_s:.3f} s late")
        return 0.0

    def _can_read(self, reads: Breaker, batch: Batch) -> bool:
        """Whether what a lookup has found may be read after all: one page is, where that is to be tried.

        A direct backend's pages have to be the caller's own, and how long a page is may not be known yet:
        then the read that follows the lookup is the one that is tried.
        """
        if self._direct is not None or not self._page_bytes:
            return reads.may_pass
        self.get(batch, [[staging_memory(self._page_bytes)]])
        return reads.state is _CLOSED

    def _delete_within(self, session: ThreadSession, names: Sequence[str]) -> bool:
        """Delete names on a put's way. A deletion that fails is none of the put's faults, and one that hangs
        keeps no worker from puts."""
        breaker = self.breakers.of(Op.DELETE)
        admission = None if self._threads.is_full(Op.DELETE) else breaker.admit()
        if admission is None:
            return False
        thread = session.thread
        before, thread.kind = thread.kind, Op.DELETE
        try:
            session.run(partial(self._backend.delete, names))
        except CallTimeout as error:
            self._record(Op.DELETE, breaker.record(admission, False), str(error))
            raise OtherKind(f"a deletion before it: {error}") from error
        except Exception as error:  # as in _call
            thread.kind = before
            self._record(Op.DELETE, breaker.record(admission, False), described(error))
            return False
        thread.kind = before
        self._record(Op.DELETE, breaker.record(admission, True), "")
        return True

    def _refresh_stats(self) -> None:
        """Take the backend's figures: after a call, on its worker; a direct one's when they are asked for."""
        try:
            self._backend_stats = dict(self._stats())
        except Exception:  # figures are not worth a page
            self._meters.count("stats_failed")

    def _work(self, op: Op, moved: PageMove) -> Work:
        call, names = getattr(self._backend, op.value), moved.names

        def work(chunk: range, pages: Sequence[Page]) -> Callable[[], object]:
            return partial(call, names[chunk.start : chunk.stop], pages)

        return work

    def _move_chunks(self, op: Op, session: Session, moved: PageMove, runs: Sequence[range]) -> None:
        work = self._work(op, moved)
        if not isinstance(session, ThreadSession):
            for chunk in runs:
                pages = moved.pages[chunk.start : chunk.stop]
                moved.answered(chunk, session.run(work(chunk, pages)))
        elif self._is_in_place(op):
            self._staged.read_in_place(session, moved, runs, work)
        elif op is Op.GET:
            self._staged.read(session, moved, runs, work)
        else:
            self._staged.write(session, moved, runs, work)

    def _admin(
        self, what: str, work: Callable[[], None], timeout_s: float | None = None, extra: bool = False
    ) -> bool:
        timeout_s = self.limits.admin_timeout_s if timeout_s is None else timeout_s
        deadline = self._clock() + timeout_s
        try:
            with self._threads.thread(timeout_s / 2 if extra else timeout_s, extra) as thread:
                ThreadSession(self._clock, deadline, thread, self._refresh_stats).run(work)
        except Exception as error:  # as in _call
            logger.warning("storage %s failed: %s", what, described(error))
            return False
        return True


def _keys_ok(op: Op, keys: Sequence[str]) -> bool:
    try:
        check_keys(keys)
    except BadKey as error:
        logger.warning("storage %s: %s", op.value, error)
        return False
    return True


def _cannot_tell(*_: object) -> int | None:
    """Stands for a listing that a backend does not have."""
    return None


def _nothing(*_: object) -> None:
    """Stands for an optional call that a backend does not have."""


_UNEXPLAINED = {Op.GET: MissReason.ABSENT, Op.PUT: MissReason.REFUSED}
"""Of pages for which a backend answered no, and gave no reason."""
_FAULTS: Mapping[type[Exception], MissReason] = {
    CallTimeout: MissReason.TIMEOUT,
    OtherKind: MissReason.TIMEOUT,
    NoFreeThread: MissReason.BUSY,
    OthersBusy: MissReason.BUSY,
    BadAnswer: MissReason.BAD_ANSWER,
}
