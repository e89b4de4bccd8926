"""Storage below the host tier: opened, attached to a cache and detached from it while that serves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat

from hiradix.cache import HierarchicalCache
from hiradix.config import PREFETCH_POLICIES, WRITE_POLICIES, ExtraConfig, parse_extra_config
from hiradix.errors import CacheError, ConfigError, Misuse, StorageError
from hiradix.intents import TIER_NAMES
from hiradix.policy.prefetch_policy import PrefetchLimits, PrefetchPolicy
from hiradix.policy.write_policy import WritePolicy
from hiradix.storage import Stores
from hiradix.storage.wrappers.quota import SHOWN_CHARS, account_name

DETACH_TIMEOUT_S = 10.0

StorageFactory = Callable[[str, ExtraConfig], Stores]  # backend name, its configuration


@dataclass(frozen=True)
class OpenedStorage:
    """A backend that is open and not attached yet, and the configuration it came with."""

    name: str
    extra: ExtraConfig
    storage: Stores


class AttachedStorage:
    """The storage of a cache, if there is one now, and the steps by which another comes.

    factory: makes a storage backend by name. storage: the attached backend, the cache's own; its methods may
    be called from any thread. name: its. served_model_name: by which stored pages are named, where that is
    known. All methods but `open` are the scheduler thread's.
    """

    def __init__(self, cache: HierarchicalCache, factory: StorageFactory):
        controller, prefetcher, write_through = cache.controller, cache.prefetcher, cache.write_through
        if controller is None or prefetcher is None or write_through is None:
            raise Misuse("storage needs a host tier")
        self._cache, self._controller = cache, controller
        self._prefetcher, self._write_through = prefetcher, write_through
        self.factory = factory
        self.storage: Stores | None = None
        self.name: str | None = None
        self.served_model_name: str | None = None

    def attach_by_name(
        self, name: str, extra_config_json: str | None = None, served_model_name: str | None = None,
        prefetch: str | None = None, write: str | None = None,
    ) -> tuple[bool, str]:  # fmt: skip
        """Attach backend `name`; (ok, message) in upstream's words. Nothing changes unless ok.

        Opens it here, on the scheduler thread: while serving, use the three calls it is made of.
        """
        known = self.served_model_name
        if served_model_name is not None and known is not None and served_model_name != known:
            return False, (
                f"served_model_name: {served_model_name!r} is not what pages are named by here, {known!r}: "
                "start with another name for another"
            )
        answer = self.plan(name, prefetch, write)
        if answer is not None:
            return answer
        try:
            opened = self.open(name, extra_config_json)
        except CacheError as error:
            self.attach_opened(None)
            return False, str(error)
        return self.attach_opened(opened, prefetch, write)

    def plan(self, name: str, prefetch: str | None, write: str | None) -> tuple[bool, str] | None:
        """The answer to an attach that has nothing to open (policies are changed then), else None."""
        for flag, value, known in (
            ("hicache_storage_prefetch_policy", prefetch, PREFETCH_POLICIES),
            ("hicache_write_policy", write, WRITE_POLICIES),
        ):
            if value is not None and value not in known:
                return False, f"Invalid {flag}: {value!r}. Expected one of {sorted(known)}."
        if not self._controller.storage_attached:
            return None
        if name != self.name:
            return False, (
                f"HiCache storage backend is already enabled with backend '{self.name}'. "
                f"Cannot attach different backend '{name}'. Detach first."
            )
        self._set_policies(prefetch, write, None)
        return True, "HiCache storage backend already enabled with same backend; policies updated."

    def open(self, name: str, extra_config_json: str | None) -> OpenedStorage:
        """Open a backend to be attached, and tell it of the host pools' memory.

        The caller's to close until it is attached. Any thread; may take its time. StorageError has the answer
        for whoever asked: also that the store does not answer, unless the settings do not require it.
        """
        try:
            extra = parse_extra_config(extra_config_json).when_serving()
        except ConfigError as error:
            raise StorageError(f"Failed to parse storage_backend_extra_config_json: {error}") from error
        try:
            storage = self.factory(name, extra)
        except (CacheError, OSError) as error:
            raise StorageError(f"Failed to attach storage backend '{name}': {error}") from error
        self._controller.introduce(storage)
        return OpenedStorage(name, extra, storage)

    def attach_opened(
        self, opened: OpenedStorage | None, prefetch: str | None = None, write: str | None = None
    ) -> tuple[bool, str]:
        """Attach what `open` gave, on all ranks or none; (ok, message). It is the cache's if ok.

        None: this rank has nothing to attach, and the others are waiting to know.
        """
        try:
            self._cache.attach_storage(None if opened is None else opened.storage)
        except CacheError as error:
            if opened is None:
                return False, str(error)
            opened.storage.close()
            return False, f"Failed to attach storage backend '{opened.name}': {error}"
        if opened is None:
            raise Misuse("nothing was attached, and no rank has said so")
        self.storage, self.name = opened.storage, opened.name
        self._set_policies(prefetch, write, opened.extra)
        return True, "Attached HiCache storage backend successfully."

    def attach(self, name: str, extra: ExtraConfig) -> None:
        """Attach backend `name`, on all ranks; raises ConfigError or StorageError with nothing changed.

        A store that does not answer is joined later, unless `extra` says that it is required.
        """
        storage, failure = None, None
        try:
            storage = self.factory(name, extra)
        except Exception as error:  # raised below, after the other ranks know that this one has none
            failure = error
        try:
            self._cache.attach_storage(storage)
        except CacheError as error:
            if storage is not None:
                storage.close()
            raise (failure or error) from None
        self.storage, self.name = storage, name

    def detach(self) -> tuple[bool, str]:
        """Detach and close the backend; (ok, message) in upstream's words.

        Idempotent; a hung worker leaves it attached, to be tried again.
        """
        try:
            storage = self.release(DETACH_TIMEOUT_S)
        except CacheError as error:
            return False, f"Failed to detach HiCache storage backend: {error}"
        if storage is not None:
            storage.close()
        return True, "Detached HiCache storage backend successfully."

    def release(self, timeout_s: SupportsFloat = 0.0) -> Stores | None:
        """Let go of the backend: the caller's to close, or None if there was none.

        Raises StorageError while a job of it still runs after `timeout_s`; it takes no new ones, so call
        again. With 0 this never waits.
        """
        storage = self.storage
        if storage is not None:
            self._cache.detach_storage(float(timeout_s))
            self.storage = self.name = None
        return storage

    def add_other(self, store: str, opened: OpenedStorage) -> None:
        """Have what `open` gave as a store of that name beside the attached one, to bring pages to. It is the
        cache's from now on. StorageError, having closed it: the name is taken, or is a tier's."""
        try:
            if store in TIER_NAMES:
                raise StorageError(f"store: {store!r} is a tier, name it otherwise")
            self._controller.open_other(store, opened.storage)
        except CacheError:
            opened.storage.close()
            raise

    def remove_other(self, store: str) -> bool:
        """Close such a store; False: there is none of that name."""
        storage = self._controller.close_other(store)
        if storage is not None:
            storage.close()
        return storage is not None

    def tenant_bytes(self, tenants: Sequence[str]) -> dict[str, int]:
        """Bytes of these tenants' pages in storage, as of its last call: of those with the most, where an
        account is kept. Waits for nothing."""
        figures = {} if self.storage is None else self.storage.stats()
        found: dict[str, int] = {}
        for tenant in tenants:
            name = f"quota_used_bytes_{account_name(tenant)[:SHOWN_CHARS]}"
            known = [value for figure, value in figures.items() if figure.endswith(name)]
            if known:
                found[tenant] = int(sum(known))
        return found

    def clear(self) -> bool:
        """Delete this model's pages from storage. False when there is no storage or it failed on any rank."""
        return self.storage is not None and self.cleared(self.storage.clear())

    def cleared(self, ok: Any) -> bool:
        """Storage was cleared, `ok` without a fault: what is in use is offered again. `ok` of all ranks."""
        on_all = self._cache.settle(bool(ok))
        self._cache.tree.forget_stored()
        return on_all

    def close(self) -> None:
        """Close the backend of a cache that has ended."""
        for other in self._controller.other_stores:
            self.remove_other(other)
        if self.storage is not None:
            self.storage.close()
            self.storage = self.name = None

    def _set_policies(self, prefetch: str | None, write: str | None, extra: ExtraConfig | None) -> None:
        old = self._prefetcher.policy
        limits = old.limits if extra is None else prefetch_limits(self._cache.tree.page_size, extra)
        self._prefetcher.policy = PrefetchPolicy.from_name(prefetch or old.name, limits)
        if write is not None:
            self._write_through.policy = WritePolicy.from_name(write)


def prefetch_limits(page_size: int, extra: ExtraConfig) -> PrefetchLimits:
    """The limits the extra config asks for."""
    return PrefetchLimits(
        page_size=page_size,
        threshold_tokens=extra.prefetch_threshold,
        timeout_base_s=extra.prefetch_timeout_base,
        timeout_s_per_ki_token=extra.prefetch_timeout_per_ki_token,
    )
