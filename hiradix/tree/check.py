"""A tree as a whole: every invariant of `hiradix.tree.tree` asserted by its number, and the tree as text.

O(tree).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hiradix.errors import Misuse
from hiradix.tree.hashing import DIGEST_BYTES, PageRows, hash_pages
from hiradix.tree.locks import held
from hiradix.tree.node import BACKBONE, NO_PAGES, TIERS, Component, Node, Residency, Tier, row_at
from hiradix.tree.order import LruOrder
from hiradix.tree.page_hashes import path_extras, path_tokens, windows
from hiradix.tree.residency import Residencies

MAX_TOKENS_SHOWN = 6


def check_tree(
    root: Node, nodes: Sequence[Node], residencies: Residencies, covered: Iterable[Residency] | None
) -> None:
    """Assert every invariant of a tree. nodes: all but the root.

    covered: what each lock that is out covers, once per lock: then lock counts must be exact.
    """
    page_size = residencies.page_size
    listed = {
        id(entry): (c, t)
        for c, tiers in enumerate(residencies.orders)
        for t, order in enumerate(tiers)
        for entry in order
    }
    wanted = None if covered is None else Counter(map(id, covered))
    for node in [root, *nodes]:
        _check_structure(node, root)
    for node in nodes:
        _check_run(node, root, page_size)
        for tier in TIERS:
            _check_residency(node, tier, residencies, listed)
            _check_pins(node, tier, len(residencies.components), wanted)
    if listed:
        raise Misuse(f"4: {len(listed)} entries in an order are of no node")
    _check_counts(nodes, residencies)
    _check_places(nodes, residencies)
    for tier in TIERS:
        _check_leaf_first(residencies, tier)


def _check_structure(node: Node, root: Node) -> None:
    """1, 2, 7, 8: what holds between a node and its children."""
    device = 0
    for row, child in node.children.items():
        if child.parent is not node or child.row != row:
            raise Misuse(f"7: {child} is listed under another row or parent")
        if not child.start == node.end < child.end:
            raise Misuse(f"7: {child} below {node}")
        if not (node.parent is None or child.space is node.space):
            raise Misuse(f"7: {child} changes the namespace")
        if not (child.device.pages is not None or child.host.pages is not None):
            raise Misuse(f"2: {child} is resident nowhere")
        if child.device.pages is not None:
            device += 1
            if not node.resident(Tier.DEVICE):
                raise Misuse(f"1: {child} on the device below {node}, which is not")
    if device != node.num_device_children:
        raise Misuse(f"8: {node} has {device} device children, not {node.num_device_children}")
    if not (node is root or node.parent is not None):
        raise Misuse(f"7: {node} in the tree without a parent")


def _check_run(node: Node, root: Node, size: int) -> None:
    """7, 9: tokens, extras, digests and arrays of a node."""
    num_pages = node.num_pages
    if len(node.tokens) != num_pages * size + node.space.lookahead:
        raise Misuse(f"7: {node} has {len(node.tokens)} tokens")
    if not (node.extras is None or len(node.extras) == num_pages):
        raise Misuse(f"7: {node} has {len(node.extras or ())} extras")
    if node.start:
        if node.row != row_at(node, 0, size):
            raise Misuse(f"7: {node} is found by another row")
    known, rest = divmod(len(node.digests), DIGEST_BYTES)
    if rest or known > num_pages:
        raise Misuse(f"9: {node} has {known} hashes and {rest} bytes")
    if known:
        _check_hashes(node, known, root, size)


def _check_hashes(node: Node, known: int, root: Node, size: int) -> None:
    """9: the first and the last known hash of a node go on from those before."""
    digests = [node.digests[i : i + DIGEST_BYTES] for i in range(0, len(node.digests), DIGEST_BYTES)]
    parent = node.parent
    assert parent is not None
    if parent is root:
        prior = node.space.seed
    elif len(parent.digests) == parent.num_pages * DIGEST_BYTES:
        prior = parent.digests[-DIGEST_BYTES:]
    else:
        rows = windows(path_tokens(parent, 0, size), parent.end, size, node.space)
        extras = path_extras(parent, 0)
        prior = hash_pages(PageRows(node.space.seed, rows, extras, node.space.is_bigram))[-1]
    if _hash(node, 0, prior, size) != digests[0]:
        raise Misuse(f"9: {node} begins a chain of its own")
    last = digests[known - 2] if known > 1 else prior
    if _hash(node, known - 1, last, size) != digests[-1]:
        raise Misuse(f"9: {node} ends in another hash")


def _hash(node: Node, page: int, prior: bytes, page_size: int) -> bytes:
    """The hash of a node's page behind `prior`."""
    first, space = page * page_size, node.space
    tokens = node.tokens[first : first + page_size + space.lookahead].astype(np.int64)
    extras = None if node.extras is None else node.extras[page : page + 1]
    return hash_pages(PageRows(prior, tokens[np.newaxis], extras, space.is_bigram))[0]


