"""One store for all components of a model's cache: full attention, sliding windows, recurrent states.

A page of tokens has one name, its hash, and up to one page of bytes of each component. These are different
pages to a store: each component has a fingerprint, a page length and so a backend of its own, made from the
same keys. What is asked of the store as a whole (close, clear, figures) goes to all of them; breaker and
workers are the same for all, as a server that fails for the one fails for the others.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hiradix.errors import ConfigError, Misuse
from hiradix.storage.fingerprint import PageFingerprint
from hiradix.storage.guard.guard import GuardedStorage
from hiradix.storage.guard.joining import Joiner, JoiningStorage, opened
from hiradix.storage.guard.stores import Stores
from hiradix.storage.kit.options import flag, parse_size
from hiradix.storage.opening import (
    StoreSettings,
    declared_traits,
    open_backend,
    open_guarded,
    open_part,
)
from hiradix.storage.protocol import Page, StorageContext
from hiradix.storage.registry import FLAG
from hiradix.storage.wrappers.wrap import coded


class PageDifference(Protocol):
    """The border to an engine's arithmetic: what two pages differ in; as text, in what most."""

    @property
    def is_same(self) -> bool: ...


@dataclass(frozen=True)
class _Bytes:
    """The result of comparing two pages byte by byte."""

    is_same: bool

    def __str__(self) -> str:
        return "their bytes"


def exactly(one: Page, other: Page, _: bool) -> PageDifference:
    """Pages are the same where their bytes are."""
    return _Bytes(b"".join(one) == b"".join(other))


@dataclass(frozen=True)
class ComponentPages:
    """Pages of one component. weight: what share of a cap they get, such as the bytes of their host pool.

    fingerprint: with `component` set for all but the backbone. elements: as a `StorageContext` has it.
    compare: how much a page that was computed here differs from a stored one, and whether rounding explains
    it; by default bytes must be equal. Told whether storage has rounded both.
    """

    fingerprint: PageFingerprint
    page_bytes: int
    weight: int = 1
    elements: str = ""
    compare: Callable[[Page, Page, bool], PageDifference] = exactly


def open_stores(
    name: str,
    keys: Mapping[str, Any] | StoreSettings,
    components: Sequence[ComponentPages],
    clock: Callable[[], float] = time.monotonic,
    required: bool = True,
) -> Stores:
    """Backend `name` for pages of all these components, the backbone's first. Raises ConfigError.

    Caps that a backend keeps per fingerprint are split by weight, so that they hold for all together.
    required: whether a store that does not answer is an error, too; else it is joined later, for all
    components at once (`joining`).
    """
    digests = {pages.fingerprint.digest() for pages in components}
    if len(digests) != len(components):
        raise Misuse(f"components of one fingerprint: {components}")
    settings = StoreSettings.read(keys)
    parts = [_part(name, settings, pages, components, required) for pages in components]
    if len(parts) == 1:
        return Stores([open_part(name, *parts[0], clock)])
    names = [pages.fingerprint.component for pages in components]
    if required:
        return Stores(_open_all(name, parts, clock), names)
    found = opened(
        name, lambda: Stores(_open_all(name, parts, clock), names), settings.join, declared_traits(name)
    )
    if isinstance(found, Joiner):
        return Stores([JoiningStorage(found, index) for index in range(len(parts))], names)
    return found


_Part = tuple[StorageContext, StoreSettings]


def _open_all(name: str, parts: Sequence[_Part], clock: Callable[[], float]) -> list[GuardedStorage]:
    """A guard per component, all with the first's workers and breaker. Raises ConfigError, with none open."""
    first = open_guarded(name, *parts[0], clock)
    opened_parts = [first]
    try:
        for context, settings in parts[1:]:
            backend = open_backend(name, context, settings.wraps)
            opened_parts.append(first.beside(backend, context.fingerprint))
    except BaseException:
        for part in reversed(opened_parts):
            part.close()
        raise
    return opened_parts


def _part(
    name: str,
    settings: StoreSettings,
    pages: ComponentPages,
    all_pages: Sequence[ComponentPages],
    required: bool,
) -> _Part:
    """The arguments that the store of one component is made with."""
    if len(all_pages) > 1:
        further = ", ".join(other.fingerprint.component for other in all_pages[1:])
        share = _Share(pages.weight, sum(other.weight for other in all_pages), pages is all_pages[0], further)
        settings = share.of(name, settings)
    context = StorageContext(
        pages.fingerprint, settings.own, pages.page_bytes, elements=pages.elements, required=required
    )
    return coded(context, settings.wraps), settings


@dataclass(frozen=True)
class _Share:
    """One component's share of a size that is given for all: `weight` parts of `total`.

    further: names of those beside the backbone.
    """

    weight: int
    total: int
    is_backbone: bool
    further: str

    def of(self, name: str, settings: StoreSettings) -> StoreSettings:
        """The settings of backend `name` for this component; raises ConfigError where it cannot have one."""
        quota = settings.wraps.quota.share(self._part)
        wraps = dataclasses.replace(settings.wraps, quota=quota)
        return dataclasses.replace(settings, wraps=wraps, own=self._of_keys(name, settings.own))

    def _of_keys(self, name: str, keys: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of backend `name` for this component; raises ConfigError where it cannot have one."""
        found = dict(keys)
        if name == "file" and keys.get("naming") == "sglang":
            raise ConfigError(f"{flag('naming')}: SGLang's files are full attention only, not {self.further}")
        if name == "hf3fs":
            raise ConfigError(f"{FLAG} hf3fs: has pages of one length only, and none for {self.further}")
        if name == "tier":
            for tier in ("upper", "lower"):
                inside = keys.get(tier)
                if isinstance(inside, Mapping):
                    found[tier] = self._of_keys(str(inside.get("backend")), inside)
        if name == "s3" or (name == "nixl" and keys.get("plugin") == "OBJ"):
            if keys.get("max_size") is not None:
                found["max_size"] = self._part(parse_size("max_size", keys["max_size"]))
        if name == "mooncake" and not self.is_backbone:
            found["global_segment_size"] = 0  # what the backbone's store lends is for all
        return found

    def _part(self, whole: int) -> int:
        """The share of a cap: 0 stays what it means, and nothing else becomes it."""
        return max(1, whole * self.weight // self.total) if whole else 0
