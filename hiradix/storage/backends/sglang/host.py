"""The `dynamic` backend: hosts storage classes written for SGLang, unmodified.

A class gets SGLang's config by keyword and is called as SGLang's controller would: `batch_get` and
`batch_set` with flat byte tensors, or with `interface_v1` their zero-copy forms on registered memory. Its
answers are not trusted: anything that is not a whole page is a miss. Such classes have no way to delete one
page, so a deleted key is only remembered here; and `clear` is the class's own, which may take other models'
pages.
"""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from hiradix.errors import ConfigError, StorageError
from hiradix.settings import REQUIRED, Setting, Type
from hiradix.storage.backends.sglang.base import base_module, inherits, is_inherited, make_config
from hiradix.storage.backends.sglang.pool import ArenaPool
from hiradix.storage.batch import Batch
from hiradix.storage.kit.call_threads import gather, scatter
from hiradix.storage.kit.options import flag
from hiradix.storage.kit.seal import SEAL_BYTES
from hiradix.storage.protocol import Page, StorageBackend, StorageContext, Traits, check_keys, page_bytes

ARENA_PAGES = 128
MAX_FORGOTTEN = 1 << 20


def load_class(name: str, module_path: str, class_name: str) -> Any:
    """The class, checked. Raises ConfigError with SGLang's words."""
    try:
        base_module()
        module = importlib.import_module(module_path)
    except ImportError as error:
        raise ConfigError(f"Failed to import backend '{name}' from '{module_path}': {error}") from error
    found = getattr(module, class_name, None)
    if found is None:
        raise ConfigError(f"Class '{class_name}' not found in module '{module_path}'")
    if not isinstance(found, type) or not inherits(found):
        raise ConfigError(f"Backend class {class_name} must inherit from HiCacheStorage")
    return found