def _check_residency(
    node: Node, tier: Tier, residencies: Residencies, listed: dict[int, tuple[int, int]]
) -> None:
    """3, 4, 7: each residency by itself."""
    for c, component in enumerate(residencies.components):
        entry = node.residency(c, tier)
        if entry.node is not node:
            raise Misuse(f"7: a residency of {node} belongs to {entry.node}")
        present = entry.pages is not None
        place = listed.pop(id(entry), None)
        if (place is not None) != (present and entry.lock_ref == 0):
            raise Misuse(f"4: {node} {component.name} {tier.name}")
        if place not in (None, (c, tier)):
            raise Misuse(f"4: {node} {component.name} {tier.name} is in the order of {place}")
        if entry.pages is None:
            continue
        if not node.resident(tier):
            raise Misuse(f"3: {node} has {component.name} in {tier.name} without the backbone")
        want = node.num_pages if component.per_page else 1
        if len(entry.pages) != want:
            raise Misuse(f"7: {node} has {len(entry.pages)} {component.name} pages")
        under: Any = entry.pages.base
        is_own = under is None or (type(under) is bytes and len(under) == entry.pages.nbytes)
        if entry.pages.dtype != np.int32 or not is_own:
            raise Misuse(f"7: {node} keeps another array alive")


def _check_pins(node: Node, tier: Tier, num_components: int, wanted: Mapping[int, int] | None) -> None:
    """6: lock_ref is made of what `locks` says. wanted: locks by the id of the residency."""
    for c in range(num_components):
        entry = node.residency(c, tier)
        reasons = int(held(node, c, tier))
        if c == BACKBONE:
            reasons += sum(held(node, other, tier) for other in range(1, num_components))
            reasons += sum(child.residency(c, tier).lock_ref > 0 for child in node.children.values())
        locks = entry.lock_ref - reasons
        if locks < 0:
            raise Misuse(
                f"6: {node} {tier.name} component {c} has lock_ref {entry.lock_ref} for {reasons} reasons"
            )
        if wanted is not None:
            have = wanted.get(id(entry), 0)
            if locks != have:
                raise Misuse(f"6: {node} {tier.name} component {c} counts {locks} locks, {have} are out")
    backbone = node.residency(BACKBONE, tier)
    others = [node.residency(c, tier) for c in range(1, num_components)]
    if not (backbone.lock_ref or not any(entry.lock_ref and entry.pages is not None for entry in others)):
        raise Misuse(f"6: {node}")


def _check_places(nodes: Sequence[Node], residencies: Residencies) -> None:
    """10: a page is in one place."""
    for c in range(len(residencies.components)):
        for tier in TIERS:
            held_pages = (node.residency(c, tier).pages for node in nodes)
            pages = np.sort(np.concatenate([NO_PAGES, *(p for p in held_pages if p is not None)]))
            if len(pages) and pages[0] < 0:
                raise Misuse(f"10: {tier.name} component {c} has page {pages[0]}")
            twice = pages[1:][pages[1:] == pages[:-1]]
            if len(twice):
                raise Misuse(f"10: {tier.name} component {c} has pages twice: {twice[:16]}")
            known = residencies.places[c][tier].taken()
            if not np.array_equal(known, pages):
                wrong = np.setxor1d(known, pages)
                raise Misuse(f"10: {tier.name} component {c}: places and nodes differ in {wrong[:16]}")


