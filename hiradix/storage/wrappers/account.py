"""The account behind quotas: which tenant's pages are in a store, in a file that processes of a host share.

Numbered promises, which quotas rest on:
1. A page is entered before it is put, and crossed out after it was deleted: whoever is killed in between
   leaves the account too high, never too low.
2. A page that is being deleted is marked first and still counts. If it is put meanwhile, the mark goes and
   the page stays in the account; a put that finds its page marked or gone afterwards takes it for deleted.
3. A tenant's bytes are the sum over his pages, kept in the same transaction.

SQLite keeps the file: killed processes leave it whole, and so does a power failure, which may cost it the
last entries, those of at most 1000 of its pages (4 MiB).
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hiradix.errors import ConfigError, StorageError
from hiradix.storage.kit.lru import BEFORE_ALL_NS, SKEW_NS

logger = logging.getLogger(__name__)

VERSION = 1
LOCK_TIMEOUT_S = 1.0
"""Longest wait for other threads and processes."""
MAX_TENANTS = 4096
"""With pages in one account; pages of further ones are refused."""

_SCHEMA = (
    "CREATE TABLE store(backend TEXT NOT NULL)",
    """
    CREATE TABLE pages(
        key TEXT PRIMARY KEY, tenant TEXT NOT NULL, bytes INTEGER NOT NULL, used_ns INTEGER NOT NULL,
        leaving INTEGER NOT NULL DEFAULT 0
    ) WITHOUT ROWID
    """,
    "CREATE INDEX coldest ON pages(tenant, leaving DESC, used_ns)",
    """
    CREATE TABLE tenants(
        tenant TEXT PRIMARY KEY, bytes INTEGER NOT NULL, pages INTEGER NOT NULL
    ) WITHOUT ROWID
    """,
)


@dataclass(frozen=True)
class AccountEntry:
    """A page to be put: its bytes, and when it counts as used (ns)."""

    num_bytes: int
    used_ns: int


@dataclass(frozen=True)
class Entered:
    """keys: those of a batch that may be put. short_bytes: what must leave before more of it may be."""

    keys: frozenset[str]
    short_bytes: int = 0
    too_many: bool = False


class AccountError(StorageError):
    """The file cannot be had: somebody has locked it, it is damaged, or its disk is full."""


class Account:
    """Counts the bytes of each tenant's pages in a file that processes of a host share. Thread-safe;
    everything raises AccountError when the file cannot be had."""

    def __init__(self, path: Path, backend: str, time_ns: Callable[[], int] = time.time_ns):
        """Opens or makes the file. Raises ConfigError: no such folder, no account, or another backend's."""
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
            self._db: sqlite3.Connection | None = sqlite3.connect(
                path, timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"quota account {path}: {error}") from error
        try:
            self._begin(path, backend)
            self._distrust(time_ns())
        except (ConfigError, StorageError, sqlite3.Error) as error:
            self.close()
            raise ConfigError(f"quota account {path}: {error}") from error

    def _begin(self, path: Path, backend: str) -> None:
        with self._database() as db:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
        with self._writing() as db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version == 0:
                for statement in _SCHEMA:
                    db.execute(statement)
                db.execute("INSERT INTO store VALUES (?)", (backend,))
                db.execute(f"PRAGMA user_version = {VERSION}")
                logger.warning("a new quota account %s: what is stored already is not counted", path)
            elif version != VERSION:
                raise ConfigError(f"format {version}, this is {VERSION}")
            (owner,) = db.execute("SELECT backend FROM store").fetchone()
            if owner != backend:
                raise ConfigError(f"is that of a {owner} store, not of {backend}")

    def _distrust(self, now_ns: int) -> None:
        """Times in the future, as `believed` says."""
        with self._writing() as db:
            ahead = "UPDATE pages SET used_ns = used_ns - ? WHERE used_ns > ?"
            db.execute(ahead, (BEFORE_ALL_NS, now_ns + SKEW_NS))

    # -- puts ---------------------------------------------------------------------------

    def enter(self, tenant: str, pages: Mapping[str, AccountEntry], limit_bytes: int) -> Entered:
        """Enter a batch, head first, as far as the tenant's limit goes. Pages that are in stay in."""
        with self._writing() as db:
            used = _used(db, tenant)
            there = {key: bytes_ for key in pages for bytes_ in _bytes_of(db, key, tenant)}
            known = _kept(db, there, limit_bytes)
            new = [key for key in pages if key not in there]
            if new and not used and _num_tenants(db) >= MAX_TENANTS:
                return Entered(frozenset(known), too_many=True)
            own, wanted = sum(known.values()), 0
            fitting = []
            for key in new:
                wanted += pages[key].num_bytes
                if own + wanted > limit_bytes:
                    wanted -= pages[key].num_bytes
                    break
                fitting.append(key)
            entered = dict.fromkeys(known)
            for key in fitting:
                if used + pages[key].num_bytes > limit_bytes:
                    break
                used += pages[key].num_bytes
                wanted -= pages[key].num_bytes
                entered[key] = None
            _insert(db, tenant, {key: pages[key] for key in entered if key not in known}, leaving=False)
            db.executemany(
                "UPDATE pages SET leaving = 0, used_ns = ? WHERE key = ?",
                [(pages[key].used_ns, key) for key in known],
            )
            return Entered(frozenset(entered), max(0, used + wanted - limit_bytes))

    def confirm(self, tenant: str, pages: Mapping[str, AccountEntry]) -> list[str]:
        """The pages, of those put just now, that somebody deletes or has deleted. They stay in the account,
        as leaving."""
        with self._database() as db:
            lost = [key for key in pages if not _stays(db, key)]
        if lost:
            with self._writing() as db:
                absent = {key: pages[key] for key in lost if not _bytes_of(db, key, tenant)}
                _insert(db, tenant, absent, leaving=True)
                _mark(db, lost)
        return lost

    # -- leaving ------------------------------------------------------------------------

    def coldest(self, tenant: str, num_bytes: int, keep: Collection[str]) -> list[str]:
        """The tenant's pages to delete for so many bytes, marked as leaving; none of `keep`."""
        found: list[str] = []
        with self._writing() as db:
            order = "SELECT key, bytes FROM pages WHERE tenant = ? ORDER BY leaving DESC, used_ns"
            for key, size in db.execute(order, (tenant,)):
                if num_bytes <= 0:
                    break
                if key not in keep:
                    found.append(key)
                    num_bytes -= size
            _mark(db, found)
        return found

    def leave(self, keys: Iterable[str]) -> None:
        """Mark pages that are to be deleted."""
        with self._writing() as db:
            _mark(db, keys)

    def gone(self, keys: Iterable[str]) -> None:
        """Cross out pages that were marked, then deleted, and not put again."""
        with self._writing() as db:
            freed: dict[str, tuple[int, int]] = {}
            for key in keys:
                mine = "SELECT tenant, bytes FROM pages WHERE key = ? AND leaving = 1"
                for tenant, size in db.execute(mine, (key,)).fetchall():
                    db.execute("DELETE FROM pages WHERE key = ?", (key,))
                    total, count = freed.get(tenant, (0, 0))
                    freed[tenant] = (total + size, count + 1)
            for tenant, (total, count) in freed.items():
                _add(db, tenant, -total, -count)

    def leave_all(self) -> None:
        """Mark every page."""
        with self._writing() as db:
            db.execute("UPDATE pages SET leaving = 1 WHERE leaving = 0")

    def gone_all(self) -> None:
        """Cross out every marked page."""
        with self._writing() as db:
            db.execute("DELETE FROM pages WHERE leaving = 1")
            db.execute("DELETE FROM tenants")
            db.execute("INSERT INTO tenants SELECT tenant, sum(bytes), count(*) FROM pages GROUP BY tenant")

    # -- uses and figures ---------------------------------------------------------------

    def use(self, uses: Mapping[str, int]) -> None:
        """Note when pages were used (ns)."""
        with self._writing() as db:
            db.executemany(
                "UPDATE pages SET used_ns = max(used_ns, ?) WHERE key = ?",
                [(at_ns, key) for key, at_ns in uses.items()],
            )

    def used_bytes(self, tenant: str) -> int:
        """Bytes of the tenant's pages."""
        with self._database() as db:
            return _used(db, tenant)

    def largest(self, num_tenants: int) -> tuple[int, list[tuple[str, int]]]:
        """The number of tenants with pages, and the bytes of those that have the most."""
        with self._database() as db:
            order = "SELECT tenant, bytes FROM tenants ORDER BY bytes DESC, tenant LIMIT ?"
            return _num_tenants(db), list(db.execute(order, (num_tenants,)))

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        with self._lock:
            db, self._db = self._db, None
        if db is not None:
            db.close()

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        if not self._lock.acquire(timeout=LOCK_TIMEOUT_S):
            raise AccountError(f"quota account: another thread has had it for {LOCK_TIMEOUT_S} s")
        try:
            if self._db is None:
                raise StorageError("the quota account is closed")
            yield self._db
        except sqlite3.Error as error:
            raise AccountError(f"quota account: {error}") from error
        finally:
            self._lock.release()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """All of it or nothing."""
        with self._database() as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise
            db.execute("COMMIT")


