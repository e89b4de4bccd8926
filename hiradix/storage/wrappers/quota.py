"""Byte quotas: how much of a store each tenant's pages may take.

A tenant at his limit makes room with his own pages, coldest first; nobody else's leave for his. Where a
backend cannot delete, his further pages are refused. What counts is a page's length as it comes from the
guard, whatever compression makes of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hiradix.errors import ConfigError, StorageError
from hiradix.settings import OPEN, Type, setting, settings_of
from hiradix.storage.batch import Batch
from hiradix.storage.fingerprint import PageFingerprint
from hiradix.storage.guard.calls import as_answered
from hiradix.storage.kit.options import flag, parse_size
from hiradix.storage.protocol import Page, StorageBackend, check_keys, page_bytes
from hiradix.storage.wrappers.account import Account, AccountEntry, AccountError, Entered
from hiradix.storage.wrappers.wrapper import Wrapper

logger = logging.getLogger(__name__)

SHOWN_TENANTS, SHOWN_CHARS = 16, 12
"""The tenants with the most bytes have a figure each in the statistics, named by so much of their account."""
MAX_USES = 1 << 14
"""Reads remembered until somebody has to leave."""
MOMENT_NS = 1_000_000_000
"""A call that goes on in a chain so soon after another ended there is one use with it: jobs come in batches."""
MAX_ENDS = 1 << 10
"""Calls whose ends are remembered for that."""
_FORGOTTEN_BYTES = 1 << 30  # of a tenant's pages that are deleted together
_ROUNDS = 4  # of making room; more than one only where other processes take it
_KINDS = ("salt:", "key:", "tenant:")


def _sizes(values: Mapping[str, Any]) -> dict[str, int]:
    found = {}
    for tenant, size in values.items():
        if tenant and not tenant.startswith(_KINDS):
            kinds = '"tenant:" and a tenant, "salt:" and the cache_salt, "key:" and the extra_key, or ""'
            raise ConfigError(f"{flag('quotas')}: {tenant!r} names no tenant; expected {kinds}")
        named = f"salt:{tenant}" if tenant.startswith("tenant:") else tenant  # his salt begins so
        found[named] = parse_size(f"quotas {tenant!r}", size)
    return found


@dataclass(frozen=True)
class QuotaConfig:
    """default_bytes: of each tenant without an entry in `own`; None: no limit. path: the accounts' folder."""

    default_bytes: int | None = setting(
        "quota",
        Type.SIZE,
        None,
        "bytes of each tenant that `quotas` does not name; none: no limit, 0: nothing",
        over_http=OPEN,
    )
    own: Mapping[str, int] = setting(
        "quotas",
        Type.SIZES,
        dict,
        "bytes by tenant: `tenant:` and a tenant of [`--api-keys`](http-api.md#keys), `salt:` and the "
        "request's "
        '`cache_salt`, or, where it has none, `key:` and its `extra_key`; `""` is everybody without either',
        to=_sizes,
        over_http=OPEN,
    )
    path: str = setting(
        "quota_path",
        Type.FOLDER,
        "",
        "folder of the accounts, made if missing; one for each store, on a local disk, shared by the host's "
        "servers of that store",
        default_text="required for a quota",
        over_http=OPEN,
    )

    @property
    def is_on(self) -> bool:
        return self.default_bytes is not None or bool(self.own)

    def check(self) -> None:
        """Raise ConfigError for a quota without a folder."""
        if self.is_on and not self.path:
            raise ConfigError(f"{flag('quota_path')}: a quota needs a folder for its accounts, one per store")

    def share(self, part: Callable[[int], int]) -> QuotaConfig:
        """The same for one of a model's components, which gets `part` of each limit."""
        default = None if self.default_bytes is None else part(self.default_bytes)
        own = {tenant: part(size) for tenant, size in self.own.items()}
        return dataclasses.replace(self, default_bytes=default, own=own)

    def limit(self, tenant: str, num_ranks: int) -> int | None:
        """Bytes that one rank of a model may store for the tenant: its share of the tenant's quota; None: no
        limit."""
        whole = self.own.get(tenant, self.default_bytes)
        return None if whole is None else whole // num_ranks


QUOTA_KEYS = tuple(one.name for one in settings_of(QuotaConfig))


