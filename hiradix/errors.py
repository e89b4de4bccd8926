"""Exceptions: `CacheError` and its kinds for faults of the world, `Misuse` for callers' and our own bugs.

What keeps a bug from becoming a wrong answer raises `Misuse`, never an `assert` statement, so it is there
under `python -O` too.
"""

from __future__ import annotations

MAX_SHOWN_CHARS = 300


class CacheError(Exception):
    """Base of everything hiradix raises on purpose."""


class ConfigError(CacheError, ValueError):
    """A flag, field or file has a value that cannot be used; the message names it."""


class Unreachable(ConfigError):
    """The store that a flag or key names does not answer now; the value itself may be right.

    Whoever serves may go on without it and join it later.
    """


class StorageError(CacheError):
    """A storage backend failed; callers inside the cache turn this into a miss."""


class BadNamespace(CacheError, ValueError):
    """An extra_key or cache_salt that names no namespace: no text, or none that UTF-8 has.

    field: which of the two.
    """

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field = field


class Misuse(AssertionError):
    """A call that no correct caller makes, or an invariant that does not hold; the message has the numbers.

    No CacheError on purpose: who turns faults of the world into a miss and goes on must not swallow a bug.
    """


class NoTier(Misuse, AttributeError):
    """An attribute of tiers that this cache has not: `hasattr` answers False, as engines ask."""


def described(error: BaseException) -> str:
    """An error in one short line; survives exceptions that cannot print themselves."""
    try:
        text = str(error)
    except Exception:
        text = "(no message)"
    return f"{type(error).__name__}: {text}"[:MAX_SHOWN_CHARS]
