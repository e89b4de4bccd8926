"""A real `hiradix serve` process: start it, wait until it answers, stop it, keep its log."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import httpx

from hiradix.errors import CacheError, Misuse

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 90.0
POLL_S = 0.1
_PORTS = range(15000, 32000)
_random = random.SystemRandom()  # of several processes with one seed, each looks elsewhere
_given: set[int] = set()
_claims: list[socket.socket] = []


class ServerFailed(CacheError):
    """The server process did not start, died, or did not stop; the message ends with the path of its log."""


def free_port() -> int:
    """A TCP port on the loopback interface that nothing listens on now, another one with each call.

    Not one that the kernel gives to connections, which could take it before a slow server does, nor one that
    another process was given by this and that still lives. Raises ServerFailed if there is none.
    """
    candidates = [port for port in _PORTS if port not in _given]
    while candidates:
        port = candidates.pop(_random.randrange(len(candidates)))
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if _claim(port):
            _given.add(port)
            return port
    raise ServerFailed(f"no port of {_PORTS} is free")


def _claim(port: int) -> bool:
    """Whether no other process claims it; a name that is gone with this process keeps it from them."""
    if sys.platform != "linux":
        return True
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0hiradix-port-{port}")
    except OSError:
        claim.close()
        return False
    _claims.append(claim)
    return True


class ServerProcess:
    """One server process on the loopback interface; its output is appended to `log`.

    As a context manager it is ready on entry (launched there if it was not before) and gone on exit. A caller
    that wants to see a crash calls `kill`; `wait_ready` and `stop` raise ServerFailed past their deadlines.
    """

    def __init__(self, arguments: Sequence[str], log: Path, *, port: int | None = None) -> None:
        self.port = free_port() if port is None else port
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        serve = [sys.executable, "-m", "hiradix.cli", "serve", "--host", "127.0.0.1"]
        self.command = [*serve, "--port", str(self.port), *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ServerProcess:
        if self._process is None:
            self.launch()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.stop()
        else:
            self.kill()

    def launch(self) -> None:
        """Start the process and return when it answers; nothing is left behind when it does not."""
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.kill()
            raise

    def start(self) -> None:
        """Start the process; returns at once."""
        if self._process is not None:
            raise Misuse(f"{self.url} was already started")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._process = self._spawn()

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},  # spinning threads slow a shared machine
            )

    def exit_code(self) -> int | None:
        """The exit status, negative for a signal; None while the process runs."""
        if self._process is None:
            raise Misuse("not started")
        return self._process.poll()

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Return when /health answers 200."""
        self.wait_until(lambda: httpx.get(f"{self.url}/health", trust_env=False), timeout_s)

    def wait_until(self, ask: Callable[[], httpx.Response], timeout_s: float) -> None:
        """Return when `ask` gets a 200; ServerFailed when the process ends first or time is up."""
        deadline = time.monotonic() + timeout_s
        while True:
            if (code := self.exit_code()) is not None:
                raise ServerFailed(f"the server ended with exit code {code}\n{self.tail()}\nlog: {self.log}")
            try:
                if ask().status_code == 200:
                    return
            except httpx.TransportError:
                pass
            if time.monotonic() > deadline:
                raise ServerFailed(
                    f"the server was not ready after {timeout_s:.0f} s\n{self.tail()}\nlog: {self.log}"
                )
            time.sleep(POLL_S)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """SIGTERM and wait; the exit status. A process that does not end is killed and reported."""
        if self._process is None:
            return 0
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServerFailed(f"the server did not stop within {timeout_s:.0f} s; log: {self.log}") from None

    def kill(self) -> None:
        """SIGKILL, as a crash would: nothing of the process's own runs after this."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(30)

    def tail(self, num_lines: int = 15) -> str:
        """The last lines of the log."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-num_lines:])
