"""What an object is made of, its constructor gets: nobody puts a part into it from outside afterwards."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.project.repo import Module, modules

EXCEPTIONS = {
    # Set while serving, by an operator, or as the cache grows.
    "AttachedStorage": {"self._prefetcher.policy", "self._write_through.policy"},
    "PrefixCache": {"self.controller.wakeup"},
    "StorageTracker": {"self._fetches.policy"},
    "UseLog": {"self.ghosts.limit"},
    "RadixTree": {"self._residencies.watch", "self._end.root"},
    # Whom to wake is known when an engine's thread begins, long after the controller was made.
    "WorkerRole": {"self._controller.wakeup"},
    "TransferController": {"self._job_table.wakeup"},
    # Each step, batch or file has its own.
    "PagedModel": {"self._current_pass.states"},
    "ControllerView": {"self._streams.fence"},
    "CallPart": {"self.whole.began_ns"},
    "Log": {"self.index.dropped", "self.index.next_segment"},
    "DiskStore": {"self.index.dropped"},
    "Player": {"self.played.cpu_s", "self.played.writes", "self.played.decisions"},
    # Objects of others, which take it no other way.
    "MetricsFeed": {"self._storage.labels"},
    "_Ending": {"self._timer.daemon"},
    "MooncakeBackend": {"self._how.replica_num"},
    "CompressedStorage": {"self._local.compressor", "self._local.decompressor"},
}
"""By class: attributes of others that it may set, and the reason above them."""


def late_parts(module: Module) -> Iterator[tuple[str, str, int]]:
    """Assignments `self.part.attribute = ...` with their class and line: something is put into a part."""
    for owner in [node for node in module.tree.body if isinstance(node, ast.ClassDef)]:
        for node in ast.walk(owner):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in [one for t in targets for one in (t.elts if isinstance(t, ast.Tuple) else [t])]:
                if _is_a_part_of_a_part(target):
                    yield owner.name, ast.unparse(target), node.lineno


def _is_a_part_of_a_part(target: ast.expr) -> bool:
    part = target.value if isinstance(target, ast.Attribute) else None
    return (
        isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self"
    )


def test_nobody_puts_parts_into_others() -> None:
    found = {
        (owner, name): f"{module.shown}:{line} {owner} sets {name}"
        for module in modules()
        for owner, name, line in late_parts(module)
    }
    excepted = {(owner, name) for owner, names in EXCEPTIONS.items() for name in names}
    assert [found[one] for one in found if one not in excepted] == []
    assert [one for one in excepted if one not in found] == [], "no longer needed"


def test_the_rule_sees_a_late_part() -> None:
    source = "class A:\n    def f(self, one):\n        self._one = one\n        self._one.hook = self.end"
    bad = Module("hiradix.bad", Path(__file__), ast.parse(source))
    assert list(late_parts(bad)) == [("A", "self._one.hook", 4)]
