"""Whoever has the admin key, and what he can do with it: hostile attach bodies against a live engine.

Canary files, folders, modules and servers lie beside what the rules permit. Nothing of them may be opened,
made, imported or spoken to, and no answer may have a word of them. HIRADIX_ATTACK_SECONDS=7200 goes on for
two hours with fresh seeds; HIRADIX_ATTACK_SEED=N repeats one.
"""

from __future__ import annotations

import json
import logging
import os
import random
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from hiradix.storage.attach.tables import BACKEND_SETTINGS, CACHE_SETTINGS, COMMON_SETTINGS, PERMITTABLE
from tests.e2e.tiny_model import write_tiny_model
from tests.server.test_real_engine import ADMIN, STORAGE, flags, real_application

CANARY = "kanarienvogel"
HAS_REDIS = find_spec("redis") is not None  # redis and valkey cannot be attached without their client
SECONDS = float(os.environ.get("HIRADIX_ATTACK_SECONDS", "0"))
NUM_BODIES = 400
BACKEND, EXTRA = "hicache_storage_backend", "hicache_storage_backend_extra_config_json"
SECRET = "sesam-oeffne-dich"


class Listener(socketserver.ThreadingTCPServer):
    """A server on a free port of this machine that counts who comes, and answers in RESP and in HTTP."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, admits: bool):
        super().__init__(("127.0.0.1", 0), _Conversation)
        self.admits, self.num_came = admits, 0
        self.port: int = self.server_address[1]
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def end(self) -> None:
        self.shutdown()
        self.server_close()


class _Conversation(socketserver.StreamRequestHandler):
    timeout = 2.0
    server: Listener

    def handle(self) -> None:
        self.server.num_came += 1
        try:
            while line := self.rfile.readline(65536):
                if line.startswith(b"*"):
                    words = []
                    for _ in range(int(line[1:])):
                        words.append(self.rfile.read(int(self.rfile.readline()[1:]) + 2)[:-2])
                    self.wfile.write(self._resp(words))
                elif line == b"\r\n":
                    body = f"<Error><Message>{CANARY} of another server</Message></Error>".encode()
                    head = b"HTTP/1.1 403 Forbidden\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(
                        body
                    )
                    self.wfile.write(head + body)
                    return
        except (OSError, ValueError):
            pass

    def _resp(self, words: list[bytes]) -> bytes:
        name = words[0].upper()
        if not self.server.admits or name == b"AUTH":
            return f"-WRONGPASS {CANARY} of another server\r\n".encode()
        return {b"PING": b"+PONG\r\n", b"INFO": b"$12\r\nmaxmemory:0\n\r\n"}.get(name, b"+OK\r\n")


@dataclass
class World:
    """What is permitted and what must not be touched."""

    folder: Path
    allowed: Listener
    trap: Listener
    touched: list[str] = field(default_factory=list)
    is_watching: bool = False

    @property
    def kv(self) -> Path:
        return self.folder / "kv"

    @property
    def traps(self) -> Path:
        return self.folder / "traps"

    def prepare(self) -> None:
        for folder in (self.kv, self.traps):
            folder.mkdir()
        for name in ("passwd", "key.json", "key.toml", "key.yaml", "key"):
            (self.traps / name).write_text(f"{CANARY}:x:0:0\n[{CANARY}\n{CANARY}\n")
        (self.traps / f"{CANARY}_module.py").write_text("class Store: ...\n")
        (self.kv / "out").symlink_to(self.traps)
        (self.kv / "file").symlink_to(self.traps / "passwd")
        sys.addaudithook(self._saw)

    def _saw(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_watching:
            return
        if event in ("open", "os.mkdir", "os.scandir", "os.rename", "os.remove", "import"):
            if any(CANARY in told or str(self.traps) in told for told in map(_text, arguments[:2])):
                self.touched.append(f"{event} {arguments[:2]}")
        elif event == "socket.connect" and isinstance(arguments[1], tuple):
            if arguments[1][1] not in (self.allowed.port, 0):
                self.touched.append(f"{event} {arguments[1]}")
        elif event == "socket.getaddrinfo" and arguments[0] not in (
            "127.0.0.1",
            "localhost",
            b"127.0.0.1",
            None,
        ):
            self.touched.append(f"{event} {arguments[0]!r}")
        elif event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"):
            self.touched.append(event)

    def check(self, what: object) -> None:
        assert not self.touched and not self.trap.num_came, (what, self.touched, self.trap.num_came)
        names = {path.name for path in self.traps.iterdir()}
        assert names == {"passwd", "key.json", "key.toml", "key.yaml", "key", f"{CANARY}_module.py"}, what


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return str(value) if isinstance(value, str | os.PathLike) else ""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("attack"), Listener(True), Listener(False))
    made.prepare()
    yield made
    made.is_watching = False
    made.allowed.end()
    made.trap.end()


def rules_of(world: World) -> list[str]:
    host = f"host=127.0.0.1:{world.allowed.port}"
    prepared = {"backend": "file", "file_storage_path": str(world.kv / "prepared")}
    texts = [
        f"backend=disk,path={world.kv}",
        f"backend=file,path={world.kv}",
        f"backend=redis,{host},path={world.kv}",
        f"backend=valkey,{host}",
        f"backend=s3,{host}",
        "backend=tier",
        f"backend=nixl,path={world.kv}",
    ]
    found = ["--attachable", f"cold={json.dumps(prepared)}"]
    for text in texts:
        found += ["--attach-allow", text]
    return found


@contextmanager
def attacked(model: Path, *more: str) -> Iterator[TestClient]:
    with real_application(flags(model, *more)) as app:
        http = TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)
        http.headers = ADMIN
        yield http


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


# -- bodies -----------------------------------------------------------------------------


class Attacker:
    """Makes bodies, hostile in at least one thing, out of a seed."""

    def __init__(self, world: World, seed: int):
        self.world, self.random = world, random.Random(seed)

    def body(self) -> dict[str, Any]:
        chance = self.random.random()
        if chance < 0.06:
            return {BACKEND: self.backend(), EXTRA: self.at_file()}
        if chance < 0.12:
            return {BACKEND: self.backend(), EXTRA: self.random.choice(self.broken_texts())}
        if chance < 0.18:
            return {
                "name": self.random.choice([self.path(), "cold ", "../cold", CANARY, 3, None, "@cold", ""])
            }
        if chance < 0.3:
            return self.to_the_store()
        backend = self.backend()
        body: dict[str, Any] = {BACKEND: backend, EXTRA: json.dumps(self.keys(backend, 0))}
        if self.random.random() < 0.1:
            body[self.random.choice(["name", "module_path", "x", "hicache_write_policy"])] = self.value("url")
        return body

    def to_the_store(self) -> dict[str, Any]:
        """Of what is permitted, with one setting by which it fails later, where others' texts are at hand."""
        backend = self.random.choice(["redis", "valkey", "s3", "disk", "file"])
        own = {"redis": ["password", "sentinel_password", "username", "key_prefix"], "s3": ["session_token"]}
        name = self.random.choice([*own.get(backend, []), "max_size", "deadline_s", "compression", "ttl_s"])
        is_secret = name in ("password", "sentinel_password", "session_token")
        value = self.random.choice(
            [SECRET if is_secret else "loud", CANARY, "'; DROP", 0, -1, "1 KiB", self.world.trap.port]
        )
        return {BACKEND: backend, EXTRA: json.dumps({**self.good(backend), name: value})}

    def backend(self) -> str:
        known = [*PERMITTABLE, "dynamic", "hf3fs", "seaweedfs", "aibrix", "eic"]
        odd = [
            f"{CANARY}_module:Store",
            "../disk",
            "disk ",
            "DISK",
            f"{self.world.traps}/key",
            "disk\n",
            "\u0130",
        ]
        return self.random.choice([*known, *known, *odd])

    def keys(self, backend: str, depth: int) -> dict[str, Any]:
        """A good beginning, where there is one, and hostile things beside it."""
        found = self.good(backend) if self.random.random() < 0.7 else {}
        names = [
            *COMMON_SETTINGS,
            *BACKEND_SETTINGS.get(backend, ()),
            *(CACHE_SETTINGS if depth == 0 else ()),
            "module_path",
            "class_name",
            "backend_name",
            "password_env",
            "proxy_url",
            "aws_endpoint",
            "config_file",
            "path",
            CANARY,
        ]
        for _ in range(self.random.randint(1, 3)):
            name = self.random.choice(names)
            found[name] = self.value(name)
        if backend in ("tier",) and depth < 3:
            for half in ("upper", "lower"):
                inside = self.backend()
                found.setdefault(half, {"backend": inside, **self.keys(inside, depth + 1)})
        return found

    def good(self, backend: str) -> dict[str, Any]:
        port = self.world.allowed.port
        return {
            "disk": {"disk_storage_path": str(self.world.kv / "d"), "max_size": "32MiB"},
            "file": {"file_storage_path": str(self.world.kv / "f"), "max_size": "32MiB"},
            "redis": {"url": f"redis://127.0.0.1:{port}"},
            "valkey": {"url": f"redis://127.0.0.1:{port}"},
            "s3": {"url": "s3://bucket/x", "endpoint": f"http://127.0.0.1:{port}", "access_key_id": "a",
                   "secret_access_key": SECRET},
            "dynamic": {"backend_name": "x", "module_path": f"{CANARY}_module", "class_name": "Store"},
        }.get(backend, {})  # fmt: skip

    def value(self, name: str) -> Any:
        pick = self.random.random()
        if name in ("upper", "lower") and pick < 0.7:
            inside = self.backend()
            return {"backend": inside, **self.keys(inside, 3)}
        if "file" in name or "path" in name or pick < 0.3:
            return self.random.choice([self.path(), self.path(), [self.path()], {"path": self.path()}])
        if pick < 0.7:
            return self.address()
        return self.random.choice(
            [
                {"env": "HOME"},
                {"proxy_url": self.address()},
                {"endpoint": self.address()},
                "@" + self.path(),
                10**30,
                -1,
                True,
                False,
                1e400,
                "$HOME",
                "${HOME}",
                "x" * 5000,
                [1] * 50,
                "\ud800",
                "\0",
                f"{CANARY}_module:Store",
            ]
        )

    def path(self) -> str:
        traps, kv = self.world.traps, self.world.kv
        return self.random.choice(
            [
                f"{traps}/passwd",
                f"{traps}/key.json",
                f"{traps}/new",
                f"{kv}/../traps/new",
                f"{kv}/out/new",
                f"{kv}/file",
                f"{kv}/out",
                f"/proc/self/root{traps}/new",
                f"{kv}//./../traps",
                f"file://{traps}/passwd",
                f"{kv}-2",
                f"{kv}/x/../../traps/passwd",
                os.path.relpath(traps),
                f"{traps}/key.toml",
                f"{traps}/key",
                f"{traps}\0{kv}",
                "/etc/passwd",
                "/proc/self/environ",
                "~/.ssh/id_rsa",
                "~root",
                "/",
                "",
                ".",
            ]
        )

    def address(self) -> str:
        bad, good = self.world.trap.port, self.world.allowed.port
        scheme = self.random.choice(
            ["redis", "rediss", "http", "https", "s3", "unix", "etcd", "file", "gopher"]
        )
        rest = self.random.choice(
            [
                f"127.0.0.1:{bad}",
                f"localhost:{bad}",
                f"127.1:{bad}",
                f"2130706433:{bad}",
                f"0x7f.0.0.1:{bad}",
                f"127.0.0.1:{good}@127.0.0.1:{bad}",
                f"127.0.0.1:{bad}#@127.0.0.1:{good}",
                f"127.0.0.1:{bad}/?x=127.0.0.1:{good}",
                f"127.0.0.1:{good}/0?host=127.0.0.1&port={bad}",
                f"/0?host=127.0.0.1&port={bad}",
                f"[::ffff:127.0.0.1]:{bad}",
                f"127.0.0.1:{good}\\@127.0.0.1:{bad}",
                f"127.0.0.1:{good}%40127.0.0.1:{bad}",
                f"127.0.0.1:{bad} 127.0.0.1:{good}",
                f"u:p@127.0.0.1:{bad}",
                f"127.0.0.1:{good},127.0.0.1:{bad}",
                "169.254.169.254/latest/meta-data",
                f"0:{bad}",
                f"127.0.0.1:{good}\n127.0.0.1:{bad}",
                f"127.0.0.1.nip.example:{good}",
                f"{self.world.traps}/s",
                f"127.0.0.1:{good}?ssl_ca_certs={self.world.traps}/key",
                f"{CANARY}.example:{good}",
            ]
        )
        return self.random.choice([f"{scheme}://{rest}", f"redis://{rest}", f"http://{rest}", rest])

    def at_file(self) -> str:
        lead = self.random.choice(["@", " @", "\n@", "\u2003@", "@@", '"@', "@~/"])
        return lead + self.path()

    def broken_texts(self) -> list[str]:
        return [
            "{",
            "[]",
            "3",
            "null",
            '"x"',
            "[" * 100_000,
            "{" * 9,
            '{"a":' * 5000,
            "1" * 9999,
            "\ufeff{}",
            "{}x",
            '{"url": 1, "url": NaN}',
            "'{}'",
            f"!!python/object:{CANARY}_module.Store",
        ]


