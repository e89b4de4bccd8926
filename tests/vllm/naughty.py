"""A storage backend that misbehaves on demand, in the process that uses it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from hiradix.storage import StorageContext
from tests.storage.doubles import FaultyBackend, MemoryBackend, half, raise_error

HANG_S = 3600.0


def hang(call: Callable[..., Any], *args: Any) -> Any:
    time.sleep(HANG_S)


MODES: Mapping[str, dict[str, Callable[..., Any]]] = {
    "": {},
    "hang": dict.fromkeys(("exists", "get", "put"), hang),
    "raise": dict.fromkeys(("exists", "get", "put"), raise_error),
    "lie": {"get": half},
}


class Naughty(FaultyBackend):
    """A store in memory. mode: "" behaves; "hang" never answers; "raise" fails each call; "lie" damages."""

    mode = ""

    def __init__(self, context: StorageContext) -> None:
        super().__init__(MemoryBackend(context))

    def _do(self, name: str, *args: Any) -> Any:
        self.faults = MODES[self.mode]
        return super()._do(name, *args)