def _used(db: sqlite3.Connection, tenant: str) -> int:
    row = db.execute("SELECT bytes FROM tenants WHERE tenant = ?", (tenant,)).fetchone()
    return 0 if row is None else int(row[0])


def _num_tenants(db: sqlite3.Connection) -> int:
    return int(db.execute("SELECT count(*) FROM tenants").fetchone()[0])


def _bytes_of(db: sqlite3.Connection, key: str, tenant: str) -> list[int]:
    """Bytes of an entered page that count for this tenant: 0 where it is another's; empty if not entered."""
    rows = db.execute("SELECT tenant, bytes FROM pages WHERE key = ?", (key,)).fetchall()
    return [size if owner == tenant else 0 for owner, size in rows]


def _kept(db: sqlite3.Connection, there: dict[str, int], limit_bytes: int) -> dict[str, int]:
    """Those of the pages in the account that may be put: if all together are over the limit, without the last
    ones that are leaving.

    So many are in after somebody was killed who took out what he had put and others had made room for.
    """
    kept, over = dict(there), sum(there.values()) - limit_bytes
    for key in reversed(there):
        if over > 0 and there[key] and not _stays(db, key):
            over -= kept.pop(key)
    return kept


def _stays(db: sqlite3.Connection, key: str) -> bool:
    return db.execute("SELECT 1 FROM pages WHERE key = ? AND leaving = 0", (key,)).fetchone() is not None


def _insert(db: sqlite3.Connection, tenant: str, pages: Mapping[str, AccountEntry], *, leaving: bool) -> None:
    """Enter pages that are not in."""
    rows = [(key, tenant, page.num_bytes, page.used_ns, leaving) for key, page in pages.items()]
    db.executemany("INSERT INTO pages VALUES (?, ?, ?, ?, ?)", rows)
    _add(db, tenant, sum(page.num_bytes for page in pages.values()), len(rows))


def _add(db: sqlite3.Connection, tenant: str, num_bytes: int, num_pages: int) -> None:
    if num_pages:
        more = "ON CONFLICT(tenant) DO UPDATE SET bytes = bytes + ?2, pages = pages + ?3"
        db.execute(f"INSERT INTO tenants VALUES (?1, ?2, ?3) {more}", (tenant, num_bytes, num_pages))
        db.execute("DELETE FROM tenants WHERE tenant = ? AND pages = 0", (tenant,))


def _mark(db: sqlite3.Connection, keys: Iterable[str]) -> None:
    db.executemany("UPDATE pages SET leaving = 1 WHERE key = ?", [(key,) for key in keys])