class SglangBackend(StorageBackend):
    """A HiCacheStorage as a backend; subclasses say which. Thread-safe as far as the class is.

    build: makes the object from SGLang's config and a pool. v1: call the zero-copy forms. latent: the class
    is told of a latent attention model then, whose pages are one piece each; else of one it copies pages of.
    """

    def __init__(
        self, context: StorageContext, build: Callable[[Any, ArenaPool], Any], v1: bool, latent: bool = True
    ):
        slot_bytes = context.page_bytes + SEAL_BYTES
        layout = "page_first" if latent else "layer_first"
        num_slots = ARENA_PAGES if v1 else 1
        self._pool = ArenaPool(num_slots, slot_bytes, context.fingerprint.page_size, layout)
        self._v1 = v1
        self._forgotten: set[str] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._store = build(make_config(_config(context, v1 and latent)), self._pool)
        try:
            self._store.register_mem_pool_host(self._pool)
            getattr(self._store, "on_host_pools_registered", lambda: None)()
            self._wants_info = _takes(self._store.batch_exists, "extra_info")
        except BaseException:
            with suppress(Exception):  # the first fault is to be told
                self.close()
            raise
        self.traits = Traits(deletes=False)

    @property
    def hosted(self) -> Any:
        """The HiCacheStorage object itself."""
        return self._store

    # -- the protocol -------------------------------------------------------------------

    def exists(self, batch: Batch) -> int:
        self._check(batch)
        known = batch[: next((i for i, key in enumerate(batch) if key in self._forgotten), len(batch))]
        if not known:
            return 0
        extra = {"extra_info": _info(known)} if self._wants_info else {}
        found: int = self._store.batch_exists(list(known), **extra)
        return found

    def get(self, batch: Batch, into: Sequence[Page]) -> list[bool]:
        self._check(batch)
        move = self._get_v1 if self._v1 else self._get_v0
        wanted = [index for index, key in enumerate(batch) if key not in self._forgotten]
        ok = [False] * len(batch)
        for index, good in zip(wanted, move(batch.pick(wanted), [into[i] for i in wanted])):
            ok[index] = good
        return ok

    def put(self, batch: Batch, pages: Sequence[Page]) -> list[bool]:
        self._check(batch)
        ok = (self._put_v1 if self._v1 else self._put_v0)(batch, pages)
        with self._lock:
            self._forgotten.difference_update(key for key, stored in zip(batch, ok) if stored)
        return ok

    def delete(self, keys: Sequence[str]) -> None:
        self._check(keys)
        with self._lock:
            if len(self._forgotten) + len(keys) > MAX_FORGOTTEN:
                raise StorageError(f"this class cannot delete, and {MAX_FORGOTTEN} keys are remembered")
            self._forgotten.update(keys)

    def clear(self) -> None:
        self._check(())
        name = type(self._store).__name__
        if is_inherited(type(self._store), "clear"):
            raise StorageError(f"{name} cannot clear")
        if self._store.clear() is False:
            raise StorageError(f"{name}.clear failed")
        with self._lock:
            self._forgotten.clear()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            getattr(self._store, "close", lambda: None)()

    def stats(self) -> Mapping[str, float]:
        return {"forgotten_keys": len(self._forgotten)}

    # -- inside -------------------------------------------------------------------------

    def _check(self, keys: Sequence[str]) -> None:
        if self._closed:
            raise StorageError("storage backend is closed")
        check_keys(keys)

    def _get_v0(self, batch: Batch, into: Sequence[Page]) -> list[bool]:
        targets = [_blank(page_bytes(page)) for page in into]
        try:
            found = self._store.batch_get(list(batch), targets) if batch else []
        except Exception:  # one bad page may have raised for all
            found = [self._get_one(key, target) for key, target in zip(batch, targets)]
        return [
            _taken(one, target, page) for one, target, page in zip(_per_page(found, targets), targets, into)
        ]

    def _get_one(self, key: str, target: Any) -> Any:
        try:
            return self._store.get(key, target)
        except Exception:  # of this page only
            return None

    def _put_v0(self, batch: Batch, pages: Sequence[Page]) -> list[bool]:
        values = [_filled(page) for page in pages]
        if not batch or _is_yes(self._store.batch_set(list(batch), values)):
            return [True] * len(batch)
        return [_is_yes(self._store.set(key, value)) for key, value in zip(batch, values)]

    def _get_v1(self, batch: Batch, into: Sequence[Page]) -> list[bool]:
        def move(part: Batch, pages: Sequence[Page], slots: list[int]) -> list[bool]:
            found = self._store.batch_get_v1(list(part), self._pool.indices(slots), _info(part))
            ok = _flags(found, part)
            for slot, page, good in zip(slots, pages, ok):
                if good:
                    self._pool.empty(slot, page)
            return ok

        return self._in_pieces(batch, into, move)

    def _put_v1(self, batch: Batch, pages: Sequence[Page]) -> list[bool]:
        def move(part: Batch, pages: Sequence[Page], slots: list[int]) -> list[bool]:
            for slot, page in zip(slots, pages):
                self._pool.fill(slot, page)
            return _flags(self._store.batch_set_v1(list(part), self._pool.indices(slots), _info(part)), part)

        return self._in_pieces(batch, pages, move)

    def _in_pieces(self, batch: Batch, pages: Sequence[Page], move: _Move) -> list[bool]:
        ok: list[bool] = []
        while len(ok) < len(batch):
            rest = pages[len(ok) :]
            with self._pool.lease([page_bytes(page) for page in rest]) as slots:
                ok += move(batch[len(ok) : len(ok) + len(slots)], rest[: len(slots)], slots)
        return ok


_Move = Callable[[Batch, Sequence[Page], list[int]], list[bool]]


def _info(batch: Batch) -> Any:
    """SGLang's extra info of a call: the keys in front of them, where the chain is known."""
    return base_module().HiCacheStorageExtraInfo(prefix_keys=list(batch.before or ()) or None)


