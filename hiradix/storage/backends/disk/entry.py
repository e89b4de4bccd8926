"""A page of the log as the index has it in memory."""

from __future__ import annotations

from typing import Any

from hiradix.storage.backends.disk.record import Name, Record


class IndexEntry:
    """A page in its slot. verified: its bytes were checked, or written, by this process. logged_ns: the last
    use that the log knows of. front: the label of the page in front of it in its chain; next: of those behind
    it, of that which was used last; both where they are known."""

    __slots__ = (
        "algorithm", "checksum", "front", "logged_ns", "name", "namespace", "next", "num_bytes", "place",
        "used_ns", "verified", "version",
    )  # fmt: skip

    def __init__(self, record: Record, name: Name, same: dict[Any, Any]):
        """same: of what many entries have in common, the one object that all of them hold."""
        self.name = name
        self.namespace: bytes = same.setdefault(record.namespace, record.namespace)
        self.place: tuple[int, int] = same.setdefault(record.segment, record.segment), record.slot
        self.version = record.version
        self.num_bytes: int = same.setdefault(record.num_bytes, record.num_bytes)
        self.algorithm = record.algorithm
        self.checksum = record.checksum
        self.used_ns = self.logged_ns = record.used_ns
        self.verified = False
        self.front: Name | None = None
        self.next: Name | None = None

    def is_same(self, other: IndexEntry | None) -> bool:
        """Whether that is this page, put by the same call. Versions alone tell so in one log, but not in one
        that was put back to an old state."""
        return other is self or (
            other is not None
            and other.version == self.version
            and (other.name, other.namespace, other.checksum) == (self.name, self.namespace, self.checksum)
        )