def account_name(tenant: str) -> str:
    """32 hex digits that stand for a tenant in files and figures: of its SHA-256, as salts may be secrets."""
    return hashlib.sha256(tenant.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def with_quota(
    backend: StorageBackend, name: str, fingerprint: PageFingerprint, config: QuotaConfig
) -> StorageBackend:
    """`backend`, called `name`, within the quotas of `config`, if any. Raises ConfigError, having closed it.

    The account is that of the fingerprint's pages; a quota is for all ranks of a model together.
    """
    if not config.is_on:
        return backend
    ranks = fingerprint.tp_size * fingerprint.pp_size
    path = Path(config.path).expanduser() / f"{fingerprint.digest()[:32]}.quota"
    try:
        account = Account(path, name)
    except ConfigError:
        backend.close()
        raise
    return QuotaStorage(backend, account, lambda tenant: config.limit(tenant, ranks))


class QuotaStorage(Wrapper):
    """Limits how many bytes each tenant's pages take in the store within. Owns the account. Thread-safe."""

    def __init__(
        self,
        inner: StorageBackend,
        account: Account,
        limit: Callable[[str], int | None],
        time_ns: Callable[[], int] = time.time_ns,
    ):
        super().__init__(inner)
        self._deletes = self.traits.deletes
        self._account, self._limit, self._time_ns = account, limit, time_ns
        self._lock = threading.Lock()
        self._uses: dict[str, int] = {}
        # last page -> when called, when used, the call's pages, and the page in front of them
        self._ends: OrderedDict[str, tuple[int, int, tuple[str, ...], str]] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._largest = account.largest(SHOWN_TENANTS)

    def get(self, batch: Batch, into: Sequence[Page]) -> list[bool]:
        ok = super().get(batch, into)
        used = [use for use, good in zip(self._uses_of(batch), ok) if good]
        if used:
            with self._lock:
                self._uses |= reversed(used)
                while len(self._uses) > MAX_USES:
                    del self._uses[next(iter(self._uses))]
        return ok

    def put(self, batch: Batch, pages: Sequence[Page]) -> list[bool]:
        """True: stored, and within the tenant's limit. A batch that is too long keeps its head."""
        check_keys(batch)
        limit_bytes = self._limit(batch.tenant)
        if limit_bytes is None or not batch or self.read_only:
            return super().put(batch, pages)
        try:
            return self._put_within(limit_bytes, batch, pages)
        except AccountError as error:  # no fault of the store, from which others are to read on
            with self._lock:
                self._counts["quota_refused_account"] += len(batch)
                is_first = self._counts["quota_refused_account"] == len(batch)
            if is_first:
                logger.warning("%s: pages are refused for as long as that lasts", error)
            return [False] * len(batch)

    def _put_within(self, limit_bytes: int, batch: Batch, pages: Sequence[Page]) -> list[bool]:
        name, entries = account_name(batch.tenant), self._entries(batch, pages)
        entered = self._make_room(name, entries, batch, limit_bytes)
        which = [index for index, key in enumerate(batch) if key in entered.keys]
        ok = [False] * len(batch)
        answers: list[bool] = []
        if which:
            answers = super().put(batch.pick(which), [pages[i] for i in which])
            for index, good in zip(which, answers, strict=True):
                ok[index] = bool(good)
        self._settle(name, {key: entries[key] for key in entered.keys}, batch, ok)
        self._count_refused(entered, len(batch) - len(which))
        return as_answered(ok, answers)

    def delete(self, keys: Sequence[str]) -> None:
        check_keys(keys)
        if self._deletes:
            self._take_out(keys)
        else:
            self.inner.delete(keys)

    def forget_tenant(self, tenant: str) -> int | None:
        """Delete the pages of a tenant; by the account if it counts them, which it does for tenants with a
        limit."""
        if self._limit(tenant) is None or not self._deletes:
            return super().forget_tenant(tenant)
        name, num_pages = account_name(tenant), 0
        while keys := self._account.coldest(name, _FORGOTTEN_BYTES, ()):
            self.inner.delete(keys)
            self._account.gone(keys)
            num_pages += len(keys)
        self._look()
        return num_pages

    def clear(self) -> None:
        self._account.leave_all()
        self.inner.clear()
        self._account.gone_all()
        self._look()

    def close(self) -> None:
        try:
            self._note_uses()
        except StorageError as error:
            logger.warning("the last reads are not in the quota account: %s", error)
        self._account.close()
        self.inner.close()

    def own_stats(self) -> Mapping[str, float]:
        num_tenants, largest = self._largest
        with self._lock:
            counts = dict(self._counts)
        shown = {f"quota_used_bytes_{name[:SHOWN_CHARS]}": float(size) for name, size in largest}
        return {"quota_tenants": num_tenants, **shown, **counts}

    # -- inside -------------------------------------------------------------------------

    def _entries(self, batch: Batch, pages: Sequence[Page]) -> dict[str, AccountEntry]:
        """Each key once, in order, the first hottest."""
        found: dict[str, AccountEntry] = {}
        for (key, used_ns), page in zip(self._uses_of(batch), pages, strict=True):
            found.setdefault(key, AccountEntry(page_bytes(page), used_ns))
        return found

    def _uses_of(self, batch: Batch) -> Iterable[tuple[str, int]]:
        """Each page's key and time of use, the hottest first."""
        now_ns = self._time_ns()
        with self._lock:
            end = self._ends.get(batch.after)
            goes_on = end is not None and 0 <= now_ns - end[0] < MOMENT_NS
            used_ns = batch.used_ns(self, end[1] - 1 if end and goes_on else now_ns)
            if used_ns:
                self._ends[batch[-1]] = now_ns, used_ns[-1], tuple(batch), batch.after
                self._ends.move_to_end(batch[-1])
                if len(self._ends) > MAX_ENDS:
                    self._ends.popitem(last=False)
        return zip(batch, used_ns, strict=True)

    def _make_room(
        self, name: str, entries: Mapping[str, AccountEntry], batch: Batch, limit_bytes: int
    ) -> Entered:
        """Enter what may be put, after as many of the tenant's coldest pages left as it takes: none of what
        its chain has in front of it, without which it would not be found."""
        entered = self._account.enter(name, entries, limit_bytes)
        for _ in range(_ROUNDS if self._deletes else 0):
            if not entered.short_bytes:
                break
            self._note_uses()
            keep = self._in_front({*entries, *batch.earlier(batch.start)}, batch.use.after)
            victims = self._account.coldest(name, entered.short_bytes, keep)
            if not victims:
                break
            self.inner.delete(victims)
            self._account.gone(victims)
            with self._lock:
                self._counts["quota_evicted"] += len(victims)
            entered = self._account.enter(name, entries, limit_bytes)
        return entered

    def _in_front(self, keep: set[str], after: str) -> set[str]:
        """`keep`, with the pages of the calls that `after` ended, as far back as these are remembered."""
        with self._lock:
            while (end := self._ends.get(after)) is not None and not keep.issuperset(end[2]):
                keep.update(end[2])
                after = end[3]
        return keep

    def _settle(
        self, name: str, entries: Mapping[str, AccountEntry], keys: Sequence[str], ok: list[bool]
    ) -> None:
        """Book a put in the account: pages that were refused leave it first; a page that somebody deleted
        meanwhile is reported as not put."""
        stored = {key for key, good in zip(keys, ok) if good}
        refused = [key for key in entries if key not in stored]
        if refused:
            self._account.leave(refused)
        lost = set(self._account.confirm(name, {key: entries[key] for key in entries if key in stored}))
        if lost:
            self._take_out(list(lost))
            ok[:] = [good and key not in lost for key, good in zip(keys, ok)]
        self._look()

    def _take_out(self, keys: Sequence[str]) -> None:
        self._account.leave(keys)
        self.inner.delete(keys)
        self._account.gone(keys)
        self._look()

    def _note_uses(self) -> None:
        with self._lock:
            uses, self._uses = self._uses, {}
        if uses:
            self._account.use(uses)

    def _look(self) -> None:
        self._largest = self._account.largest(SHOWN_TENANTS)

    def _count_refused(self, entered: Entered, num_pages: int) -> None:
        if num_pages:
            reason = "tenants" if entered.too_many else "room" if self._deletes else "no_delete"
            with self._lock:
                self._counts[f"quota_refused_{reason}"] += num_pages
