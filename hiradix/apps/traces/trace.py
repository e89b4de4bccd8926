"""A trace in memory: requests as block names, whatever file or generator they came from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[np.int64]


class TraceRequest(NamedTuple):
    """One request. blocks: names of its whole blocks, equal iff the prefix up to their end is.

    prompt_tokens counts the part behind the last whole block too. hint: the client's, or None. session: its
    name, stop: why its answer ended; "" where the trace does not say.
    """

    time_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: Blocks
    hint: str | None = None
    session: str = ""
    stop: str = ""


@dataclass(frozen=True)
class Trace:
    """name: for tables. source: sha256 of the file, or the generator and its seed. is_synthetic: invented.

    bytes_per_token: of KV of the model that was served, where the recording says it.
    """

    name: str
    source: str
    block_tokens: int
    calls: tuple[TraceRequest, ...]
    is_synthetic: bool = False
    bytes_per_token: int | None = None

    @property
    def prompt_tokens(self) -> int:
        return sum(call.prompt_tokens for call in self.calls)

    @property
    def unique_tokens(self) -> int:
        """Tokens of all different whole blocks."""
        seen: set[int] = set()
        for call in self.calls:
            seen.update(call.blocks.tolist())
        return len(seen) * self.block_tokens

    def scaled(self, factor: float) -> Trace:
        """The same with all times multiplied."""
        calls = tuple(call._replace(time_s=call.time_s * factor) for call in self.calls)
        return replace(self, name=f"{self.name} x{factor:g}", calls=calls)


class Namer:
    """Names blocks that come as prefixes: equal names iff equal contents from the start."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, object], int] = {}

    def blocks(self, contents: list[object]) -> Blocks:
        """Names of a prompt's blocks, given what is in each."""
        at, found = -1, []
        for content in contents:
            at = self._names.setdefault((at, content), len(self._names))
            found.append(at)
        return np.array(found, np.int64)
