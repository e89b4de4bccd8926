"""Finds the nodes that a selector names, in the tree as it is now."""

from __future__ import annotations

from hiradix.cache.intents.planner import Planner
from hiradix.cache.intents.sessions import Sessions
from hiradix.intents import Selector, SelectorKind
from hiradix.tree import Node, RadixKey


def keys_of(planner: Planner, selector: Selector, sessions: Sessions) -> list[RadixKey]:
    """The prompts that it names, in whole pages: a prefix, or those of a session that are in the tree. Of a
    tenant or of everything, and of a namespace, none. Copies a session's tokens."""
    tree = planner.tree
    if selector.kind is SelectorKind.SESSION:
        return [tree.path_key(end) for end in session_ends(selector, sessions)]
    key = selector.key
    return [key.page_aligned(tree.page_size)] if key is not None and key.num_pages(tree.page_size) else []


def ends_of(planner: Planner, selector: Selector, sessions: Sessions) -> list[Node]:
    """The ends of all paths that the selector names in the tree. O(nodes of these)."""
    tree, key = planner.tree, selector.key
    if selector.kind is SelectorKind.SESSION:
        return session_ends(selector, sessions)
    if key is not None and len(key):
        if not key.num_pages(tree.page_size):
            return []
        node = tree.match(key).loadable_node  # splits where the key ends
        deepest = tree.find(key)
        return [deepest if deepest.end > node.end else node] if deepest.end else []
    return [node for node in nodes_of(planner, selector) if not node.children]


def session_ends(selector: Selector, sessions: Sessions) -> list[Node]:
    """The ends of a session's prompts, of its tenant's where the selector names one."""
    ends = sessions.ends(selector.name)
    return [end for end in ends if selector.tenant in ("", end.space.tenant)]


def nodes_of(planner: Planner, selector: Selector) -> list[Node]:
    """All nodes of a namespace, a tenant, or everything, parents first. O(that)."""
    found = [top for top in planner.tree.root.children.values() if is_of(selector, top)]
    for node in found:
        found.extend(node.children.values())
    return found


def is_of(selector: Selector, top: Node) -> bool:
    """Whether what is below a child of the root is of a namespace, a tenant, or everything."""
    if selector.key is not None:
        return selector.key.space == top.space
    return selector.kind is SelectorKind.EVERYTHING or top.space.tenant == selector.name