def _check_counts(nodes: Sequence[Node], residencies: Residencies) -> None:
    """8: totals."""
    for c in range(len(residencies.components)):
        for tier in TIERS:
            entries = [node.residency(c, tier) for node in nodes]
            resident = sum(len(entry.pages) for entry in entries if entry.pages is not None)
            free = sum(
                len(entry.pages) for entry in entries if entry.pages is not None and not entry.lock_ref
            )
            if resident != residencies.num_resident[c][tier]:
                raise Misuse(f"8: {resident} pages, counted {residencies.num_resident[c][tier]}")
            listed = residencies.orders[c][tier].num_pages
            if free != listed:
                raise Misuse(f"8: {free} evictable pages, the order counts {listed}")


def _check_leaf_first(residencies: Residencies, tier: Tier) -> None:
    """5: the next victim is a leaf; in LRU order each ancestor is hotter."""
    order = residencies.orders[BACKBONE][tier]
    victim: Residency | None = getattr(order, "peek", order.coldest)()
    if (victim is None) != (order.num_pages == 0):
        raise Misuse(f"5: {victim} next of {order.num_pages} evictable pages")
    if victim is not None:
        if victim.node is None or not is_leaf(victim.node, tier):
            raise Misuse(f"5: {victim.node} is the next victim")
    if not isinstance(order, LruOrder):
        return
    heat: dict[int, int] = {id(entry): i for i, entry in enumerate(order)}
    for entry in order:
        assert entry.node is not None
        above: Residency | None = _parent_entry(entry.node, tier)
        if above is not None and above.pages is not None and not above.lock_ref:
            if heat[id(above)] <= heat[id(entry)]:
                raise Misuse(f"5: {above.node} is colder than {entry.node}")


def is_leaf(node: Node, tier: int) -> bool:
    """Whether nothing depends on `node`'s pages in `tier`, but host-only nodes below a device-only one."""
    if tier == Tier.DEVICE:
        return node.num_device_children == 0
    return node.device.pages is not None or not node.children


def _parent_entry(node: Node, tier: Tier) -> Residency | None:
    parent = node.parent
    return None if parent is None or parent.parent is None else parent.residency(BACKBONE, tier)


def render_tree(root: Node, components: Sequence[Component]) -> str:
    """One line per node, children indented: pages [start, end), first tokens, tiers, locks, hits; a
    tombstone is a component that the node has in no tier."""
    lines = ["root"]
    stack = [(child, 1) for child in reversed(list(root.children.values()))]
    while stack:
        node, depth = stack.pop()
        lines.append("  " * depth + _line(node, components))
        stack += [(child, depth + 1) for child in reversed(list(node.children.values()))]
    return "\n".join(lines)


def _line(node: Node, components: Sequence[Component]) -> str:
    tokens = " ".join(map(str, node.tokens[:MAX_TOKENS_SHOWN].tolist()))
    more = " ..." if len(node.tokens) > MAX_TOKENS_SHOWN else ""
    parts = [f"[{node.start}, {node.end})", f"<{tokens}{more}>"]
    for c, component in enumerate(components):
        tiers = [_place(node, c, tier) for tier in Tier if node.resident(tier, c)]
        parts.append(f"{component.name}: {' + '.join(tiers) or 'tombstone'}")
    if node.start == 0 and (node.space.extra_key or node.space.cache_salt):
        parts.append(f"extra_key={node.space.extra_key} cache_salt={node.space.cache_salt}")
    return "  ".join([*parts, f"hits {node.hit_count}"])


def _place(node: Node, component: int, tier: Tier) -> str:
    locks = node.residency(component, tier).lock_ref
    return tier.name.lower() + (f" (locked {locks})" if locks else "")


if NO_PAGES.base is not None:
    raise Misuse("the empty array of pages keeps another alive")
