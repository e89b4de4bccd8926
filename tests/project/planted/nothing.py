"""Where an exploration finds nothing. Collected by its name alone."""

from __future__ import annotations

import hashlib
import os
import random

from hypothesis import given
from hypothesis import strategies as st

from tests.seeds import seeded, seeds

drawn = hashlib.sha256()


@given(st.lists(st.tuples(st.integers(), st.text(), st.floats(), st.sampled_from("abc")), max_size=5))
def test_drawn(values: list[object]) -> None:
    drawn.update(repr(values).encode())


@seeded
def test_seeded() -> None:
    drawn.update(repr([random.Random(seed).random() for seed in seeds(3)]).encode())
    drawn.update(repr(random.random()).encode())
    if path := os.environ.get("DRAWN_INTO"):
        with open(path, "w", encoding="ascii") as file:
            file.write(drawn.hexdigest())
