"""Explains misses: one reason for each token of a prompt that is computed.

What is known where a decision was made (a load that was refused, a fetch that came too late) is given; the rest
follows from the tree, from what has left it, and from where the prompt parts from its relatives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import Final, NamedTuple

from hiradix.cache.departed import Departed, Departure
from hiradix.explain import Explanation, Reason, Span, TokenSource
from hiradix.tree import DEVICE, Node, RadixKey, RadixTree
from hiradix.tree.key import unpacked

MOST_RELATIVES: Final = 256  # that a prompt is compared with where it parts from them


class Hit(NamedTuple):
    """The sources of the tokens of a prompt that need not be computed, each part behind the one before."""

    device: int
    host: int
    storage: int


class Withheld(NamedTuple):
    """Tokens up to `end` of a prompt are in some tier, or may be, and were not taken, for `reason`."""

    end: int
    reason: Reason
    detail: str = ""
    waited_s: float = 0.0


class Misses:
    """Explains requests of one cache. Scheduler thread only. policy: the eviction policy's name."""

    def __init__(self, tree: RadixTree, departed: Departed, policy: str):
        self._tree = tree
        self._departed = departed
        self._policy = policy
        self.tokens_by_reason: Counter[str] = Counter()  # computed since start

    def explain(
        self, request_id: str, key: RadixKey, num_tokens: int, hit: Hit, withheld: Sequence[Withheld] = ()
    ) -> Explanation:
        """The source of each token of a prompt of `num_tokens`, whose `key` has the part that could be looked
        up.

        withheld: as far as known, in rising order. To be asked when the request is admitted, before what it
        computes is inserted. O(pages that are computed).
        """
        spans: list[Span] = []
        at = 0
        for count, source in (
            (hit.device, TokenSource.DEVICE),
            (hit.host, TokenSource.HOST),
            (hit.storage, TokenSource.STORAGE),
        ):
            if count:
                spans.append(Span(at, at + count, source))
                at += count
        for one in withheld:
            end = min(one.end, num_tokens)
            if end > at:
                spans.append(Span(at, end, TokenSource.COMPUTED, one.reason, one.detail, one.waited_s))
                at = end
        if at < num_tokens:
            spans += self._computed(key, at, num_tokens)
        found = Explanation(request_id, tuple(spans))
        self.tokens_by_reason += found.tokens_by_reason()
        return found

    def in_storage(self, found: tuple[int, Reason, float] | None) -> list[Withheld]:
        """The tokens that storage did not bring, from what `Prefetcher.pop_withheld` says of a prompt."""
        if found is None:
            return []
        end, reason, waited_s = found
        return [Withheld(end * self._tree.page_size, reason, "in storage", waited_s)]

    def _computed(self, key: RadixKey, start: int, end: int) -> Iterator[Span]:
        """Reasons for tokens [start, end) of a prompt, by what the cache has and had of `key`."""
        size = self._tree.page_size
        whole = key.num_pages(size) * size
        at = start
        node, child, num_in_child = self._tree.follow(key)
        found = (node.end + num_in_child) * size
        known = min(found, end)
        if known > at:
            yield Span(at, known, TokenSource.COMPUTED, *self._unusable())
            at = known
        if at < whole and at == found:
            for departure, count in self._gone(node, key, whole // size, num_in_child):
                yield Span(
                    at, at + count * size, TokenSource.COMPUTED, departure.reason, self._gone_text(departure)
                )
                at += count * size
        if at < whole:
            is_new = at == found
            reason, detail = self._new(node, key, child, num_in_child) if is_new else (Reason.NEVER_SEEN, "")
            yield Span(at, whole, TokenSource.COMPUTED, reason, detail)
            at = whole
        if at < end:
            is_rest = end - whole <= size + key.space.lookahead
            detail = (
                "less than a page, or the last token" if is_rest else "its log probabilities are asked for"
            )
            yield Span(at, end, TokenSource.COMPUTED, Reason.BOUNDARY, detail)

    def _gone(self, node: Node, key: RadixKey, end: int, skipped: int) -> Iterator[tuple[Departure, int]]:
        """Yield the departures of the pages of `key` behind `node` and `skipped` more, alike ones together,
        each with their number."""
        left = self._departed.leading(node, key, end, skipped)
        for _, group in groupby(left, key=lambda one: (one.reason, one.tier)):
            alike = list(group)
            yield alike[-1], len(alike)

    def _new(self, node: Node, key: RadixKey, child: Node | None, num_in_child: int) -> tuple[Reason, str]:
        """The reason why what follows `node` on the way of `key`, and was never here, is not. child: the node
        that lies on it in part, for so many pages."""
        if node.end + num_in_child == 0 and self._departed.is_in_other_namespace(key):
            return Reason.OTHER_NAMESPACE, "cached under another cache_salt or extra_key"
        position = self._parting(node, key, child, num_in_child)
        if position is None:
            return Reason.NEVER_SEEN, ""
        return Reason.PARTED, f"differs at token {position} from a cached prompt"

    def _parting(self, node: Node, key: RadixKey, child: Node | None, num_in_child: int) -> int | None:
        """The token up to which `key` is like a prompt that goes on behind `node`; None: there is none in its
        namespace, or none shares its first token."""
        size, first = self._tree.page_size, num_in_child * self._tree.page_size
        start, best = node.end * size + first, -1
        own = key.tokens[start : start + size]
        children = reversed(node.children.values()) if child is None else (child,)
        for other_child in islice(children, MOST_RELATIVES):
            if other_child.space == key.space:
                other = unpacked(other_child.run, other_child.width)[first : first + size]
                differs = own != other[: len(own)]
                best = max(best, int(differs.argmax()) if differs.any() else len(own))
        return None if best < (0 if start else 1) else start + best

    def _unusable(self) -> tuple[Reason, str]:
        """Why pages were computed that are in the tree: which kind of attention has no usable prefix there.
        With full attention alone there always is one, so they were not there yet."""
        kinds = ", ".join(component.name for component in self._tree.components[1:])
        if kinds:
            return Reason.BOUNDARY, f"no usable prefix ends there: {kinds}"
        return Reason.UNDER_WAY, "computed or copied at the same time"

    def _gone_text(self, departure: Departure) -> str:
        ago_s = max(0.0, self._departed.now_s - departure.at_s)
        tier = "device" if departure.tier is DEVICE else "host"
        by = f" by {self._policy}" if departure.reason is Reason.EVICTED else ""
        return f"left the {tier}{by} {ago_s:.1f} s ago"
