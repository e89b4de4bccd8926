"""Ropes whose factors depend on lengths, told by a model's config: which KV they make, or that it is none's.

A `longrope` has two sets of factors, for sequences up to the length that the model was trained for and for
longer ones, and a scale that depends on the longest; a `dynamic` one grows with the sequence. An engine that
chooses by the longest sequence of a batch computes KV that is no function of its prefix.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

LONG, DYNAMIC = "longrope", "dynamic"
_SAME = {"su": LONG}  # other names
_BY_LONGEST = (LONG, DYNAMIC, "yarn")  # those that `max_position_embeddings` goes into


class Rope(NamedTuple):
    """A layer's. trained: the length that its first factors are for."""

    kind: str
    trained: int


def ropes_of(config: Any) -> Iterator[Rope]:
    """The ropes of a text model's config, in Hugging Face's form: one, or one for each type of layer."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(given, Mapping):
        return
    by_type = [part for part in given.values() if isinstance(part, Mapping)]
    for part in by_type or [given]:
        kind = str(part.get("rope_type") or part.get("type") or "default")
        name = "original_max_position_embeddings"
        trained = part.get(name) or getattr(config, name, None)
        yield Rope(_SAME.get(kind, kind), int(trained or getattr(config, "max_position_embeddings", 0) or 0))


def unfixed(config: Any, length: int | None, kinds: Collection[str]) -> Rope | None:
    """The first rope of `kinds` that sequences of up to `length` tokens may be too long for."""
    found = (rope for rope in ropes_of(config) if rope.kind in kinds)
    return next((rope for rope in found if length is None or length > rope.trained), None)


def lengths_that_decide(config: Any) -> dict[str, int]:
    """The lengths in a config that change how its ropes rotate, by name; none for fixed ropes.

    An engine may have put another into the config than the model's files have.
    """
    longest = getattr(config, "max_position_embeddings", None)
    if longest is None or not any(rope.kind in _BY_LONGEST for rope in ropes_of(config)):
        return {}
    return {"max_position_embeddings": int(longest)}
