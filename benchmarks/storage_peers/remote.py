"""The ways of moving pages that `bench_storage_remote.py` compares: ours, and each server's clients."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from storage_peers.systems import host_memory

from tests.storage_servers import servers

BATCH = 128
SENDER = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
data = bytes(int(sys.argv[1]))
peer, _ = server.accept()
while peer.recv(1):
    peer.sendall(data)
"""


@dataclass(frozen=True)
class Way:
    """What is timed, and what has to happen before."""

    run: Callable[[], None]
    before: Callable[[], None] = lambda: None


class Pages:
    """A host pool's memory, in pages with names."""

    def __init__(self, page_bytes: int, total_bytes: int):
        self.page_bytes, self.total_bytes = page_bytes, total_bytes
        self.cells = host_memory(total_bytes)
        self.memory = memoryview(self.cells)
        self.cells[:] = np.random.default_rng(1).integers(0, 256, total_bytes, dtype=np.uint8)
        self.views = [self.memory[at : at + page_bytes] for at in range(0, total_bytes, page_bytes)]
        rng = random.Random(page_bytes)
        self.keys = [rng.randbytes(32).hex() for _ in self.views]
        self.size = f"{page_bytes >> 10}KiB" if page_bytes < 1 << 20 else f"{page_bytes >> 20}MiB"

    def batches(self) -> Iterator[tuple[list[str], list[memoryview]]]:
        for start in range(0, len(self.keys), BATCH):
            yield self.keys[start : start + BATCH], self.views[start : start + BATCH]


def opened(name: str, pages: Pages, **keys: Any) -> Any:
    from hiradix.storage import PageFingerprint, StorageContext, open_storage

    context = StorageContext(PageFingerprint("bench"), {"deadline_s": 120.0} | keys, pages.page_bytes)
    store = open_storage(name, context)
    store.register(pages.memory)
    return store


def ours(store: Any, pages: Pages) -> tuple[Way, Way]:
    """Put and get of everything; fails when a page is missing."""

    def clear() -> None:
        assert store.clear()

    def put() -> None:
        for keys, views in pages.batches():
            assert all(store.put(keys, [[view] for view in views]))

    def get() -> None:
        for keys, views in pages.batches():
            assert all(store.get(keys, [[view] for view in views]))

    return Way(put, clear), Way(get)


