"""Ports for servers that start slowly."""

from __future__ import annotations

import socket

import pytest

from hiradix.demo import process
from hiradix.demo.process import ServerFailed, free_port


def test_no_port_is_given_twice_or_is_one_that_connections_get() -> None:
    ports = [free_port() for _ in range(200)]
    assert len(set(ports)) == 200 and max(ports) < 32768


def test_a_port_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, free = free_port(), free_port()
    monkeypatch.setattr(process, "_PORTS", [taken, free])
    monkeypatch.setattr(process, "_given", set())
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", taken))
        assert free_port() == free
        with pytest.raises(ServerFailed, match="free"):
            free_port()
