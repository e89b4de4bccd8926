"""A storage backend in memory that hangs, errs, is slow, returns garbage, is full or dies, call by call."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from hiradix.storage import Page, StorageContext
from tests.storage.doubles import MemoryBackend

KINDS = ("hang", "error", "slow", "garbage", "full", "die")
PHASES = ("attach", "register", "exists", "get", "put", "detach")
SLOW_S = 0.05
HANG_LIMIT_S = 30.0


class Behaviour:
    """What the next calls do; shared by all backends of this process. `released` ends what hangs."""

    def __init__(self) -> None:
        self.phase: str | None = None
        self.kind: str | None = None
        self.released = threading.Event()
        self.num_faults = 0
        self.places: dict[str, OrderedDict[str, bytes]] = {}

    def set(self, phase: str | None, kind: str | None) -> None:
        self.released.set()
        self.released = threading.Event()
        self.phase, self.kind, self.num_faults = phase, kind, 0

    def at(self, phase: str) -> str | None:
        """The fault of a call, which it has suffered already if it is one of time or an exception."""
        if phase != self.phase:
            return None
        self.num_faults += 1
        if self.kind == "hang":
            self.released.wait(HANG_LIMIT_S)
        elif self.kind == "slow":
            self.released.wait(SLOW_S)
        elif self.kind == "error":
            raise OSError(f"injected: {phase}")
        elif self.kind == "die":
            raise SystemExit(f"injected: {phase}")
        return self.kind


BEHAVIOUR = Behaviour()


class Misbehaving(MemoryBackend):
    """See the module's docstring. `BEHAVIOUR` decides."""

    def __init__(self, context: StorageContext):
        if BEHAVIOUR.at("attach") in ("garbage", "full"):
            raise ValueError("injected: attach")
        super().__init__(context, BEHAVIOUR.places)

    def register(self, memory: memoryview) -> None:
        if BEHAVIOUR.at("register") in ("garbage", "full"):
            raise ValueError("injected: register")

    def exists(self, keys: Sequence[str]) -> Any:
        if BEHAVIOUR.at("exists") in ("garbage", "full"):
            return len(keys) + 1000
        return super().exists(keys)

    def get(self, keys: Sequence[str], into: Sequence[Page]) -> list[bool]:
        fault = BEHAVIOUR.at("get")
        ok = super().get(keys, into)
        if fault == "garbage":
            for page in into:
                page[0][: page[0].nbytes // 2] = b"\x41" * (page[0].nbytes // 2)
            return [True] * len(ok)
        return [False] * len(ok) if fault == "full" else ok

    def put(self, keys: Sequence[str], pages: Sequence[Page]) -> Any:
        fault = BEHAVIOUR.at("put")
        if fault == "full":
            return [False] * len(keys)
        ok = super().put(keys, pages)
        return ["yes"] * len(ok) if fault == "garbage" else ok

    def close(self) -> None:
        if BEHAVIOUR.at("detach") in ("garbage", "full"):
            raise ValueError("injected: close")
        super().close()
