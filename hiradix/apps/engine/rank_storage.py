"""Storage of one rank of several, opened and cleared within a deadline: the others wait, but not for ever."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from typing import NamedTuple

from hiradix.errors import CacheError, StorageError
from hiradix.prefix_cache import AttachedStorage, OpenedStorage

MAX_OPEN_S = 30.0


class Attach(NamedTuple):
    """A backend's name, its settings as text, and the policies to change."""

    name: str
    extra_config_json: str | None
    prefetch_policy: str | None
    write_policy: str | None


def open_timeout_s(rank_timeout_s: float) -> float:
    """Seconds a backend may take to open, where ranks wait for each other for `rank_timeout_s`."""
    return min(MAX_OPEN_S, rank_timeout_s / 2)


def attach_on_ranks(storage: AttachedStorage, asked: Attach, timeout_s: float) -> tuple[bool, str]:
    """Attach a backend on all ranks or none; (ok, message).

    One that is not open after `timeout_s` is refused, and closed when it opens later.
    """
    policies = asked.prefetch_policy, asked.write_policy
    answer: tuple[bool, str] | None = storage.plan(asked.name, *policies)
    if answer is not None:
        return answer
    try:
        opened = _opened(storage, asked, timeout_s)
    except CacheError as error:
        storage.attach_opened(None)
        return False, str(error)
    attached: tuple[bool, str] = storage.attach_opened(opened, *policies)
    return attached


def clear_on_ranks(storage: AttachedStorage, timeout_s: float) -> bool:
    """Delete the model's pages; False where there is no storage, or it had not done so after `timeout_s`."""
    stores = storage.storage
    if stores is None:
        return False
    done: Future[bool] = Future()

    def run() -> None:
        try:
            done.set_result(stores.clear())
        except BaseException:  # the backend's name for a failure is in its guard's log
            done.set_result(False)

    try:
        threading.Thread(target=run, name="hiradix-clear-storage", daemon=True).start()
        ok = done.result(timeout_s)
    except (NotDone, RuntimeError):  # or no thread can be started
        ok = False
    return bool(storage.cleared(ok))


def _opened(storage: AttachedStorage, asked: Attach, timeout_s: float) -> OpenedStorage:
    future: Future[OpenedStorage] = Future()

    def run() -> None:
        try:
            future.set_result(storage.open(asked.name, asked.extra_config_json))
        except BaseException as error:  # it belongs to whoever asked
            future.set_exception(error)

    failed = f"Failed to attach storage backend '{asked.name}'"
    try:
        threading.Thread(target=run, name="hiradix-open-storage", daemon=True).start()
        return future.result(timeout_s)
    except NotDone:
        future.add_done_callback(_close_late)
        raise StorageError(f"{failed}: not open within {timeout_s:g} s") from None
    except CacheError:
        raise
    except Exception as error:
        raise StorageError(f"{failed}: {type(error).__name__}: {error}") from error


def _close_late(opening: Future[OpenedStorage]) -> None:
    if opening.exception() is None:
        opening.result().storage.close()
