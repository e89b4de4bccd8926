"""`python -O` takes assert statements away: nothing that keeps a bug from becoming a wrong answer is one."""

from __future__ import annotations

import ast
import subprocess
import sys

from tests.project.repo import ROOT, Module, modules


def _narrows(test: ast.expr) -> bool:
    """Whether a condition only tells a type checker what is so anyhow."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return all(map(_narrows, test.values))
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.IsNot):
        (other,) = test.comparators
        return isinstance(other, ast.Constant) and other.value is None
    return isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id == "isinstance"


def offences(module: Module) -> list[str]:
    """Where a module asserts more than a type."""
    found = [node for node in ast.walk(module.tree) if isinstance(node, ast.Assert)]
    return [f"{module.shown}:{node.lineno}" for node in found if node.msg or not _narrows(node.test)]


def test_an_assert_only_narrows_a_type() -> None:
    wrong = [at for module in modules() if ".testing" not in module.name for at in offences(module)]
    assert wrong == [], "raise hiradix.errors.Misuse"


def test_the_rule_sees_an_assert_that_decides() -> None:
    narrowing = "assert x is not None\nassert isinstance(x, int) and y is not None\n"
    source = narrowing + "assert x > 1\nassert x is not None, y"
    bad = Module("hiradix.bad", ROOT / "hiradix" / "bad.py", ast.parse(source))
    assert offences(bad) == ["hiradix/bad.py:3", "hiradix/bad.py:4"]


MISTAKES = """
import numpy as np
from hiradix.errors import Misuse
from hiradix.memory import PageAllocator, SlotAllocator, ReqToTokenPool
from hiradix.tree import RadixKey, RadixTree, Tier

assert not __debug__ or 1 / 0
DEVICE = Tier.DEVICE


def refused(name, call):
    try:
        print(name, "was taken:", call())
    except Misuse:
        pass
    except Exception as error:
        print(name, "ended in", repr(error))


def key(count, salt=None, last=()):
    return RadixKey([*range(count), *last], cache_salt=salt)


def tree_of(pages=(1, 2)):
    tree = RadixTree(4)
    return tree, tree.insert(key(4 * len(pages), "alice"), DEVICE, [np.array(pages)]).lock


tree, lock = tree_of()
refused("another tenant", lambda: tree.insert(key(8, "bob", (9,) * 4), DEVICE, [np.array([3])], at=lock))
refused("a shorter key", lambda: tree.insert(key(4, "alice"), DEVICE, [np.array([1])], at=lock))
refused("a gap", lambda: tree.insert(key(20, "alice"), DEVICE, [np.array([3])]))
refused("too many pages", lambda: tree.insert(key(4, "carol"), DEVICE, [np.array([3, 4])]))
tree.check([lock])
tree.unlock(lock)
refused("a lock given back twice", lambda: tree.unlock(lock))
tree.check([])
again = tree.lock(lock.node, DEVICE)
refused("a locked node dropped", lambda: tree.drop(lock.node))

pages = PageAllocator(4)
own = pages.alloc(2)
pages.free(own)
refused("a double free", lambda: pages.free(own))
refused("a foreign page", lambda: pages.free([77]))
refused("a page named twice", lambda: pages.free([pages.alloc(1)[0]] * 2))
refused("fewer than no pages", lambda: pages.alloc(-1))
refused("pages not handed out", lambda: pages.require_out([3]))
refused("slots inside a page", lambda: SlotAllocator(16, 4).alloc(3))
rows = ReqToTokenPool(2, 8)
refused("a row that is not out", lambda: rows.free(1))

tree, lock = tree_of()
lock.node.device.lock_ref += 1
refused("a wrong count", lambda: tree.check([lock]))
tree, lock = tree_of()
lock.node.device.pages = np.array([1], np.int32)
refused("a lost page", lambda: tree.check([lock]))
"""


def test_mistakes_are_refused_without_asserts() -> None:
    """In the Python form as in the compiled one; `check` finds what is wrong, too."""
    done = subprocess.run(
        [sys.executable, "-O", "-c", MISTAKES], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
