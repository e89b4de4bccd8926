"""The `tier` backend: a near store over a far one, for example `disk` over `s3`.

Both are whole stores of their own, each behind its own guard, so one that fails or stalls leaves the other's
pages to be had. Pages go to both; what is found far only is put near on its way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hiradix.errors import ConfigError, StorageError
from hiradix.settings import OPEN, REQUIRED, Type, setting
from hiradix.storage.backends.tier.promotions import Promotions
from hiradix.storage.batch import Batch
from hiradix.storage.guard.breaker import Troubles
from hiradix.storage.guard.calls import as_answered
from hiradix.storage.guard.stores import StoragePart, WhenJoined
from hiradix.storage.kit.options import CHECKSUM, flag, read_keys
from hiradix.storage.opening import open_storage
from hiradix.storage.protocol import Page, StorageBackend, StorageContext, Traits, check_keys
from hiradix.storage.wrappers.quota import QUOTA_KEYS

DEADLINES_S = {"upper": 0.5, "lower": 1.0}


def _half(name: str) -> Any:
    text = "`backend` and that backend's keys, those of every backend included; `deadline_s` is"
    return setting(name, Type.STORE, REQUIRED, f"{text} {DEADLINES_S[name]}", over_http=OPEN)


@dataclass(frozen=True)
class TierConfig:
    """Keys of the `tier` backend."""

    ALSO: ClassVar = (CHECKSUM,)

    upper: Mapping[str, Any] = _half("upper")
    lower: Mapping[str, Any] = _half("lower")
    promote: bool = setting(
        "promote",
        Type.BOOL,
        True,
        "what was found in `lower` only is put into `upper` on its way",
        over_http=OPEN,
    )


class TierBackend(StorageBackend):
    """Serves pages from a near store, and from a far one behind it. Thread-safe."""

    traits = Traits(verifies=True, namespaced=True, guarded=True)  # and whether both delete

    def __init__(self, context: StorageContext):
        config = read_keys(TierConfig, context.extra_config, "tier")
        self._promote = config.promote
        self._closed = False
        self._num_promoted = 0
        self._promotions = Promotions()
        self.upper = _open("upper", config.upper, context)
        try:
            self.lower = _open("lower", config.lower, context)
        except ConfigError:
            self.upper.close()
            raise
        deletes = self.upper.frees_deleted and self.lower.frees_deleted
        self.traits = dataclasses.replace(self.traits, deletes=deletes)

    def exists(self, batch: Batch) -> int:
        self._check(batch)
        found = self.upper.exists(batch)
        while found < len(batch):
            before = found
            for store in (self.lower, self.upper):
                if found < len(batch):
                    found += store.exists(batch[found:])
            if found == before:
                break
        return found

    def get(self, batch: Batch, into: Sequence[Page]) -> list[bool]:
        self._check(batch)
        near = self.upper.get(batch, into)
        ok = list(near)
        missing = [index for index, good in enumerate(ok) if not good]
        if not missing:
            return ok
        absent = batch.pick(missing)
        with self._promotions.promoting(absent) as gone:
            answers = self.lower.get(absent, [into[i] for i in missing])
            found = [index for index, good in zip(missing, answers) if good]
            for index in found:
                ok[index] = True
            if self._promote and found and not self.upper.is_read_only:
                stored = self.upper.put(batch.pick(found), [into[i] for i in found])
                self._num_promoted += sum(stored)
        if self._promote and gone:
            self.upper.delete(gone)
        return as_answered(ok, answers, near)

    def put(self, batch: Batch, pages: Sequence[Page]) -> list[bool]:
        """True where at least one of the two took the page."""
        self._check(batch)
        near, far = (store.put(batch, pages) for store in (self.upper, self.lower))
        ok = [a or b for a, b in zip(near, far, strict=True)]
        return as_answered(ok, far, near)

    @property
    def read_only(self) -> bool:
        """Whether neither of the two takes pages, as their folders cannot be written."""
        return self.upper.is_read_only and self.lower.is_read_only

    def delete(self, keys: Sequence[str]) -> None:
        self._check(keys)
        with self._promotions.deleting(keys):
            self._both("delete", lambda store: store.delete(keys))

    def forget_tenant(self, tenant: str) -> int | None:
        """None where one of the two cannot tell; the other's are gone then."""
        self._check(())
        with self._promotions.deleting(None):
            return self._most(lambda store: store.forget_tenant(tenant))

    def forget_behind(self, batch: Batch) -> int | None:
        """None where one of the two cannot tell; what continues these in the other is gone then."""
        self._check(batch)
        with self._promotions.deleting(None):
            return self._most(lambda store: store.forget_behind(batch))

    def scrub(self) -> None:
        self._check(())
        self._both("scrub", lambda store: store.scrub())

    def _most(self, forget: Callable[[StoragePart], int | None]) -> int | None:
        """The larger of two counts, as most pages are in both; None where one is not known."""
        counts = [forget(store) for store in (self.upper, self.lower)]
        return None if None in counts else max(count or 0 for count in counts)

    def clear(self) -> None:
        self._check(())
        with self._promotions.deleting(None):
            self._both("clear", lambda store: store.clear())

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.upper.close()
            self.lower.close()

    def ping(self) -> None:
        """Raises when neither answers."""
        self._check(())
        if not self.upper.ping() and not self.lower.ping():
            raise StorageError("tier: neither the upper nor the lower store answers")

    @property
    def troubles(self) -> Troubles:
        """The troubles of both stores, added up."""
        return self.upper.troubles.and_those(self.lower.troubles)

    @property
    def reads_in_part(self) -> bool:
        """Whether one of the two can be read now, and the other cannot."""
        is_one = self.upper.may_read != self.lower.may_read
        return is_one or self.upper.reads_in_part or self.lower.reads_in_part

    def when_joined(self, call: WhenJoined) -> None:
        """`call` with each of the two stores that is joined later."""
        for store in (self.upper, self.lower):
            if not store.is_joined:
                store.when_joined(call)

    def register(self, memory: memoryview) -> None:
        self._both("register", lambda store: store.register(memory))

    def stats(self) -> Mapping[str, float]:
        found: dict[str, float] = {"promoted": self._num_promoted}
        for name, store in (("upper", self.upper), ("lower", self.lower)):
            found |= {f"{name}_{figure}": value for figure, value in store.stats().items()}
        return found

    def _check(self, keys: Sequence[str]) -> None:
        if self._closed:
            raise StorageError("storage backend is closed")
        check_keys(keys)

    def _both(self, what: str, call: Callable[[StoragePart], bool]) -> None:
        done = {name: call(store) for name, store in (("upper", self.upper), ("lower", self.lower))}
        if not all(done.values()):
            failed = ", ".join(name for name, ok in done.items() if not ok)
            raise StorageError(f"tier: {what} failed in {failed}")


def _open(name: str, value: Mapping[str, Any], context: StorageContext) -> StoragePart:
    for key in QUOTA_KEYS:
        if key in value:
            raise ConfigError(f"{flag(name)}: {flag(key)} is a key of the tier, for both stores together")
    keys = {"deadline_s": DEADLINES_S[name]} | {key: item for key, item in value.items() if key != "backend"}
    try:
        return open_storage(value["backend"], dataclasses.replace(context, extra_config=keys))
    except ConfigError as error:
        raise type(error)(f"{flag(name)}: {error}") from error