def ask(http: TestClient, world: World, body: Any) -> int:
    data = json.dumps(body).encode()
    reply = http.put(f"{STORAGE}?wait=5", content=data)
    assert reply.status_code in (200, 400), (reply.status_code, reply.text, body)
    sent = json.dumps(body)
    for secret in (CANARY, SECRET, str(world.traps), "another server", "root:", "meta-data"):
        if secret in reply.text:
            # what an answer repeats of a request is a name of a setting or of a backend at most
            assert reply.status_code == 400 and secret in (CANARY,) and secret in sent, (reply.text, body)
            assert len(reply.text) < 400
    if reply.status_code == 200:
        shown = http.get(STORAGE).text
        assert SECRET not in shown and "another server" not in shown
        assert http.delete(f"{STORAGE}?wait=10").status_code == 200
    return reply.status_code


def attack(http: TestClient, world: World, seed: int, num_bodies: int) -> int:
    """How many of them were attached."""
    attacker, num_attached = Attacker(world, seed), 0
    for number in range(num_bodies):
        body = attacker.body()
        num_attached += ask(http, world, body) == 200
        world.check((seed, number, body))
    return num_attached


@pytest.mark.timeout(0 if SECONDS else 600)
def test_no_trap_is_touched_and_nothing_leaks(
    model: Path, world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(world.traps))
    seed, until_s = int(os.environ.get("HIRADIX_ATTACK_SEED", "1")), time.monotonic() + SECONDS
    with attacked(model, *rules_of(world)) as http, caplog.at_level(logging.INFO):
        for body in good_bodies(world):
            assert ask(http, world, body) == 200, (
                body
            )  # what is imported at first use is, before anybody looks
        world.is_watching, came = True, world.allowed.num_came
        while True:
            attack(http, world, seed, NUM_BODIES)
            assert SECRET not in caplog.text
            assert "refused: " in caplog.text and "hiradix.audit" in caplog.text
            caplog.clear()
            if time.monotonic() >= until_s:
                break
            seed += 1
        if HAS_REDIS:
            assert world.allowed.num_came > came, "none of them came as far as a server that is permitted"
        for body in good_bodies(world):
            assert ask(http, world, body) == 200, body
        world.check("what is permitted")
    world.is_watching = False


