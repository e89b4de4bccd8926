"""What comes in at one time: bodies that are read, parsed and tokenised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from hiradix.apps.server.bounded_executor import BoundedExecutor
from hiradix.apps.server.errors import ApiError
from hiradix.apps.server.schema import MAX_BODY_BYTES
from hiradix.errors import Misuse

MAX_BYTES = 4 * MAX_BODY_BYTES
FREE_BYTES = 64 * 1024
"""Bytes of each body that the cap on all bodies does not count: short requests pass while long ones wait."""
LARGE_CHARS = 256 * 1024
"""Texts of more characters are tokenised one at a time, so that the others do not wait for them."""
PARSE_TIMEOUT_S = 60.0
MAX_PARSED = 1024
TOKENISE_TIMEOUT_S = 60.0

T = TypeVar("T")
Encode = Callable[[], Sequence[int]]


class Intake:
    """Of one application. Bodies keep their bytes until `release`; their first FREE_BYTES are not counted."""

    def __init__(self, max_bytes: int = MAX_BYTES):
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self._bodies = BoundedExecutor("bodies to parse", 1, MAX_PARSED)
        self._small = BoundedExecutor("prompts to tokenise", 4, 1024)
        self._large = BoundedExecutor("long prompts to tokenise", 1, 8)

    def body(self) -> BodyShare:
        """What one body holds, as a context."""
        return BodyShare(self)

    def take(self, num_bytes: int) -> None:
        """ApiError (503) where that is more than is left."""
        if self.num_bytes + num_bytes > self._max_bytes:
            raise ApiError(
                f"bodies of more than {self._max_bytes} bytes are being read; try again later",
                status=503, code="too_many_bodies",
            )  # fmt: skip
        self.num_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Give back what `take` gave."""
        self.num_bytes -= num_bytes
        if self.num_bytes < 0:
            raise Misuse(f"{self.num_bytes} bytes are held")

    async def parse(self, do: Callable[[], T], num_bytes: int) -> T:
        """What `do` gives, which parses that many bytes: many beside the event loop, a body at a time."""
        return do() if num_bytes <= FREE_BYTES else await self._bodies.run(do, PARSE_TIMEOUT_S)

    async def tokenise(self, encode: Encode, num_chars: int) -> Sequence[int]:
        """What `encode` gives, from another thread. EngineBusy or TimeoutError if there is too much of it."""
        executor = self._large if num_chars > LARGE_CHARS else self._small
        return await executor.run(encode, TOKENISE_TIMEOUT_S)


class BodyShare:
    """The bytes one body holds of an `Intake`, until the context is left."""

    def __init__(self, intake: Intake):
        self._intake = intake
        self._held = 0

    def __enter__(self) -> BodyShare:
        return self

    def __exit__(self, *_: object) -> None:
        self._intake.release(self._held)
        self._held = 0

    def grown_to(self, num_bytes: int) -> None:
        """The body has that many bytes; ApiError (503) where all bodies together have too many."""
        more = max(0, num_bytes - FREE_BYTES) - self._held
        if more > 0:
            self._intake.take(more)
            self._held += more

    async def work(self, do: Callable[[], T], num_bytes: int) -> T:
        """What `do` gives, which parses the body."""
        return await self._intake.parse(do, num_bytes)
