"""A prefetch that is driven without a tree: a lookup and the read of what it found, as one operation."""

from __future__ import annotations

from hiradix.errors import Misuse
from hiradix.transfer.jobs import JobKind, Pages, Result, Ticket
from hiradix.tree.hashing import PageRows


class PrefetchOperation:
    """A prefetch ordered by `HiCacheController.prefetch`; `poll` carries it on.

    host_pages: the caller's, who leaves them alone until `is_done`. Of them the first `num_pages` are filled
    then. num_hit_pages: leading pages that storage has, None until it has answered. hashes: names of all that
    was asked for. error: why there are not more, or None. ticket: of the job that it waits for.
    """

    __slots__ = (
        "error", "hashes", "host_pages", "is_done", "is_terminated", "num_hit_pages", "num_pages", "rows",
        "ticket",
    )  # fmt: skip

    def __init__(self, rows: PageRows, host_pages: Pages, ticket: Ticket):
        self.rows = rows
        self.host_pages = host_pages
        self.ticket = ticket
        self.hashes: tuple[bytes, ...] = ()
        self.num_hit_pages: int | None = None
        self.num_pages = 0
        self.error: str | None = None
        self.is_done = self.is_terminated = False

    def ended(self, result: Result) -> int:
        """The job that it waited for has ended. How many pages are to be read now; none: it is done."""
        if result.ticket != self.ticket:
            raise Misuse(f"ticket {result.ticket} for a prefetch that waits for {self.ticket}")
        self.error = result.error
        if result.kind is JobKind.READ:
            self.num_pages = result.num_pages
        else:
            self.num_hit_pages = result.num_pages
            self.hashes = result.hashes[len(result.hashes) - len(self.host_pages) :]
            if result.num_pages and not self.is_terminated:
                return result.num_pages
        self.is_done = True
        return 0
