"""`hiradix storage ...` on servers: pages travel from a directory over Redis and S3 and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hiradix.cli import main
from hiradix.storage import StorageContext, open_storage
from tests.contracts.storage import FINGERPRINT, PAGE_BYTES, hits, keys_of, put
from tests.storage_servers.servers import ACCESS, BUCKET, PATIENT, Server

MARK = FINGERPRINT.digest()[:32]


def sets(flag: str, **keys: Any) -> list[str]:
    return [part for key, value in keys.items() for part in (flag, f"{key}={value}")]


def run(capsys: Any, *arguments: str) -> tuple[int, str]:
    status = main(["storage", *arguments])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def open_files(folder: str) -> Any:
    keys = {"min_free_space": 0, "file_storage_path": folder, "deadline_s": 30.0}
    return open_storage("file", StorageContext(FINGERPRINT, keys, PAGE_BYTES))


@pytest.fixture
def keyed(tmp_path: Path) -> list[Any]:
    (tmp_path / "k").write_bytes(bytes(range(32)))
    return [{}, {"encryption_key_file": str(tmp_path / "k")}]


@pytest.mark.parametrize("which", [0, 1], ids=["plain", "encrypted on the way"])
def test_round_trip(
    own_redis: Server, own_s3: Server, tmp_path: Path, capsys: Any, keyed: list[Any], which: int
) -> None:
    files = {"min_free_space": 0}
    store = open_files(f"{tmp_path}/a")
    put(store, keys_of(100))
    store.close()
    redis_url, redis_keys = f"redis://127.0.0.1:{own_redis.port}/0", {**PATIENT, **keyed[which]}
    s3_url = f"s3://{BUCKET}/deep/down"
    s3_keys = {"endpoint": f"http://127.0.0.1:{own_s3.port}", **ACCESS, **PATIENT, **keyed[which]}
    ends = [(f"file://{tmp_path}/{name}", files) for name in "ab"]
    hops = [ends[0], (redis_url, redis_keys), (s3_url, s3_keys), ends[1]]
    for (source, mine), (target, theirs) in zip(hops, hops[1:]):
        text = run(capsys, "copy", source, target, *sets("--set", **mine), *sets("--set-to", **theirs))
        assert text == (0, "copied 100 pages; 0 could not be read, 0 could not be written\n")
    for url, keys in hops:
        assert run(capsys, "verify", url, *sets("--set", **keys)) == (0, "100 pages are whole, 0 are not\n")
        status, text = run(capsys, "stat", url, *sets("--set", **keys))
        assert text.splitlines()[1].split() == [MARK, "100", str(100 * PAGE_BYTES)]
    last = open_files(f"{tmp_path}/b")
    assert all(hits(last, keys_of(100)))
    last.close()
    for url, keys in hops[1:3]:
        cleared = run(capsys, "clear", url, "--all", *sets("--set", **keys))
        assert cleared == (0, f"removed 100 pages of {MARK}\n")
        assert run(capsys, "stat", url, *sets("--set", **keys))[1].splitlines()[-1].split()[1] == "0"


def test_bench(own_redis: Server, own_s3: Server, capsys: Any) -> None:
    s3 = sets("--set", endpoint=f"http://127.0.0.1:{own_s3.port}", **ACCESS, **PATIENT)
    redis = sets("--set", **PATIENT)
    for url, keys in ((f"redis://127.0.0.1:{own_redis.port}/0", redis), (f"s3://{BUCKET}/x", s3)):
        status, text = run(capsys, "bench", url, *keys, "--pages", "40", "--page-bytes", "64KiB")
        rows = [line.split()[0] for line in text.splitlines()]
        assert status == 0 and rows == ["memory", "put", "get", "exists"]
        assert run(capsys, "stat", url, *keys)[1].splitlines()[-1].split()[1] == "0"


def test_unreachable_server_is_an_error(own_redis: Server, capsys: Any) -> None:
    own_redis.kill()
    status, text = run(capsys, "ls", f"redis://127.0.0.1:{own_redis.port}/0")
    assert status == 2 and "cannot use the redis server" in text


def test_stores_below_this_one_are_others(own_redis: Server, own_s3: Server, capsys: Any) -> None:
    """Their pages were listed as this one's, which no server of it finds and `clear` leaves."""
    redis_url, s3_url = f"redis://127.0.0.1:{own_redis.port}/0", f"s3://{BUCKET}/deep"
    address = {"endpoint": f"http://127.0.0.1:{own_s3.port}", **ACCESS, **PATIENT}
    for backend, keys in (
        ("redis", {"url": redis_url, "key_prefix": "deep"}),
        ("redis", {"url": redis_url, "key_prefix": "deep:down"}),
        ("s3", {"url": s3_url, **address}),
        ("s3", {"url": f"{s3_url}/down", **address}),
    ):
        store = open_storage(backend, StorageContext(FINGERPRINT, {"deadline_s": 30.0, **keys}, PAGE_BYTES))
        assert all(put(store, keys_of(3)))
        store.close()
    s3 = sets("--set", **address)
    for url, above, below in (
        (redis_url, sets("--set", key_prefix="deep"), [redis_url, *sets("--set", key_prefix="deep:down")]),
        (s3_url, s3, [f"{s3_url}/down", *s3]),
    ):
        assert run(capsys, "ls", url, *above)[1].count("\n") == 3
        assert run(capsys, "verify", url, *above) == (0, "3 pages are whole, 0 are not\n")
        assert run(capsys, "clear", url, *above, "--all") == (0, f"removed 3 pages of {MARK}\n")
        assert run(capsys, "clear", url, *above, "--all") == (0, "there were none\n")
        assert run(capsys, "verify", *below) == (0, "3 pages are whole, 0 are not\n")
