"""A backend in memory, and one that does to its caller whatever a test wants."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hiradix.errors import StorageError
from hiradix.storage import Page, PageFingerprint, StorageBackend, StorageContext, Traits, check_key
from hiradix.storage.kit.in_place import InPlacePage

HANG_LIMIT_S = 60.0


class MemoryBackend(StorageBackend):
    """Pages in a dict that handles on one `place` share; `max_pages` caps it, least recent out."""

    def __init__(self, context: StorageContext, places: dict[str, OrderedDict[str, bytes]] | None = None):
        place = str(context.extra_config.get("place", ""))
        self.max_pages = int(context.extra_config.get("max_pages", 1 << 30))
        self.prefix = (
            f"{context.fingerprint.digest()[:16]}/" if context.extra_config.get("own_prefix") else ""
        )
        self.pages = (places if places is not None else {}).setdefault(place, OrderedDict())
        self._lock = threading.Lock()
        self._closed = False

    def _names(self, keys: Sequence[str]) -> list[str]:
        if self._closed:
            raise StorageError("closed")
        return [self.prefix + check_key(key) for key in keys]

    def exists(self, keys: Sequence[str]) -> int:
        names = self._names(keys)
        return next((index for index, name in enumerate(names) if name not in self.pages), len(names))

    def get(self, keys: Sequence[str], into: Sequence[Page]) -> list[bool]:
        with self._lock:
            ok = []
            for name, page in zip(self._names(keys), into):
                stored = self.pages.get(name)
                ok.append(stored is not None and len(stored) == sum(view.nbytes for view in page))
                start = 0
                for view in page if ok[-1] else ():
                    view[:] = stored[start : start + view.nbytes]  # type: ignore[index]
                    start += view.nbytes
            self._use(keys)
            return ok

    def put(self, keys: Sequence[str], pages: Sequence[Page]) -> list[bool]:
        with self._lock:
            self._use(keys)
            wanted = set(self._names(keys))
            ok = []
            for name, page in zip(self._names(keys), pages):
                if name not in self.pages and len(self.pages) >= self.max_pages:
                    coldest = next(iter(self.pages))
                    if coldest in wanted:
                        ok.append(False)
                        continue
                    del self.pages[coldest]
                if name not in self.pages:
                    self.pages[name] = b"".join(bytes(view) for view in page)
                ok.append(True)
            self._use(keys)
            return ok

    def _use(self, keys: Sequence[str]) -> None:
        for name in reversed(self._names(keys)):
            if name in self.pages:
                self.pages.move_to_end(name)

    def delete(self, keys: Sequence[str]) -> None:
        with self._lock:
            for name in self._names(keys):
                self.pages.pop(name, None)

    def clear(self) -> None:
        with self._lock:
            for name in [name for name in self.pages if name.startswith(self.prefix)]:
                del self.pages[name]

    def close(self) -> None:
        self._closed = True

    def stats(self) -> Mapping[str, float]:
        return {"pages": len(self.pages)}


class FaultyBackend(StorageBackend):
    """Passes calls on to `inner`; `faults[name]`, a function of the call and its arguments, may replace one.

    A hanging call waits for `release`; `hanging` counts those inside.
    """

    def __init__(self, inner: StorageBackend):
        self.inner = inner
        self.faults: dict[str, Callable[..., Any]] = {}
        self.release = threading.Event()
        self.hanging = threading.Semaphore(0)
        self.calls: list[str] = []

    def _do(self, name: str, *args: Any) -> Any:
        self.calls.append(name)
        call = getattr(self.inner, name)
        fault = self.faults.get(name)
        return call(*args) if fault is None else fault(call, *args)

    def hang(self, call: Callable[..., Any], *args: Any) -> Any:
        """Do nothing until released, then do the call."""
        self.hanging.release()
        assert self.release.wait(HANG_LIMIT_S), "never released"
        return call(*args)

    def wait_until_hanging(self) -> None:
        assert self.hanging.acquire(timeout=HANG_LIMIT_S), "the call never came"

    def exists(self, keys: Sequence[str]) -> Any:
        return self._do("exists", keys)

    def get(self, keys: Sequence[str], into: Sequence[Page]) -> Any:
        return self._do("get", keys, into)

    def put(self, keys: Sequence[str], pages: Sequence[Page]) -> Any:
        return self._do("put", keys, pages)

    def delete(self, keys: Sequence[str]) -> None:
        self._do("delete", keys)

    def clear(self) -> None:
        self._do("clear")

    def close(self) -> None:
        self._do("close")

    def ping(self) -> None:
        self._do("ping")

    def stats(self) -> Mapping[str, float]:
        figures: Mapping[str, float] = self._do("stats")
        return figures


def raise_error(call: Callable[..., Any], *args: Any) -> Any:
    raise OSError(5, "the store is on fire")


def exit_thread(call: Callable[..., Any], *args: Any) -> Any:
    raise SystemExit("a backend that calls exit")


def answer(value: Any) -> Callable[..., Any]:
    """A fault that does the call and then answers `value`."""

    def fault(call: Callable[..., Any], *args: Any) -> Any:
        call(*args)
        return value

    return fault


def fill(pattern: bytes) -> Callable[..., Any]:
    """A get that fills every buffer with `pattern` and says all is well."""

    def fault(call: Callable[..., Any], keys: Sequence[str], into: Sequence[Page]) -> list[bool]:
        for page in into:
            for view in page:
                view[:] = (pattern * (view.nbytes // len(pattern) + 1))[: view.nbytes]
        return [True] * len(keys)

    return fault


def shifted(call: Callable[..., Any], keys: Sequence[str], into: Sequence[Page]) -> Any:
    """A get that mixes the keys of a batch up."""
    return call([*keys[1:], *keys[:1]], into)


def half(call: Callable[..., Any], keys: Sequence[str], into: Sequence[Page]) -> Any:
    """A get that reads everything, spoils the second half of each page, and says all is well."""
    ok = call(keys, into)
    for page in into:
        page[-1][page[-1].nbytes // 2 :] = bytes(page[-1].nbytes - page[-1].nbytes // 2)
    return ok


class FakeClock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def memory_context(fingerprint: PageFingerprint, page_bytes: int, **config: Any) -> StorageContext:
    return StorageContext(fingerprint, config, page_bytes)


class InPlaceMemory(MemoryBackend):
    """Memory whose pages come in pieces of at most `piece_bytes`, straight into the caller's pages."""

    traits = Traits(in_place=True)
    piece_bytes = 1000

    def get(self, keys: Sequence[str], into: Sequence[Page]) -> list[bool]:
        return [self.land(key, page) for key, page in zip(keys, into, strict=True)]

    def land(self, key: str, page: Page) -> bool:
        """One page."""
        assert isinstance(page, InPlacePage), "not the guard's"
        page.check_wanted()
        (name,) = self._names([key])
        stored = self.pages.get(name)
        if stored is None or len(stored) != page.num_bytes:
            return False
        page.begin(len(stored))
        view, step = memoryview(stored), self.piece_bytes
        return all(page.write(view[at : at + step]) for at in range(0, len(view), step)) and page.is_whole


class DirectMemory(MemoryBackend):
    """Memory that takes the caller's own pages. It keeps fingerprints apart if told to, and trusts itself."""

    traits = Traits(verifies=True, namespaced=True, direct=True)
