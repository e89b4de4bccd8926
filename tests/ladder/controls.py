"""Positive controls: a copy that goes wrong in the way that a fault of the field does must turn an arm red."""

from __future__ import annotations

from tests.ladder.climb import Answers, Climb, Judged, cache_off
from tests.ladder.planted import ANOTHER_LAYOUT

STALE = "a stale state under a known hash"
LAYOUTS = ("page_first", "layer_first")

FAULTS: dict[str, tuple[str, ...]] = {
    "a state one block off": ("gated delta", "mamba 2"),
    "one of N pages stored": ("full", "window", "latent"),
    "a window's page of another boundary": ("window",),
    ANOTHER_LAYOUT: ("full",),
    "two groups exchanged": ("window", "mamba 2"),
    STALE: ("gated delta", "mamba 2"),
}
"""In which families each can happen. Two groups alike, which can be exchanged, are vLLM's alone."""


def wrong_answers(climb: Climb, fault: str) -> int:
    """How many answers the arm has wrong that `fault` is planted in: of those from storage after another
    layout's life, else of those from the host."""
    try:
        cache_off(climb)
        return len(Judged.of(climb.expected, _answers(climb, fault)).identity.different)
    finally:
        climb.close()


def _answers(climb: Climb, fault: str) -> Answers:
    if fault == ANOTHER_LAYOUT:
        climb.plant(fault)
        climb.begin(layout=LAYOUTS[0]).answer(climb.prompts)
        return climb.begin(layout=LAYOUTS[1]).answer(climb.prompts)
    life = climb.begin()
    if fault == STALE:  # what is stale was once right, for other prompts
        life.answer([needle.prompt for needle in climb.others])
        life.settle()
        life.forget(host=True)
    climb.plant(fault)
    life.answer(climb.prompts)
    life.settle()
    life.forget()
    return life.answer(climb.prompts)