@contextmanager
def tcp(pages: Pages) -> Iterator[Way]:
    command = [sys.executable, "-c", SENDER, str(pages.total_bytes)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    link = socket.create_connection(("127.0.0.1", int(process.stdout.readline())))

    def receive() -> None:
        link.sendall(b"x")
        at = 0
        while at < pages.total_bytes:
            at += link.recv_into(pages.memory[at:], min(1 << 20, pages.total_bytes - at))

    yield Way(receive)
    link.close()
    process.wait(30)


def memcpy(pages: Pages) -> Way:
    other = host_memory(pages.total_bytes)

    def copy() -> None:
        for start in range(0, pages.total_bytes, pages.page_bytes):
            end = start + pages.page_bytes
            np.copyto(other[start:end], pages.cells[start:end])

    return Way(copy)


def redis_py(port: int, pages: Pages) -> tuple[Way, Way]:
    import redis

    client = redis.Redis(port=port)

    def put() -> None:
        for keys, views in pages.batches():
            pipeline = client.pipeline(transaction=False)
            for key, view in zip(keys, views):
                pipeline.set(key, view)
            pipeline.execute()

    def get() -> None:
        for keys, views in pages.batches():
            for value, view in zip(client.mget(keys), views):
                view[:] = value

    return Way(put, lambda: client.delete(*pages.keys)), Way(get)


def redis_socket(port: int, pages: Pages) -> tuple[Way, Way]:
    """SET and GET of everything on a socket: the server's and the kernel's share of any client's time."""
    import redis

    link = socket.create_connection(("127.0.0.1", port))
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    size, count = pages.page_bytes, len(pages.keys)
    names = [b"$%d\r\nbare-%s\r\n" % (len(key) + 5, key.encode()) for key in pages.keys]
    landing = memoryview(host_memory(8 << 20))

    def receive(num_bytes: int) -> None:
        while num_bytes:
            num_bytes -= link.recv_into(landing, min(num_bytes, landing.nbytes))

    def send(at: int, stop: int) -> None:
        parts: list[memoryview] = []
        for name, view in zip(names[at:stop], pages.views[at:stop]):
            head = b"*3\r\n$3\r\nSET\r\n%s$%d\r\n" % (name, size)
            parts += [memoryview(head), view, memoryview(b"\r\n")]
        while parts:
            sent = link.sendmsg(parts)
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = parts[0][sent:]

    def put() -> None:
        answers = threading.Thread(target=receive, args=(len(b"+OK\r\n") * count,))
        answers.start()
        for at in range(0, count, 32):
            send(at, at + 32)
        answers.join()

    def get() -> None:
        reply, due = len(b"$%d\r\n" % size) + size + 2, 0
        for at in range(0, count, 32):
            requests = [b"*2\r\n$3\r\nGET\r\n" + name for name in names[at : at + 32]]
            link.sendall(b"".join(requests))
            due += len(requests)
            receive(reply * max(0, due - 16))
            due = min(due, 16)
        receive(reply * due)

    client = redis.Redis(port=port)
    return Way(put, lambda: client.delete(*["bare-" + key for key in pages.keys])), Way(get)


def boto3_way(port: int, store: Any, pages: Pages) -> tuple[Way, Way]:
    import boto3
    from botocore.config import Config

    names = {"aws_access_key_id": "access_key_id", "aws_secret_access_key": "secret_access_key"}
    client = boto3.client(
        "s3", endpoint_url=f"http://127.0.0.1:{port}", region_name=servers.ACCESS["region"],
        config=Config(max_pool_connections=16, request_checksum_calculation="when_required",
                      response_checksum_validation="when_required"),
        **{theirs: servers.ACCESS[mine] for theirs, mine in names.items()},
    )  # fmt: skip
    threads = ThreadPoolExecutor(16)

    def put() -> None:
        def one(key: str, view: memoryview) -> None:
            client.put_object(Bucket=servers.BUCKET, Key="boto3/" + key, Body=bytes(view))

        list(threads.map(one, pages.keys, pages.views))

    def get() -> None:
        def one(key: str, view: memoryview) -> None:
            view[:] = client.get_object(Bucket=servers.BUCKET, Key="boto3/" + key)["Body"].read()

        list(threads.map(one, pages.keys, pages.views))

    return Way(put, lambda: forget(store, "boto3/")), Way(get)


def obstore_way(store: Any, pages: Pages) -> tuple[Way, Way]:
    """Requests of the library that `store` sends, and nothing else."""
    import obstore

    client, threads = _innermost(store)._client, ThreadPoolExecutor(16)

    def put() -> None:
        def one(key: str, view: memoryview) -> None:
            obstore.put(client, "bare/" + key, view, use_multipart=False)

        list(threads.map(one, pages.keys, pages.views))

    def get() -> None:
        list(threads.map(lambda key: len(obstore.get(client, "bare/" + key).bytes()), pages.keys))

    return Way(put, lambda: forget(store, "ours/bare/")), Way(get)


def forget(store: Any, prefix: str) -> None:
    """Delete the bucket's objects below `prefix`."""
    import obstore
    from obstore.store import S3Store

    config = _innermost(store).config
    bucket = S3Store(servers.BUCKET, client_options={"allow_http": True}, **config.settings)
    for part in obstore.list(bucket, prefix):
        obstore.delete(bucket, [entry["path"] for entry in part])


def mooncake_way(store: Any, pages: Pages) -> tuple[Way, Way]:
    """Calls of the library that `store` makes, on the same registered memory, and nothing else."""
    library = _innermost(store)._store

    def move(call: Callable[..., list[int]], expected: int) -> None:
        for keys, views in pages.batches():
            addresses = [np.frombuffer(view, np.uint8).ctypes.data for view in views]
            codes = call(["bare-" + key for key in keys], addresses, [view.nbytes for view in views])
            assert all(code == expected for code in codes), codes

    def put() -> None:
        move(library.batch_put_from, 0)

    def clear() -> None:
        library.remove_by_regex("^bare-", True)

    return Way(put, clear), Way(lambda: move(library.batch_get_into, pages.page_bytes))


def checked(pages: Pages, ways: tuple[Way, Way]) -> tuple[Way, Way]:
    """Put and get of a library with a checksum of each page before or after, and nothing else of ours."""
    from hiradix.storage.kit.seal import CHECKSUMS, DEFAULT_ALGORITHM

    put, get = ways

    def look() -> None:
        for view in pages.views:
            CHECKSUMS[DEFAULT_ALGORITHM]([view])

    def put_checked() -> None:
        look()
        put.run()

    def get_checked() -> None:
        get.run()
        look()

    return Way(put_checked, put.before), Way(get_checked, get.before)


def _innermost(store: Any) -> Any:
    backend = store.backend
    while hasattr(backend, "inner"):
        backend = backend.inner
    return backend
