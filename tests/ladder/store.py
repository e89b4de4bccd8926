"""The store of the ladder: files, in a process that a test tells from outside how the store is to misbehave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hiradix.storage import Page, StorageContext, register_storage_backend
from hiradix.storage.backends.file.backend import FileBackend
from tests.storage.doubles import FaultyBackend, half, raise_error

NAME = "ladder"


def holes(call: Callable[..., Any], keys: Sequence[str], into: Sequence[Page]) -> Any:
    """A get that has lost every page whose name ends in one of four digits."""
    return [had and key[-1] not in "048c" for key, had in zip(keys, call(keys, into), strict=True)]


FAULTS: Mapping[str, dict[str, Callable[..., Any]]] = {
    "": {},
    "damages": {"get": half},
    "loses": {"get": holes},
    "raises": dict.fromkeys(("exists", "get", "put"), raise_error),
}


def fault_file(pages: Path) -> Path:
    """Says how the store over the folder `pages` misbehaves; it is looked at before each call."""
    return pages.with_name(f"{pages.name}.fault")


class LadderStore(FaultyBackend):
    """The `file` backend, whose calls go wrong as `fault_file` says."""

    def __init__(self, context: StorageContext) -> None:
        super().__init__(FileBackend(context))
        self._file = fault_file(Path(context.extra_config["file_storage_path"]))

    def _do(self, name: str, *args: Any) -> Any:
        self.faults = FAULTS[self._file.read_text() if self._file.exists() else ""]
        return super()._do(name, *args)


def register() -> None:
    """Make it known in this process."""
    register_storage_backend(NAME, "tests.ladder.store:LadderStore")


def keys(pages: Path, page_size: int) -> dict[str, Any]:
    """Its extra config. A call that a busy disk holds for long is none of the faults."""
    patience = {"deadline_s": 60.0, "breaker_retry_s": 0.05}
    return {"file_storage_path": str(pages), "prefetch_threshold": page_size, **patience}
