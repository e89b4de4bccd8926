"""Each administrative act and each refused key is a line of the log, with an address and no key."""

from __future__ import annotations

import logging

import pytest

from hiradix.apps.server import audit
from hiradix.apps.server.service import AdminResult
from tests.server.scripted import ScriptedService
from tests.server.test_admin import ATTACH, CLEAR, STORAGE, bearer, client

ACTS = [
    ("POST", "/flush_cache", "flush of device and host"),
    ("PUT", STORAGE, "attach of storage file"),
    ("DELETE", STORAGE, "detach of storage"),
    ("POST", CLEAR, "clear of storage"),
    ("POST", "/clear_hicache_storage_backend", "clear of storage"),
]


@pytest.mark.parametrize(("method", "path", "what"), ACTS)
@pytest.mark.parametrize("ok", [True, False])
def test_an_act_is_a_line(
    method: str, path: str, what: str, ok: bool, caplog: pytest.LogCaptureFixture
) -> None:
    service = ScriptedService()
    service.outcome = AdminResult(ok, "redis://user:hunter2@h\nsaid no")
    http = client(service, admin_key="admin-secret")
    with caplog.at_level(logging.INFO, "hiradix.audit"):
        body = ATTACH if method == "PUT" else None
        reply = http.request(method, path, json=body, headers=bearer("admin-secret"))
    assert (reply.status_code == 200) is ok
    (line,) = [record.getMessage() for record in caplog.records if record.name == "hiradix.audit"]
    assert line.startswith(f"{what} by testclient:50000: {'done' if ok else 'failed: '}")
    assert "hunter2" not in caplog.text and "admin-secret" not in caplog.text and "\n" not in line


def test_refused_keys_are_few_lines_without_the_key(caplog: pytest.LogCaptureFixture) -> None:
    http = client(api_key="user", admin_key="admin")
    with caplog.at_level(logging.INFO, "hiradix.audit"):
        for number in range(50):
            http.put(f"{STORAGE}?x=%0d%0a", json=ATTACH, headers=bearer(f"guess-{number}"))
        http.get("/health")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "hiradix.audit"]
    assert line == f"PUT {STORAGE} by testclient:50000 refused: a wrong key, or none"


def test_refused_keys_are_counted_by_address(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    told = audit.RefusedKeys(lambda: now_s)

    def ask(host: str) -> None:
        told.tell({"client": (host, 1), "method": "GET", "path": f"/v1/\n{'x' * 500}"}, "no key")

    with caplog.at_level(logging.INFO, "hiradix.audit"):
        for host in ("::1", "10.0.0.1", "::1", "::1"):
            ask(host)
        now_s = audit.REFUSED_EVERY_S
        ask("::1")
        for number in range(2 * audit.MAX_PEERS):
            ask(f"host{number}")
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(" by ")[2] for line in lines[:3]] == [
        "[::1]:1 refused: no key",
        "10.0.0.1:1 refused: no key",
        "[::1]:1 refused: no key (and 2 more of this address)",
    ]
    assert all(len(line) < 400 and "\n" not in line for line in lines)
    assert len(told._logged) == audit.MAX_PEERS
