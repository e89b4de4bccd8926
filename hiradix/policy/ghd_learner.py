"""Learns for GHD from requests that have ended, and puts their pages into classes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

from hiradix.policy.ghd_order import GhdOrder
from hiradix.policy.ghd_tables import CONVERSATION, NEAR_CURVES, SHARED, ClassTables
from hiradix.policy.places import INFINITE
from hiradix.policy.segments import Segments
from hiradix.policy.uses import HINTS, STOPS, Finished, LastUse, UseLog
from hiradix.tree import Node, RadixKey, Tier
from hiradix.tree.key import Namespace

SENDERS: Final = 16  # namespaces are told apart in so many groups where they give hints
_HINT_CLASS: Final = 8  # conversation classes from here on: hint, then sender
_STOP_CLASS: Final = NEAR_CURVES  # and from here on: why the answer ended, and whether it continued another
_DECAY_EVERY: Final = 256  # requests
_DECAY: Final = 0.9576032806985737  # 2 ** (-1 / 16): half in 4096 requests
_COUNT_FIRST: Final = 32  # between two countings at the start; in the end as many as between two decays
_RECENT: Final = 128  # requests whose conversations are at work
_ROUND: Final = 1 << 22  # the clock moves on while each conversation at work has one request
_MAY_WAIT: Final = 1024  # requests, if nobody asks who leaves


# By the bits of a count of tokens, or of 512 tokens.
_FRESH: Final = [min(max(bits - 9, 0), 5) for bits in range(64)]
_FIRST: Final = [min(max(bits - 1, 0), 7) // 2 for bits in range(64)]
_ANSWER: Final = [min(max(bits - 1, 0), 10) // 2 for bits in range(64)]


class GhdLearner(UseLog):
    """The state shared by the orders of all tiers: tables, clock and ghosts. Scheduler thread only."""

    def __init__(self, page_size: int, page_tokens: int):
        super().__init__(page_size, page_tokens)
        self.tables = ClassTables()
        self.segments = Segments(self.tables)
        self.orders: list[GhdOrder] = []
        self._requests = 0
        self._decays = 0  # made
        self._is_due = False  # counting
        self._recent: deque[int] = (
            deque()
        )  # conversations of the last requests, and how many of them are whose
        self._at_work: dict[int, int] = {}
        self._own = [-1] * 256  # class by turn, size, answer

    # -- time -------------------------------------------------------------------------------

    def passes(self, talk: int, request: Finished) -> int:
        """The ticks by which a request moves the clock on: an equal share of a round for each conversation at
        work, if the request says why its answer ended; else its tokens."""
        if request.stop not in STOPS:
            return request.prompt_tokens + request.output_tokens
        at_work, recent = self._at_work, self._recent
        recent.append(talk)
        at_work[talk] = at_work.get(talk, 0) + 1
        if len(recent) > _RECENT:
            old = recent.popleft()
            at_work[old] -= 1
            if not at_work[old]:
                del at_work[old]
        return _ROUND // len(at_work)

    # -- classes ----------------------------------------------------------------------------

    shared_from = 2

    def class_of(self, own: int, visits: int, gap: int | None) -> int:
        recency = 9 if gap is None else min(8, (gap // 1024 + 1).bit_length() // 2 + 1)
        return self.tables.class_of((SHARED, min(visits.bit_length() - 1, 4), recency))

    def own_class(
        self, talk: int, turn: int, away: int, num_known: int, request: Finished, key: RadixKey
    ) -> int:
        if request.hint is not None:
            return self._hinted(request.hint, key.space)
        if request.stop in STOPS:
            return self._paused(talk, turn, away, request)
        if turn:
            fresh = request.prompt_tokens - num_known * self.page_tokens
            size = _FRESH[fresh.bit_length()] if fresh > 0 else 0
        else:
            size = _FIRST[((request.prompt_tokens + 511) // 512).bit_length()]
        kind = (turn if turn < 3 else 3) * 64 + size * 8 + _ANSWER[request.output_tokens.bit_length()]
        found = self._own[kind]
        if found < 0:
            key_of = (CONVERSATION, kind // 64, kind // 8 % 8, kind % 8)
            found = self._own[kind] = self.tables.class_of(key_of)
        return found

    def _paused(self, talk: int, turn: int, away: int, request: Finished) -> int:
        """A class by why the answer ended, how long it was, how many of the last requests were of the same
        conversation, and how long that was away before this one."""
        why = _STOP_CLASS + STOPS.index(request.stop) * 2 + (1 if turn else 0)
        answer = min(request.output_tokens.bit_length(), 12)
        busy = self._at_work[talk].bit_length()
        pace = (min((away >> 15).bit_length(), 10) + 1) if turn else 0
        return self.tables.class_of((CONVERSATION, why, answer, busy, pace))

    def _hinted(self, hint: str, space: Namespace) -> int:
        """A class of the sender's own below the family: a false hint is priced by what its sender's were."""
        seed = space.seed
        sender = seed[0] % SENDERS if seed else SENDERS
        return self.tables.class_of((CONVERSATION, _HINT_CLASS + HINTS.index(hint) * 32 + sender))

    # -- learning ---------------------------------------------------------------------------

    def was_forgotten(self, note: LastUse, num_pages: int) -> None:
        self.segments.forget(note.segment, num_pages)

    def was_used(self, note: LastUse, gap: int, num_pages: int) -> None:
        self.segments.use(note.segment, gap, num_pages)

    def was_noted(self, notes: list[LastUse]) -> None:
        """Count the notes of one request: all of its pages that are in a class have one vote."""
        count = len(notes)
        for i in range(count):
            note = notes[i]
            if note.segment >= 0:
                continue
            class_id, num_pages = note.class_id, note.num_pages
            for j in range(i + 1, count):
                if notes[j].class_id == class_id:
                    num_pages += notes[j].num_pages
            note.segment = number = self.segments.start(class_id, num_pages, self.clock)
            for j in range(i + 1, count):
                if notes[j].class_id == class_id:
                    notes[j].segment = number
        self._requests = count = self._requests + 1
        if count % _COUNT_FIRST == 0 and count % self._interval() == 0:
            self._is_due = True
            if count % _MAY_WAIT == 0:
                self.recompute()

    def _interval(self) -> int:
        """Requests between two countings: a power of two, at most as many as all so far."""
        return min(max(1 << self._requests.bit_length() - 1, _COUNT_FIRST), _DECAY_EVERY)

    def settle(self) -> None:
        """Count, if that is due: it can wait until somebody asks for an index."""
        if self._is_due:
            self.recompute()

    def recompute(self) -> None:
        """Count what happened; the index and every order follow when they are asked."""
        self._is_due = False
        self.segments.count(self.clock)
        decays = self._requests // _DECAY_EVERY - self._decays
        if decays:
            self._decays += decays
            self.tables.decay(_DECAY**decays)
        self.tables.recompute()

    def make_way(self, tier: Tier, node: Node | None) -> None:
        self.settle()
        for order in self.orders:
            if order.tier == tier:
                order.limit = INFINITE if node is None else order.worth(node.note)
                return

    def hint(self, nodes: Iterator[Node], hint: str) -> None:
        """Move what a conversation alone uses to the class of its sender's hint."""
        made: dict[int, LastUse] = {}
        for node in nodes:
            old = node.note
            if old is None or old.visits >= 2:
                continue
            note = made.get(id(old))
            if note is None:
                note = made[id(old)] = LastUse(
                    old.use, self.clock, self._hinted(hint, node.space), old.visits
                )
                note.segment = self.segments.start(note.class_id, old_pages(node, old), self.clock)
            self.segments.forget(old.segment, node.num_pages)
            node.note = note
            for order in self.orders:
                order.renoted(node)

    def forget(self) -> None:
        super().forget()
        self.segments.forget_all()
        self.orders.clear()


def old_pages(node: Node, note: LastUse) -> int:
    """Pages of `node` and its ancestors that carry `note`; at least one."""
    count, at = 0, node
    while at.parent is not None:
        count += at.num_pages if at.note is note else 0
        at = at.parent
    return max(count, 1)
