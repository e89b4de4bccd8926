"""What a foreign web page can make a browser send to a local server without a key is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from hiradix.apps.server.app import AppSettings, create_app
from hiradix.apps.server.auth import Keys
from hiradix.apps.server.flags import parse_serve_args
from hiradix.browsers import Allowed, allowed
from hiradix.config import HiCacheConfig
from hiradix.errors import ConfigError
from tests.server.scripted import MODEL, ScriptedService

LOCAL = allowed("127.0.0.1", "box.lan", "http://ui.example:8080")
JSON, FORM = "application/json", "application/x-www-form-urlencoded"
BODY = b'{"prompt": "a"}'


def client(service: ScriptedService, pages: Allowed = LOCAL, keys: Keys | None = None) -> TestClient:
    settings = AppSettings(MODEL, HiCacheConfig(enable_hierarchical_cache=True), keys or Keys())
    app = create_app(service, dataclasses.replace(settings, pages=pages))
    return TestClient(app, base_url="http://127.0.0.1:30000")


REFUSED: list[tuple[str, dict[str, str]]] = [
    ("Host", {"Host": "evil.example"}),
    ("Host", {"Host": "evil.example:30000"}),
    ("Host", {"Host": "127.0.0.1.evil.example"}),
    ("Host", {"Host": "localhost.evil.example"}),
    ("Host", {"Host": "10.0.0.1:30000"}),
    ("Host", {"Host": ""}),
    ("Host", {"Host": "[::2]:30000"}),
    ("Host", {"Host": "evil.example", "Origin": "http://evil.example"}),
    ("Origin", {"Origin": "http://evil.example"}),
    ("Origin", {"Origin": "null"}),
    ("Origin", {"Origin": "http://127.0.0.1:8000"}),
    ("Origin", {"Origin": "http://localhost:30000"}),
    ("Origin", {"Origin": "file://"}),
    ("Origin", {"Origin": ""}),
    ("Origin", {"Origin": "http://ui.example:8080.evil.example"}),
    ("Origin", {"Origin": "http://127.0.0.1:30000.evil.example"}),
    ("Content-Type", {"Origin": "http://127.0.0.1:30000", "Content-Type": "text/plain"}),
    ("Content-Type", {"Origin": "http://127.0.0.1:30000", "Content-Type": FORM}),
    ("Content-Type", {"Origin": "http://ui.example:8080", "Content-Type": "multipart/form-data; boundary=x"}),
    ("Content-Type", {"Origin": "http://ui.example:8080", "Content-Type": "text/plain; application/json"}),
    ("Content-Type", {"Origin": "http://ui.example:8080"}),
    ("Sec-Fetch-Site", {"Sec-Fetch-Site": "cross-site"}),
    ("Sec-Fetch-Site", {"Sec-Fetch-Site": "same-site"}),
    ("Referer", {"Referer": "http://evil.example/page"}),
]
TAKEN: list[dict[str, str]] = [
    {},
    {"Content-Type": FORM},  # curl -d
    {"Content-Type": "text/plain"},
    {"Host": "localhost:30000"},
    {"Host": "LOCALHOST."},
    {"Host": "[::1]:30000"},
    {"Host": "127.1.2.3"},
    {"Host": "box.lan:1"},
    {"Origin": "http://127.0.0.1:30000", "Content-Type": JSON},
    {"Origin": "http://ui.example:8080", "Content-Type": "application/json; charset=utf-8"},
    {"Sec-Fetch-Site": "none"},
    {"Sec-Fetch-Site": "same-origin"},
    {"Referer": "http://127.0.0.1:30000/page"},
]


@pytest.mark.parametrize(("name", "headers"), REFUSED)
def test_a_foreign_page_is_refused(name: str, headers: dict[str, str]) -> None:
    service = ScriptedService()
    reply = client(service).post("/v1/completions", content=BODY, headers=headers)
    assert (reply.status_code, reply.json()["error"]["param"]) == (403, name)
    if name != "Content-Type":
        assert client(service).get("/flush_cache", headers=headers).status_code == 403
        assert client(service).get("/metrics", headers=headers).status_code == 403
    assert service.requests == [] and service.calls == []


@pytest.mark.parametrize("headers", TAKEN)
def test_others_are_taken(headers: dict[str, str]) -> None:
    service = ScriptedService()
    assert client(service).post("/v1/completions", content=BODY, headers=headers).status_code == 200


@pytest.mark.parametrize(("name", "headers"), REFUSED)
def test_probes_and_keys_are_answered_by_any_name(name: str, headers: dict[str, str]) -> None:
    """A page has no key to send, and of a probe's answer it learns nothing."""
    service = ScriptedService()
    http = client(service, keys=Keys("user", "admin"))
    assert http.get("/health", headers=headers).status_code == 200
    bearer = {"Authorization": "Bearer user"}
    assert http.post("/v1/completions", content=BODY, headers=headers | bearer).status_code == 200
    assert http.post("/v1/completions", content=BODY, headers=headers).status_code == 401


def test_pages_that_are_allowed_get_what_browsers_ask_for() -> None:
    http = client(ScriptedService())
    asks = {"Origin": "http://ui.example:8080", "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "content-type"}  # fmt: skip
    reply = http.options("/v1/completions", headers=asks)
    assert reply.status_code == 200 and reply.headers["access-control-allow-origin"] == asks["Origin"]
    reply = http.options("/v1/completions", headers=asks | {"Origin": "http://evil.example"})
    assert "access-control-allow-origin" not in reply.headers


def parsed(tmp_path: Path, *arguments: str) -> Allowed:
    (tmp_path / "config.json").write_text("{}")
    return parse_serve_args(["--model-path", str(tmp_path), *arguments]).pages


def test_which_hosts_a_server_has(tmp_path: Path) -> None:
    def is_taken(host: str, pages: Allowed) -> bool:
        return pages.refusal("GET", [(b"host", host.encode())]) is None

    everywhere = parsed(tmp_path, "--host", "0.0.0.0")
    assert is_taken("anything", everywhere) and not is_taken("anything", parsed(tmp_path))
    for listed in (
        ("--host", "0.0.0.0", "--allowed-hosts", "a.lan, B.lan"),
        ("--allowed-hosts", "a.lan,b.lan"),
    ):
        pages = parsed(tmp_path, *listed)
        assert is_taken("A.lan:1", pages) and is_taken("b.lan", pages) and is_taken("localhost", pages)
        assert not is_taken("c.lan", pages)
    assert is_taken("anything", parsed(tmp_path, "--allowed-hosts", "*"))
    assert is_taken("127.0.0.9:1", parsed(tmp_path, "--host", "127.0.0.9"))


@pytest.mark.parametrize("origin", ["ui.example", "http://", "ftp://x", "http://x/", "http://x/y", "*"])
def test_origins_are_origins(origin: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--allowed-origins"):
        parsed(tmp_path, "--allowed-origins", origin)


@pytest.mark.parametrize("given", ["http://ui.example:80", "HTTP://ui.example"])
def test_an_origin_is_taken_as_browsers_send_it(given: str, tmp_path: Path) -> None:
    pages = parsed(tmp_path, "--allowed-origins", given)
    asked = {"host": "127.0.0.1:1", "origin": "http://ui.example", "content-type": JSON}
    assert pages.refusal("POST", [(name.encode(), value.encode()) for name, value in asked.items()]) is None


def test_a_request_of_no_browser_names_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    headers: list[Any] = [(b"user-agent", b"HTTP/1.0 client")]
    assert LOCAL.refusal("GET", headers) is None
