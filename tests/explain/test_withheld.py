"""Why storage did not bring what it has: the reason is that of the last time it was asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hiradix.errors import StorageError
from hiradix.explain import Reason
from hiradix.tree import HOST, RadixKey
from tests.cache.component_storage import Part
from tests.cache.test_component_storage import TOKENS, restarted
from tests.cache.test_waiting import Waiting, prompt


def waiting(num_pages: int = 8) -> Waiting:
    return Waiting({"a": prompt(1, num_pages)})


def test_pages_for_which_the_host_has_no_room_are_said_to_have_none() -> None:
    planner = waiting()
    others = planner.host.alloc(planner.host.num_pages - 3)
    assert others is not None
    lock = planner.tree.insert(prompt(9, len(others)), HOST, [others]).lock
    planner.arrive()
    for _ in range(3):
        planner.step()
        planner.prefetcher.progress("a")
    assert planner.prefetcher.pop_loaded_span("a") == (0, 3)
    withheld = planner.prefetcher.pop_withheld("a")
    assert withheld is not None and withheld[:2] == (8, Reason.NO_ROOM)
    planner.tree.unlock(lock)
    planner.gone()


def test_a_reason_ends_when_storage_is_asked_again() -> None:
    planner, adopted = waiting(), [0.0]
    planner.prefetcher._num_adopted = lambda: adopted[0]
    gate: Any = planner.gate
    gate.takes = lambda transfer, num_pages: False
    planner.arrive()
    planner.settle()
    assert planner.prefetcher.progress("a")
    assert planner.prefetcher._withheld["a"][:2] == (8, Reason.PREDICTED_SLOWER)
    planner.book.stored, adopted[0] = set(), 1.0
    planner.prefetcher.progress("a")
    planner.settle()
    assert planner.prefetcher.progress("a") and planner.prefetcher.pop_withheld("a") is None
    planner.gone()


def test_a_prompt_that_no_room_would_hold_is_not_too_short() -> None:
    """Further kinds of attention limit what may be asked for by what the host can hold."""
    planner = waiting()
    reads: Any = planner.prefetcher.reads
    reads.most = lambda key, node: 0
    planner.arrive()
    withheld = planner.prefetcher.pop_withheld("a")
    assert withheld is not None and withheld[:2] == (8, Reason.NO_ROOM)
    planner.gone()


@pytest.mark.parametrize("component", [0, 1])
@pytest.mark.parametrize("ends", [(12,), (6, 12)])
def test_a_boundary_whose_pages_are_damaged_says_so(component: int, ends: tuple[int, ...]) -> None:
    """Although an earlier boundary is looked for then, and all of that may come."""
    world = restarted(*ends)
    world.depot.damaged.add((component, world.hashes(RadixKey(TOKENS))[10]))
    handle = world.prefetch(RadixKey(TOKENS))
    world.settle()
    prefetcher = world.cache.prefetcher
    assert prefetcher is not None and prefetcher.progress(handle)
    assert prefetcher.pop_loaded_pages(handle) == (6 if len(ends) > 1 else 0)
    withheld = prefetcher.pop_withheld(handle)
    assert withheld is not None and withheld[:2] == (12, Reason.DAMAGED)
    world.assert_drained()


def test_a_boundary_that_a_fault_kept_back_says_so() -> None:
    world = restarted(12)

    def fail(part: Part, keys: Sequence[str]) -> None:
        raise StorageError("injected")

    world.depot.on_get = fail
    handle = world.prefetch(RadixKey(TOKENS))
    world.settle()
    prefetcher = world.cache.prefetcher
    assert prefetcher is not None and prefetcher.progress(handle)
    withheld = prefetcher.pop_withheld(handle)
    assert withheld is not None and withheld[:2] == (12, Reason.STORAGE_FAILED)
    world.assert_drained()