DYNAMIC_SETTINGS = (
    Setting("backend_name", Type.TEXT, REQUIRED, "a name for the class, as for SGLang"),
    Setting("module_path", Type.TEXT, REQUIRED, "the module of the class, as for SGLang"),
    Setting("class_name", Type.TEXT, REQUIRED, "the class, as for SGLang; it gets all other keys"),
    Setting(
        "interface_v1", Type.BOOL, False,
        "call `batch_get_v1` and `batch_set_v1`, on registered memory, in place of flat tensors",
    ),
)  # fmt: skip
"""Keys of the `dynamic` backend. None may come over HTTP: they name code that is run."""


class DynamicBackend(SglangBackend):
    """`dynamic`: the class that `module_path` and `class_name` name, made as SGLang makes it."""

    def __init__(self, context: StorageContext):
        keys = context.extra_config
        for field in (one.name for one in DYNAMIC_SETTINGS if one.default is REQUIRED):
            if not isinstance(keys.get(field), str) or not keys[field]:
                raise ConfigError(
                    f"{flag(field)}: Missing required field '{field}' in backend config for 'dynamic' backend"
                )
        cls = load_class(keys["backend_name"], keys["module_path"], keys["class_name"])
        super().__init__(context, lambda config, pool: cls(config, {}), bool(keys.get("interface_v1")))


def _config(context: StorageContext, latent: bool) -> dict[str, Any]:
    """Keys and pages are told apart by fingerprint already, so a zero-copy class sees rank 0 of 1."""
    mark = context.fingerprint
    ranks = {} if latent else {"tp_rank": mark.tp_rank, "tp_size": mark.tp_size,
                           "pp_rank": mark.pp_rank, "pp_size": mark.pp_size}  # fmt: skip
    return {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": latent, "enable_storage_metrics": False, "is_page_first_layout": True,
        "model_name": mark.model_id, "extra_config": dict(context.extra_config), **ranks,
    }  # fmt: skip


def _takes(call: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(call).parameters.values()
    return any(entry.name == name or entry.kind is entry.VAR_KEYWORD for entry in parameters)


def _blank(num_bytes: int) -> Any:
    import torch

    return torch.empty(num_bytes, dtype=torch.uint8)


def _filled(page: Page) -> Any:
    tensor = _blank(page_bytes(page))
    gather(page, memoryview(tensor.numpy()))
    return tensor


def _per_page(found: Any, targets: Sequence[Any]) -> list[Any]:
    """`batch_get`'s answer page by page; a number is how many leading pages are in their targets."""
    if isinstance(found, int | np.integer) and not isinstance(found, bool):
        return [target if index < found else None for index, target in enumerate(targets)]
    listed = list(found) if isinstance(found, list | tuple) else []
    return (listed + [None] * len(targets))[: len(targets)]


def _taken(found: Any, target: Any, page: Page) -> bool:
    """Copy a tensor that a class returned into the page, when it has exactly the page's bytes."""
    import torch

    if not isinstance(found, torch.Tensor) or found.numel() * found.element_size() != target.numel():
        return False
    flat = found.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    scatter(flat.numpy().data, page)
    return True


def _flags(answer: Any, keys: Sequence[str]) -> list[bool]:
    """One flag per key; what a class leaves out is False."""
    return [_is_yes(ok) for ok in (_listed(answer) + [False] * len(keys))[: len(keys)]]


def _listed(answer: Any) -> list[Any]:
    """A list, a tuple, or an array of any kind as a list; of all else nothing."""
    plain = answer.tolist() if hasattr(answer, "tolist") else answer
    return list(plain) if isinstance(plain, list | tuple) else []


def _is_yes(answer: Any) -> bool:
    """Whether it is true, or 1: numbers below are how libraries name their errors."""
    return isinstance(answer, int | np.bool_ | np.integer) and bool(answer == 1)