def good_bodies(world: World) -> list[dict[str, Any]]:
    """Controls: what the rules permit is attached."""
    maker = Attacker(world, 0)
    near, far = {"backend": "disk", **maker.good("disk")}, {"backend": "redis", **maker.good("redis")}
    bodies: list[dict[str, Any]] = [{"name": "cold"}, {BACKEND: "cold"}]
    for backend, keys in (
        ("disk", maker.good("disk")), ("file", maker.good("file")), ("redis", maker.good("redis")),
        ("valkey", maker.good("valkey")), ("tier", {"upper": near, "lower": far}),
    ):  # fmt: skip
        if HAS_REDIS or backend in ("disk", "file"):
            bodies.append({BACKEND: backend, EXTRA: json.dumps(keys)})
    return bodies


def test_without_rules_the_same_bodies_are_refused(model: Path, world: World) -> None:
    with attacked(model) as http:
        for body in good_bodies(world):
            assert ask(http, world, body) == 400, body
        assert attack(http, world, 7, 100) == 0


@pytest.mark.skipif(not HAS_REDIS, reason="the redis extra; `make test-storage` has it")
def test_the_traps_see_what_rules_permit(model: Path, world: World) -> None:
    """A control: with rules that permit them, hostile bodies do what they are meant to."""
    rules = ["--attach-allow", f"backend=redis,host=127.0.0.1:{world.trap.port},file={world.traps}/passwd",
             "--attach-allow", f"backend=disk,path={world.traps}"]  # fmt: skip
    url, secret = f"redis://127.0.0.1:{world.trap.port}", str(world.traps / "passwd")
    with attacked(model, *rules) as http:
        world.is_watching = True
        try:
            keys = {"url": url, "password_file": secret, "retries": 0}
            ask(http, world, {BACKEND: "redis", EXTRA: json.dumps(keys)})
            assert world.trap.num_came and any("passwd" in what for what in world.touched)
            keys = {"disk_storage_path": str(world.traps / "new"), "max_size": "32MiB"}
            assert ask(http, world, {BACKEND: "disk", EXTRA: json.dumps(keys)}) == 200
            assert (world.traps / "new").is_dir()
        finally:
            world.is_watching = False


def test_ports_that_nobody_listens_on_are_no_oracle(model: Path, world: World) -> None:
    """Open or closed, of what is not permitted the answer is the same."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        ports = (world.trap.port, closed.getsockname()[1])
        with attacked(model, *rules_of(world)) as http:
            told = {
                http.put(
                    STORAGE, json={BACKEND: "redis", EXTRA: json.dumps({"url": f"redis://127.0.0.1:{port}"})}
                ).text
                for port in ports
            }
    assert len(told) == 1
