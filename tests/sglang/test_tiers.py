"""Hits of every tier inside a live SGLang server, whose answers are those of a server without a cache."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from hiradix.apps.demo.process import free_port
from hiradix.storage.backends.sglang.files import SEAL_ATTRIBUTE
from tests.sglang.conftest import DEVICE_TOKENS, LENGTH, PAGE_SIZE, WHOLE
from tests.sglang.prompts import families, prompts, tokens
from tests.sglang.server import Answer, Reference, Server
from tests.storage_servers.servers import Server as Process

PREFETCH = {"prefetch_threshold": PAGE_SIZE}


def test_hiradix_is_what_serves(ours: Server) -> None:
    assert "source=registered('hiradix') impl=HiRadixHostCache" in ours.log()


def test_a_repeated_prompt_is_found_on_the_device(ours: Server, reference: Reference) -> None:
    prompt = tokens(LENGTH, "device")
    first, again, longer = ours.ask(prompt), ours.ask(prompt), ours.ask([*prompt, *tokens(50, "more")])
    assert [a.cached for a in (first, again, longer)] == [0, WHOLE, WHOLE]
    assert again.details["device"] == WHOLE and again.tier("host") == 0
    reference.assert_same([first, again, longer])


def test_what_the_device_has_lost_comes_back_from_the_host(ours: Server, reference: Reference) -> None:
    asked = prompts(2 * DEVICE_TOKENS // LENGTH, LENGTH, "host")
    first, again = [ours.ask(p) for p in asked], [ours.ask(p) for p in asked]
    assert all(a.cached == 0 for a in first)
    assert all(a.cached == WHOLE for a in again)
    assert sum(a.tier("host") for a in again) >= WHOLE * len(asked) // 2
    reference.assert_same([*first, *again])


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[int]:
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        pytest.skip("no redis-server on this machine")
    port = free_port()
    command = (binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no")
    server = Process(command, port, tmp_path / "redis").start()
    yield port
    server.kill()


def peercache_keys() -> dict[str, object]:
    local = "127.0.0.1"
    hosts = ("local_hostname", "rdma_bind_host", "control_bind_host", "meta_bind_host")
    return {
        "backend_name": "peercache", "module_path": "peercache.store", "class_name": "PeerCacheStore",
        "discovery_addr": f"{local}:{free_port()}", "protocol": "tcp", **dict.fromkeys(hosts, local),
        "metrics_enabled": False, "disk_enabled": False, "global_segment_size": "64mb", "deadline_s": 30.0,
    }  # fmt: skip


def through_storage(server: Server, backend: str, keys: dict[str, object]) -> list[Answer]:
    """Three prompts computed, forgotten by device and host, and asked for again."""
    asked = prompts(3, LENGTH, ("storage", backend, sorted(keys)))
    extra = json.dumps(keys | PREFETCH)
    policy = {"hicache_storage_prefetch_policy": "wait_complete"}
    server.attach(backend, extra, **policy)
    first = [server.ask(p) for p in asked]
    assert all(a.cached == 0 for a in first)
    server.flush()
    again = [server.ask(p) for p in asked]
    assert [a.tier("storage") for a in again] == [WHOLE] * len(asked), [a.details for a in again]
    assert [a.tier("device") + a.tier("host") for a in again] == [0] * len(asked)
    return [*first, *again]


def test_storage_disk(ours: Server, reference: Reference, tmp_path: Path) -> None:
    keys = {"disk_storage_path": str(tmp_path / "pages"), "max_size": "16MiB"}
    answers = through_storage(ours, "disk", keys)
    assert answers[-1].details["storage_backend"] == "DiskBackend"
    reference.assert_same(answers)


def test_storage_file(ours: Server, reference: Reference, tmp_path: Path) -> None:
    reference.assert_same(through_storage(ours, "file", {"file_storage_path": str(tmp_path)}))


def test_storage_file_in_sglang_naming(ours: Server, reference: Reference, tmp_path: Path) -> None:
    keys = {"file_storage_path": str(tmp_path), "naming": "sglang"}
    reference.assert_same(through_storage(ours, "file", keys))
    files = list(tmp_path.glob("*_tiny_0_1.bin"))
    assert len(files) >= 3 * WHOLE // PAGE_SIZE


def test_storage_redis(ours: Server, reference: Reference, redis: int) -> None:
    keys = {"url": f"redis://127.0.0.1:{redis}/0", "timeout_s": 30.0, "connect_timeout_s": 30.0}
    reference.assert_same(through_storage(ours, "redis", keys))


def test_storage_of_a_third_party_as_dynamic(ours: Server, reference: Reference) -> None:
    answers = through_storage(ours, "dynamic", peercache_keys())
    assert answers[-1].details["storage_backend"] == "PeerCacheStore"
    reference.assert_same(answers)


def test_sglangs_own_file_class_as_dynamic(ours: Server, reference: Reference, tmp_path: Path) -> None:
    keys = {
        "backend_name": "own", "module_path": "sglang.srt.mem_cache.hicache_storage",
        "class_name": "HiCacheFile", "file_storage_path": str(tmp_path),
    }  # fmt: skip
    reference.assert_same(through_storage(ours, "dynamic", keys))


def damage(folder: Path) -> int:
    """Flip the numbers of all stored pages, beginning behind whatever names them. Returns the files."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 4096]
    for path in files:
        data = bytearray(path.read_bytes())
        for at in range(len(data) // 4, len(data) // 2):
            data[at] ^= 0x35
        path.write_bytes(data)
        with suppress(OSError):  # it has none, or the file system knows none: as a file that SGLang wrote
            os.removexattr(path, SEAL_ATTRIBUTE)
    return len(files)


def test_a_damaged_page_is_a_miss(ours: Server, reference: Reference, tmp_path: Path) -> None:
    answers, again = _with_damage(ours, {"file_storage_path": str(tmp_path)}, tmp_path)
    assert sum(a.tier("storage") for a in again) == 0
    reference.assert_same([*answers, *again])


def test_the_comparison_sees_a_damaged_page(ours: Server, reference: Reference, tmp_path: Path) -> None:
    """The control: a file of SGLang's, without a seal, is believed by its length, and the answers change."""
    keys = {"file_storage_path": str(tmp_path), "naming": "sglang"}
    answers, again = _with_damage(ours, keys, tmp_path)
    assert sum(a.tier("storage") for a in again) > 0
    reference.assert_same(answers)
    assert not reference.judged(again).holds


def _with_damage(server: Server, keys: dict[str, object], folder: Path) -> tuple[list[Answer], list[Answer]]:
    asked = prompts(3, LENGTH, ("damage", len(keys)))
    server.attach("file", json.dumps(keys | PREFETCH), hicache_storage_prefetch_policy="wait_complete")
    answers = [server.ask(p) for p in asked]
    server.flush()
    assert damage(folder) > 0
    return answers, [server.ask(p) for p in asked]


def test_file_backend_reuse_after_flush(ours: Server, reference: Reference, tmp_path: Path) -> None:
    """SGLang's own measure: of a prompt of 768 tokens, more than 700 come back after a flush."""
    prompt = tokens(768, "upstream's prompt")
    keys = {"file_storage_path": str(tmp_path), "hicache_storage_pass_prefix_keys": True}
    ours.attach("file", json.dumps(keys), hicache_storage_prefetch_policy="wait_complete")
    answers = [ours.ask(prompt)]
    ours.flush()
    answers.append(ours.ask(prompt))
    assert answers[1].cached > 700 and answers[1].tier("storage") > 700
    reference.assert_same(answers)


def test_fault_tolerance(ours: Server, reference: Reference, tmp_path: Path) -> None:
    """Storage that raises, lies and dawdles: every request is answered, and rightly."""
    keys = {
        "backend_name": "unreliable", "module_path": "tests.sglang.unreliable",
        "class_name": "UnreliableStore", "file_storage_path": str(tmp_path), "deadline_s": 0.2,
        "breaker_retry_s": 0.05, **PREFETCH,
    }  # fmt: skip
    asked = families(24, 4, "faults")
    reference.prepare(asked)
    ours.attach("dynamic", json.dumps(keys), hicache_storage_prefetch_policy="wait_complete")
    answers = ours.ask_all(asked, 8)
    for _ in range(2):
        ours.flush()
        answers += ours.ask_all(asked, 8)
    reference.assert_same(answers)


def test_namespaces_are_kept_apart_in_every_tier(ours: Server, reference: Reference, tmp_path: Path) -> None:
    keys = {"file_storage_path": str(tmp_path)} | PREFETCH
    ours.attach("file", json.dumps(keys), hicache_storage_prefetch_policy="wait_complete")
    prompt = tokens(LENGTH, "namespaces")
    spaces: list[dict[str, str]] = [{}, {"extra_key": "a"}, {"extra_key": "b"}, {"cache_salt": "a"}]
    answers = []
    for space in spaces:
        first, again = ours.ask(prompt, **space), ours.ask(prompt, **space)
        assert (first.cached, again.cached) == (0, WHOLE)
        answers += [first, again]
    ours.flush()
    for space in [*spaces, {"extra_key": "c"}]:
        answers.append(ours.ask(prompt, **space))
        assert answers[-1].tier("storage") == (0 if space.get("extra_key") == "c" else WHOLE)
    reference.assert_same(answers)
