"""Lets a peer be imported from its unpacked wheel: what its modules import and this machine lacks, is mocked."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "peers"))

from mocks import MockFinder  # noqa: E402

OPTIONAL = ("opentelemetry", "torch_neuronx", "torch")
"""Packages that a peer does without, or whose missing parts it looks for on purpose."""


class MissingModules(MockFinder):
    """Serves what a module of `package` asks for and nobody else has; `mocked` are parts of the package."""

    def __init__(self, package: str, mocked: Sequence[str]):
        super().__init__(mocked)
        self._package = package
        self._mocked = tuple(mocked)

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        root = name.partition(".")[0]
        own = root == self._package and name not in self._mocked
        if own and self._package == "lmcache" or root in OPTIONAL or not self._asked_by_package():
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def _asked_by_package(self) -> bool:
        frame = sys._getframe(2)
        while frame is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back  # type: ignore[assignment]
        asking = "" if frame is None else str(frame.f_globals.get("__name__", ""))
        return asking.partition(".")[0] in (self._package, self.__class__.__module__, "systems")


def serve_missing(package: str, folder: str, mocked: Sequence[str]) -> None:
    """Make `package` importable from build/peers/`folder`. After torch was imported."""
    from benchmarks.peers.install import FOLDER

    if not (FOLDER / folder).is_dir():
        raise FileNotFoundError(f"{package} is not unpacked: make bench-storage")
    sys.path.insert(0, str(FOLDER / folder))
    sys.meta_path.append(MissingModules(package, mocked))
