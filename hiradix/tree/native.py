"""What mypyc is told of a class that it compiles (see setup.py). Run by Python it means nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
else:

    def mypyc_attr(**_: Any) -> Callable[[type], type]:
        """The class as it is; mypyc knows the name."""
        return lambda cls: cls


__all__ = ["mypyc_attr"]
