"""Parts of the tree that stay interpreted: hints to mypyc about a class that it compiles (see setup.py; run by
Python it means nothing), which form of a module there is, and an object with an end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
else:

    def mypyc_attr(**_: Any) -> Callable[[type], type]:
        """The class as it is; mypyc knows the name. acyclic: the garbage collector looks at none of them."""
        return lambda cls: cls


def form_in_c(name: str, twin: ModuleType) -> Any:
    """The module `name`, which is in C; `twin`, which does the same, where that is not built."""
    try:
        return import_module(name)
    except ImportError:
        return twin


class AtEnd:
    """Calls `do(root)` when it is let go itself, but not while Python ends. root: may be changed."""

    __slots__ = ("_do", "root")

    def __init__(self, do: Callable[[Any], None], root: object):
        self._do = do
        self.root = root

    def __del__(self, is_over: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_over():
            self._do(self.root)


__all__ = ["AtEnd", "form_in_c", "mypyc_attr"]
