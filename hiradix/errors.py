"""The one exception family for faults of the world; our own bugs are assertions."""

from __future__ import annotations


class CacheError(Exception):
    """Base of everything hiradix raises on purpose."""


class ConfigError(CacheError, ValueError):
    """A flag, field or file has a value that cannot be used; the message names it."""


class Unreachable(ConfigError):
    """The store that a flag or key names does not answer now; the value itself may be right.

    Whoever serves may go on without it and join it later.
    """


class OutOfPages(CacheError):
    """A pool has fewer free and evictable pages than a request needs."""


class StorageError(CacheError):
    """A storage backend failed; callers inside the cache turn this into a miss."""
