"""Ports for servers that start slowly."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hiradix.apps.demo import process
from hiradix.apps.demo.process import ServerFailed, free_port


def test_no_port_is_given_twice_or_is_one_that_connections_get() -> None:
    ports = [free_port() for _ in range(200)]
    assert len(set(ports)) == 200 and max(ports) < 32768


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound


def test_a_port_that_is_taken_is_passed_over(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        free = other.getsockname()[1]
    monkeypatch.setattr(process, "_PORTS", [listener.getsockname()[1], free])
    assert free_port() == free
    with pytest.raises(ServerFailed, match="free"):
        free_port()


def test_a_port_that_another_process_was_given_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: two looked at once, and the servers of both, which listen seconds later, had one port."""
    code = "from hiradix.apps.demo.process import free_port; print(free_port(), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdin is not None
        port = int(other.stdout.readline())
        monkeypatch.setattr(process, "_PORTS", [port])
        with pytest.raises(ServerFailed, match="free"):
            free_port()
        other.stdin.close()
        assert other.wait(60) != 0, "input() saw the end"
    assert free_port() == port, "given back with the process"
