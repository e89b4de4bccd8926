"""Requests' bodies on their way in: read within a time and a size, parsed, tokenised; a cap on all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request

from hiradix.apps.server.bounded_executor import BoundedExecutor
from hiradix.apps.server.errors import ApiError
from hiradix.apps.server.schema import parse_body, parse_json
from hiradix.errors import Misuse

MAX_BODY_BYTES = 32 * 1024 * 1024
MAX_ADMIN_BODY_BYTES = 256 * 1024
BODY_TIMEOUT_S = 120.0
CLIENT_CLOSED_REQUEST = 499
MAX_BYTES = 4 * MAX_BODY_BYTES
FREE_BYTES = 64 * 1024
"""Bytes of each body that the cap on all bodies does not count: short requests pass while long ones wait."""
LARGE_CHARS = 256 * 1024
"""Texts of more characters are tokenised one at a time, so that the others do not wait for them."""
PARSE_TIMEOUT_S = 60.0
MAX_PARSED = 1024
TOKENISE_TIMEOUT_S = 60.0

T = TypeVar("T")
Body = TypeVar("Body", bound=BaseModel)
Encode = Callable[[], Sequence[int]]


class Intake:
    """The bodies that one application is reading. The bytes of each count until `release`, but for its first
    FREE_BYTES."""

    def __init__(self, max_bytes: int = MAX_BYTES):
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self._bodies = BoundedExecutor("bodies to parse", 1, MAX_PARSED)
        self._small = BoundedExecutor("prompts to tokenise", 4, 1024)
        self._large = BoundedExecutor("long prompts to tokenise", 1, 8)

    def body(self) -> BodyShare:
        """A context that counts the bytes of one body."""
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
        """Run `do`, which parses `num_bytes`, and return its result: a long body on another thread, one at a
        time."""
        return do() if num_bytes <= FREE_BYTES else await self._bodies.run(do, PARSE_TIMEOUT_S)

    async def tokenise(self, encode: Encode, num_chars: int) -> Sequence[int]:
        """Run `encode` on another thread, and return the tokens. EngineBusy or TimeoutError if too much
        waits."""
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
        """Run `do`, which parses the body, and return its result."""
        return await self._intake.parse(do, num_bytes)


async def read_json(request: Request) -> Any:
    """An administrator's JSON body, short enough to be parsed on the event loop; ApiError otherwise."""
    return parse_json(await received(request, MAX_ADMIN_BODY_BYTES))


async def read_body(request: Request, model: type[Body], share: BodyShare, dialect: str = "") -> Body:
    """The request's body as a checked record; ApiError naming the first field at fault. EngineBusy or
    TimeoutError where too many bodies wait to be parsed.

    dialect: whose table of unsupported fields counts.
    """
    data = await received(request, MAX_BODY_BYTES, share)
    return await share.work(partial(parse_body, data, model, dialect), len(data))


async def received(request: Request, most: int, share: BodyShare | None = None) -> bytes:
    """The request's body of at most so many bytes; ApiError. share: where the cap on all bodies counts it."""
    try:
        return await asyncio.wait_for(_read(request, most, share), BODY_TIMEOUT_S)
    except ClientDisconnect as error:
        raise ApiError("the client left", status=CLIENT_CLOSED_REQUEST) from error
    except TimeoutError as error:
        raise ApiError(f"the body did not come within {BODY_TIMEOUT_S:g} s", status=408) from error


async def _read(request: Request, most: int, share: BodyShare | None) -> bytes:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > most:
            raise ApiError(f"the body is larger than {most} bytes", status=413)
        if share is not None:
            share.grown_to(len(data))
    return bytes(data)
