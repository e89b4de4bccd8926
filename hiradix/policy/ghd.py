"""GHD, ghost-trained hit density: evict what is expected to give the fewest hits per token of residence.

Each page is in a class, by what the request that used it last looked like: which turn of a conversation,
how much was new, how long the answer; or, of data that many conversations share, how often and how recently
it was used. Per class and age the policy learns online, from what is cached and from ghosts, how likely the
next use is, and ranks by the Gittins index of that. No clock, no randomness, no addresses: ranks that see
the same requests decide the same.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hiradix.errors import ConfigError
from hiradix.policy.ghd_order import LaneOrder
from hiradix.policy.ghd_tables import CONVERSATION, SHARED, ClassTables
from hiradix.policy.learning import SharedLog
from hiradix.policy.segments import Segments
from hiradix.policy.uses import HINTS, Note, Seen, UseLog
from hiradix.tree import Node, OrderContext, RadixKey, Tier

logger = logging.getLogger(__name__)

SENDERS = 16  # namespaces are told apart in so many groups where they give hints
_HINT_CLASS = 8  # conversation classes from here on: hint, then sender
_DECAY_EVERY = 256  # requests
_DECAY = 0.9576032806985737  # 2 ** (-1 / 16): half in 4096 requests
_COUNT_FIRST = 32  # requests between two countings at the start; in the end as many as between two decays


class GhdLearner(UseLog):
    """What all tiers' orders share: the tables, the clock, the ghosts. Scheduler thread only."""

    def __init__(self, page_size: int, page_tokens: int):
        super().__init__(page_size, page_tokens)
        self.tables = ClassTables()
        self.segments = Segments(self.tables)
        self.orders: list[LaneOrder] = []
        self._requests = 0

    # -- classes ----------------------------------------------------------------------------

    def class_of(self, seen: Seen, visits: int, gap: int | None, key: RadixKey) -> int:
        if visits >= 2:
            recency = 9 if gap is None else min(8, (gap // 1024 + 1).bit_length() // 2 + 1)
            return self.tables.class_of((SHARED, min(visits.bit_length() - 1, 4), recency))
        own = seen.use.class_id
        if own < 0:
            own = seen.use.class_id = self._own_class(seen, key)
        return own

    def _own_class(self, seen: Seen, key: RadixKey) -> int:
        """Of what a conversation alone uses: the same for all pages of a request."""
        request = seen.finished
        if request.hint is not None:
            return self._hinted(request.hint, key)
        turn = min(seen.use.turn, 3)
        if turn:
            fresh = request.prompt_tokens - seen.num_known * self.page_tokens
            size = min(max(fresh.bit_length() - 9, 0), 5) if fresh > 0 else 0
        else:
            size = min(max(-(-request.prompt_tokens // 512), 1).bit_length() - 1, 7) // 2
        answer = min(max(request.output_tokens, 1).bit_length() - 1, 10) // 2
        return self.tables.class_of((CONVERSATION, turn, size, answer))

    def _hinted(self, hint: str, key: RadixKey) -> int:
        """A class of the sender's own below the family: a false hint is priced by what its sender's were."""
        seed = key.space.seed
        sender = seed[0] % SENDERS if seed else SENDERS
        return self.tables.class_of((CONVERSATION, _HINT_CLASS + HINTS.index(hint) * 32 + sender))

    # -- learning ---------------------------------------------------------------------------

    def was_used(self, note: Note, num_pages: int) -> None:
        self.segments.use(note.segment, self.clock - note.clock, num_pages)

    def was_forgotten(self, note: Note, num_pages: int) -> None:
        self.segments.forget(note.segment, num_pages)

    def was_noted(self, pages: dict[Note, int]) -> None:
        if len(pages) == 1:
            ((note, count),) = pages.items()
            note.segment = self.segments.start(note.class_id, count, self.clock)
        else:
            self._start_segments(pages)
        self._requests += 1
        if self._requests % _COUNT_FIRST == 0 and self._requests % self._interval() == 0:
            self.recompute()

    def _interval(self) -> int:
        """Requests between two countings: a power of two, at most a quarter of all so far."""
        return min(max(1 << (self._requests // 4).bit_length() - 1, _COUNT_FIRST), _DECAY_EVERY)

    def _start_segments(self, pages: dict[Note, int]) -> None:
        """One of each class: all of a request's pages in a class have one vote."""
        of_class: dict[int, int] = {}
        for note, count in pages.items():
            of_class[note.class_id] = of_class.get(note.class_id, 0) + count
        numbers = {c: self.segments.start(c, count, self.clock) for c, count in of_class.items()}
        for note in pages:
            note.segment = numbers[note.class_id]

    def recompute(self) -> None:
        """Count what happened; the index and every order follow when they are asked."""
        self.segments.count(self.clock)
        if self._requests % _DECAY_EVERY == 0:
            self.tables.decay(_DECAY)
        self.tables.recompute()

    def may_evict(self, tier: Tier, node: Node, num_pages: int) -> int:
        for order in self.orders:
            if order.tier == tier:
                return min(order.colder_pages(node.note, num_pages), num_pages)
        return num_pages

    def hint(self, nodes: Iterator[Node], hint: str) -> None:
        """Move what a conversation alone uses to the class of its sender's hint."""
        made: dict[int, Note] = {}
        for node in nodes:
            old = node.note
            if old is None or old.visits >= 2:
                continue
            note = made.get(id(old))
            if note is None:
                note = made[id(old)] = Note(old.use, self.clock, self._hinted_node(node, hint), old.visits)
                note.segment = self.segments.start(note.class_id, old_pages(node, old), self.clock)
            self.segments.forget(old.segment, node.num_pages)
            node.note = note
            for order in self.orders:
                order.renoted(node)

    def _hinted_node(self, node: Node, hint: str) -> int:
        return self._hinted(hint, RadixKey([], node.space.extra_key, cache_salt=node.space.cache_salt))

    def forget(self) -> None:
        super().forget()
        self.segments.forget_all()
        self.orders.clear()


def old_pages(node: Node, note: Note) -> int:
    """Pages of `node` and its ancestors that carry `note`; at least one."""
    count, at = 0, node
    while at.parent is not None:
        count += at.num_pages if at.note is note else 0
        at = at.parent
    return max(count, 1)


class GhdPolicy(SharedLog[GhdLearner]):
    """`ghd` for one cache: an order factory that shares one learner among tiers and components.

    config: beside `page_tokens`, `tables`, a file to start from and to save to when the cache is closed.
    """

    def __init__(self, config: Mapping[str, Any]):
        super().__init__(config, GhdLearner)
        self._path = None if config.get("tables") is None else Path(str(config["tables"]))

    def __call__(self, context: OrderContext) -> LaneOrder:
        learner = self.log_of(context)
        order = LaneOrder(context, learner, learner.tables)
        learner.orders.append(order)
        return order

    def begun(self, log: GhdLearner) -> None:
        if self._path is None or not self._path.exists():
            return
        try:
            log.tables.load(self._path)
        except ConfigError as error:
            logger.warning("%s; starting without", error)

    def close(self) -> None:
        """Save the tables, if a file was named."""
        if self._path is None or self._log is None:
            return
        self._log.recompute()
        try:
            self._log.tables.save(self._path)
        except OSError as error:
            logger.warning("ghd tables %s: not saved: %s", self._path, error)


def check_config(name: str, config: Mapping[str, Any]) -> None:
    """ConfigError names a bad value of a learning policy's settings."""
    tokens, tables = config.get("page_tokens"), config.get("tables")
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1):
        raise ConfigError(f"{name} page_tokens must be a whole number >= 1, got {tokens!r}")
    if tables is not None and (not isinstance(tables, str) or not tables):
        raise ConfigError(f"{name} tables must be the name of a file, got {tables!r}")
