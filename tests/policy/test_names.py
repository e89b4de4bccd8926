"""Names of blocks, both forms: equal where everything is, different where anything is not."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiradix.policy import names, names_python

FORMS = [names_python] if names.form is names_python else [names_python, names.form]
form_of = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)


@form_of
@settings(max_examples=200, deadline=None)
@given(
    prior=st.binary(max_size=70),
    run=st.binary(max_size=200),
    before=st.binary(max_size=70),
    after=st.binary(max_size=9),
)
def test_a_name_is_of_its_bytes_wherever_they_lie(
    form: Any, prior: bytes, run: bytes, before: bytes, after: bytes
) -> None:
    name = form.name_of(prior, run, 0, len(run))
    assert isinstance(name, bytes) and len(name) == 8
    assert form.name_of(prior, before + run + after, len(before), len(before) + len(run)) == name
    assert form.name_of(run, run, 0, 0) == form.name_of(run, prior, 0, 0), "of no bytes"


@form_of
@pytest.mark.parametrize("length", [0, 1, 7, 8, 15, 16, 17, 63, 64, 65, 100, 128, 2048, 2051])
def test_every_bit_and_every_length_counts(form: Any, length: int) -> None:
    rng = random.Random(length)
    for prior in (b"", rng.randbytes(8), rng.randbytes(33)):
        run = rng.randbytes(length)
        found = {form.name_of(prior, run, 0, length)}
        changed = [bytes(length), run + b"\0", b"\0" + run, *([run[:-1]] if length else [])]
        for bit in range(8 * length):
            one = bytearray(run)
            one[bit // 8] ^= 1 << bit % 8
            changed.append(bytes(one))
        found |= {form.name_of(prior, one, 0, len(one)) for one in changed}
        priors = [prior + b"\0", prior + b"x", *([prior[:-1]] if prior else [])]
        found |= {form.name_of(one, run, 0, length) for one in priors}
        assert len(found) == len({run, *changed}) + len(priors)


@form_of
def test_blocks_in_another_order_have_other_names(form: Any) -> None:
    """Pieces of 16 bytes are taken side by side: which went where counts."""
    pieces = [bytes([i]) * 16 for i in range(12)]
    found = set()
    for i in range(12):
        for j in range(i + 1):
            order = list(pieces)
            order[i], order[j] = order[j], order[i]
            run = b"".join(order)
            found.add(form.name_of(b"", run, 0, len(run)))
    assert len(found) == 1 + 12 * 11 // 2
    words = b"".join(number.to_bytes(4, "little") for number in range(60_000))
    assert len({form.name_of(b"", words, at, at + 64) for at in range(0, len(words) - 64, 4)}) == 60_000 - 16


@form_of
@pytest.mark.parametrize("part", [(-1, 2), (2, 1), (0, 9), (9, 9), (-(1 << 70), 2), (0, 1 << 70)])
def test_bytes_that_are_not_there(form: Any, part: tuple[int, int]) -> None:
    with pytest.raises((AssertionError, OverflowError)):
        form.name_of(b"", b"12345678", *part)


@pytest.mark.skipif(names.form is names_python, reason="not built")
@pytest.mark.parametrize(
    "given_args",
    [("", b"", 0, 0), (b"", "", 0, 0), (b"", b"", "0", 0), (b"", b"", 0), (b"", bytearray(8), 0, 8)],
)
def test_what_is_no_bytes_or_number(given_args: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        names.name_of(*given_args)


def test_another_process_has_other_names() -> None:
    code = "from hiradix.policy.names import name_of; print(name_of(b'', b'12345678', 0, 8).hex())"
    env = {**os.environ, "PYTHONHASHSEED": "random"}
    told = {
        subprocess.check_output([sys.executable, "-c", code], text=True, timeout=120, env=env)
        for _ in range(2)
    }
    assert len(told) == 2
