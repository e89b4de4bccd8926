"""Storage that is away when a reset opens it again: it is tried again until it is back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from hiradix.adapters.vllm.stores import RETRY_S
from hiradix.adapters.vllm.switch import StorageSwitch, Work
from hiradix.errors import StorageError
from tests.vllm_roles.mini_vllm import MiniVLLM, S, World
from tests.vllm_roles.test_life import request


class Server:
    """The storage of every worker; `is_away` for as long as none of them can open it. Labels of all tries."""

    def __init__(self, vllm: MiniVLLM) -> None:
        self.is_away = True
        self.labels: list[str] = []
        for rank in vllm.ranks:
            self._stop(rank.role.switch)

    def _stop(self, switch: StorageSwitch) -> None:
        whole = switch.open_storage

        def opened(name: str, keys: Mapping[str, Any], label: str) -> Any:
            self.labels.append(label)
            if self.is_away:
                raise StorageError("connection refused")
            return whole(name, keys, label)

        switch.open_storage = opened


def after_a_reset(num_workers: int = 1) -> tuple[MiniVLLM, Server, list[dict[str, bytes]]]:
    """An engine whose storage was away when its weights changed, and what is stored of the old ones."""
    store: list[dict[str, bytes]] = [{} for _ in range(num_workers)]
    vllm = MiniVLLM(World(num_workers=num_workers), store)
    vllm.add(request("old", 4))
    vllm.drain()
    server = Server(vllm)
    vllm.update_weights(preempts=True)
    settle(vllm)
    assert len(server.labels) == num_workers and not vllm.role.has_storage
    return vllm, server, store


def settle(vllm: MiniVLLM, after_s: float = 0.0) -> None:
    """Some steps, this much later."""
    vllm.now_s += after_s
    for _ in range(4):
        for rank in vllm.ranks:
            rank.follow()
        vllm.step()


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("hiradix")]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_it_is_used_again_when_it_is_back(num_workers: int, caplog: pytest.LogCaptureFixture) -> None:
    """Under names of the new weights; until then nothing is stored or asked, and requests are served."""
    caplog.set_level(logging.INFO, logger="hiradix")
    vllm, server, store = after_a_reset(num_workers)
    before = [dict(pages) for pages in store]
    for _ in range(3):
        settle(vllm, RETRY_S)
    vllm.add(request("meanwhile", 4, first=40))
    vllm.drain()
    assert not vllm.role.has_storage and store == before
    assert vllm.hit_tokens == 0 and vllm.role.prefetch_figures.asked == 4
    server.is_away = False
    settle(vllm, RETRY_S)
    assert vllm.role.has_storage and len(set(server.labels)) == 1 and server.labels[0]
    assert len(server.labels) == 5 * num_workers, "at the reset, three times in vain, and then"
    for expected in (0, 4 * S):
        vllm.index.lose_all()
        vllm.add(request(f"new{expected}", 4))
        vllm.drain()
        assert vllm.hit_tokens == expected
    assert all(len(now) == 2 * len(was) for now, was in zip(store, before, strict=True))
    lines = [line for line in told(caplog) if line.startswith("storage")]
    assert len(lines) == 2, lines
    assert "connection refused" in lines[0] and f"{RETRY_S:g} s" in lines[0] and "again" in lines[1]


def test_it_is_tried_no_more_often() -> None:
    vllm, server, _ = after_a_reset()
    settle(vllm, RETRY_S / 2)
    assert len(server.labels) == 1
    settle(vllm, RETRY_S / 2)
    assert len(server.labels) == 2
    settle(vllm)
    assert len(server.labels) == 2


def test_one_try_at_a_time_however_long_it_takes() -> None:
    vllm, server, _ = after_a_reset()
    vllm.now_s += RETRY_S
    orders = [vllm.step().storage]
    for _ in range(3):
        vllm.now_s += RETRY_S
        orders.append(vllm.step().storage)
    assert [len(each) for each in orders] == [1, 0, 0, 0] and len(vllm.ranks[0].switching) == 1
    server.is_away = False
    settle(vllm)
    assert vllm.role.has_storage


def test_one_worker_that_cannot_open_it_is_tried_with_all() -> None:
    vllm, server, _ = after_a_reset(2)
    server.is_away, last = False, vllm.ranks[1].role.switch
    whole = last.open_storage

    def fails(name: str, keys: Mapping[str, Any], label: str) -> Any:
        raise StorageError("only here")

    last.open_storage = fails
    settle(vllm, RETRY_S)
    assert vllm.ranks[0].role.has_storage and not vllm.role.has_storage
    last.open_storage = whole
    settle(vllm, RETRY_S)
    assert vllm.role.has_storage


@pytest.mark.parametrize("when", ["waiting", "trying"])
def test_a_second_reset_gives_it_other_names_again(when: str) -> None:
    """Also while workers are at it: what they then open is of no use."""
    vllm, server, _ = after_a_reset()
    if when == "trying":
        server.is_away = False
        vllm.now_s += RETRY_S
        assert vllm.step().storage
    vllm.update_weights(preempts=True)
    settle(vllm)
    if when == "waiting":
        server.is_away = False
        assert len(server.labels) == 1, "it waits for its turn"
        settle(vllm, RETRY_S)
    assert vllm.role.has_storage
    assert len(set(server.labels)) == 2 and vllm.ranks[0].storage.label == server.labels[-1]
    vllm.add(request("new", 4))
    vllm.drain()
    assert vllm.hit_tokens == 0


def test_a_detach_that_is_asked_for_ends_it() -> None:
    vllm, server, _ = after_a_reset()
    vllm.role.storage.ask(None, {})
    settle(vllm)
    server.is_away = False
    settle(vllm, RETRY_S)
    assert len(server.labels) == 1 and not vllm.role.has_storage


@pytest.mark.parametrize("is_away", [False, True])
def test_an_attach_that_is_asked_for_takes_its_place(is_away: bool) -> None:
    """At once, under the new names; what was asked for and could not be opened is tried once, as ever."""
    vllm, server, _ = after_a_reset()
    server.is_away = is_away
    vllm.role.storage.ask("other", {})
    settle(vllm)
    assert len(server.labels) == 2 and vllm.role.has_storage is not is_away
    settle(vllm, RETRY_S)
    assert len(server.labels) == 2 and len(set(server.labels)) == 1
    if not is_away:  # and it counts from then on as what there is
        server.is_away = True
        vllm.update_weights(preempts=True)
        settle(vllm)
        server.is_away = False
        settle(vllm, RETRY_S)
        assert vllm.role.has_storage and len(server.labels) == 4


def test_what_is_asked_for_is_tried_once(caplog: pytest.LogCaptureFixture) -> None:
    vllm = MiniVLLM(World(), [{}])
    server = Server(vllm)
    vllm.role.storage.ask("fake", {})
    settle(vllm)
    settle(vllm, RETRY_S)
    assert len(server.labels) == 1 and told(caplog) == ["storage: connection refused"]


class Opening:
    """A store whose opening takes until `goes_on`, on the worker's own thread."""

    def __init__(self, vllm: MiniVLLM) -> None:
        self.vllm, rank = vllm, vllm.ranks[0]
        self.begun, self.goes_on = threading.Event(), threading.Event()
        self.closed = 0
        self.threads: list[threading.Thread] = []
        whole = rank.role.switch.open_storage

        def opened(name: str, keys: Mapping[str, Any], label: str) -> Any:
            self.begun.set()
            assert self.goes_on.wait(60)
            storage = whole(name, keys, label)
            storage.close = self.close
            return storage

        rank.role.switch.open_storage, rank.role.switch.spawn = opened, self.spawn

    def close(self) -> None:
        self.closed += 1

    def spawn(self, work: Work) -> None:
        self.threads.append(threading.Thread(target=lambda: [None for _ in work], daemon=True))
        self.threads[-1].start()


def test_a_shutdown_waits_for_no_try_and_leaves_nothing_open() -> None:
    """What a try opens behind it is closed again, and attached nowhere."""
    vllm, server, _ = after_a_reset()
    server.is_away = False
    opening, role = Opening(vllm), vllm.ranks[0].role
    vllm.now_s += RETRY_S
    vllm.step()
    assert opening.begun.wait(60)
    role.close(0.0)
    opening.goes_on.set()
    opening.threads[0].join(60)
    assert not opening.threads[0].is_alive()
    assert opening.closed == 1 and role.storage is None and not role.has_storage


def test_a_store_that_cannot_be_told_of_the_pools_is_closed() -> None:
    """Whatever it raises: each of the tries would leave one open."""
    vllm, server, _ = after_a_reset()
    server.is_away, rank, closed = False, vllm.ranks[0], []
    whole = rank.role.switch.open_storage

    def opened(name: str, keys: Mapping[str, Any], label: str) -> Any:
        storage: Any = whole(name, keys, label)
        storage.close = lambda: closed.append(label)
        storage.parts[0].register = lambda memory: 1 / 0
        return storage

    rank.role.switch.open_storage = opened
    settle(vllm, RETRY_S)
    assert len(closed) == 1 and not vllm.role.has_storage
