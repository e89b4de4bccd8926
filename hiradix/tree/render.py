"""The tree as text a person can read."""

from __future__ import annotations

from collections.abc import Sequence

from hiradix.tree.node import Component, Node, Tier

MAX_TOKENS_SHOWN = 6


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
