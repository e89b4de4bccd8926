"""Names of blocks of tokens: what equal prefixes have in common, in eight bytes.

Two forms: `names_python`, and `_names.c`, which `make compiled` builds and which takes its place where it is
found. Each keeps to itself what its names are, as each process does: the key of the hash is made anew in it.

    name_of(prior, run, first, last)  of the block whose tokens are bytes [first, last) of `run`, behind the
                                      one named `prior` (or any bytes): eight bytes

    names_of(prior, run, count, step, size)  of `count` blocks in a row, the first behind `prior`: `size` bytes
                                      of `run` each, `step` bytes from the beginning of one to that of the next

AssertionError where these are not bytes of `run`. Other tokens or another prior have the same name once in
2^64. Cost of 2 KiB: 0.15 us in C.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from hiradix.policy import names_python
from hiradix.tree.native import form_in_c

form = form_in_c("hiradix.policy._names", names_python)
name_of: Final[Callable[[bytes, bytes, int, int], bytes]] = form.name_of
names_of: Final[Callable[[bytes, bytes, int, int, int], bytes]] = form.names_of
