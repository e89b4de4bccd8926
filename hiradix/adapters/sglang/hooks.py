"""Calls of SGLang's that are heard of once they have been made, in this process."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from typing import Any

_MARK = "_hiradix_hook"


def after(target: str, hook: Callable[..., Any]) -> None:
    """Call `hook(result, *args, **kwargs)` after each call of a method, `package.module.Class.method`.

    Put in here and not by SGLang's own registry, which passes over a method that another plugin has hooked
    before, and only logs what fails. May be called again with the same hook: it stays one. Raises ImportError
    or AttributeError where there is no such method.
    """
    path, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(path)
    method = getattr(owner, name)
    if getattr(method, _MARK, None) is hook:  # wrappers that others have put around it have the mark too
        return

    @functools.wraps(method)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        hook(result, *args, **kwargs)
        return result

    setattr(hooked, _MARK, hook)
    setattr(owner, name, hooked)
