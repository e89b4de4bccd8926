"""The order in which 0.5.23 evicts windows, put on our tree to show that it is what differs."""

from __future__ import annotations

from hiradix.prefix_cache.records import WINDOW
from hiradix.tree import Node, RadixTree, Tier


class LastWalks:
    """When a walk last ended close behind each window page. window: tokens."""

    def __init__(self, tree: RadixTree, window: int):
        self._tree, self._reach = tree, window + tree.page_size
        self._last: dict[int, tuple[int, int]] = {}  # page -> walk, position
        self._full: set[int] = set()  # pages of full data in the tree
        self._num_walks = 0

    def ended(self, node: Node) -> None:
        """A walk ended at `node`: its windows and those of its ancestors, a page further than a window."""
        self._num_walks += 1
        covered = 0
        for at in self._tree.path(node):
            if covered >= self._reach:
                break
            self._note(at, only_new=False)
            covered += at.num_pages * self._tree.page_size

    def inserted(self, node: Node) -> None:
        """A key was inserted that ends at `node`. First what came back beside full data, then what the walk
        passed, then new leaves, each root first."""
        path = list(self._tree.path(node))
        fresh = [at for at in path if at.device.pages is not None and at.device.pages[0] not in self._full]
        self._num_walks += 1
        for at in path:
            self._note(at, only_new=True)
        self.ended(node)
        self._num_walks += 1
        for at in fresh:
            self._note(at, only_new=False)
        self.settle()

    def settle(self) -> None:
        """Pages that have left may come back as others'."""
        nodes = list(self._tree.nodes())
        live = {page for node in nodes for page in _window(node)}
        self._last = {page: walk for page, walk in self._last.items() if page in live}
        self._full = {
            int(page) for node in nodes if node.device.pages is not None for page in node.device.pages
        }

    def apply(self) -> None:
        """Have the tree evict in this order."""
        order = self._tree._residencies.orders[WINDOW][Tier.DEVICE]
        nodes = [node for node in self._tree.nodes() if len(_window(node))]
        entries = [(self._last[_window(node)[-1]], node.residency(WINDOW, Tier.DEVICE)) for node in nodes]
        for _, entry in sorted(entries, key=lambda pair: pair[0]):
            if not entry.lock_ref:
                order.remove((entry,))
                order.push((entry,))

    def _note(self, node: Node, *, only_new: bool) -> None:
        for page in _window(node):
            if not (only_new and page in self._last):
                self._last[page] = self._num_walks, node.end


def _window(node: Node) -> list[int]:
    pages = node.residency(WINDOW, Tier.DEVICE).pages
    return [] if pages is None else [int(page) for page in pages]
