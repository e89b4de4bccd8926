"""The admin API: paths, bodies, codes and keys as upstream; clearing storage always needs the admin key."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from hiradix.apps.server.admin import CLEARED, DEPRECATED, FLUSH_BUSY, FLUSHED
from hiradix.apps.server.auth import NO_ADMIN_KEY
from hiradix.apps.server.service import NO_HOST_TIER, AdminResult, AttachRequest
from hiradix.storage.attach.rules import AttachRules, Prepared, parse_rule
from tests.server.scripted import ScriptedService, application

STORAGE = "/hicache/storage-backend"
CLEAR = f"{STORAGE}/clear"
CLEAR_OLD = "/clear_hicache_storage_backend"
ATTACH = {
    "hicache_storage_backend": "file",
    "hicache_storage_backend_extra_config_json": '{"file_storage_path": "/d"}',
}


ATTACHABLE = AttachRules(
    {"cold": Prepared("s3", {"url": "s3://bucket", "secret_access_key": "k-secret"})},
    (parse_rule("backend=file,path=/d"), parse_rule("backend=s3,host=host,url=s3://b")),
)


def client(service: ScriptedService | None = None, **settings: Any) -> TestClient:
    return TestClient(application(service or ScriptedService(), **{"attach": ATTACHABLE, **settings}))


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def call(http: TestClient, target: str, key: str | None = None) -> httpx.Response:
    method, path = target.split()
    body = ATTACH if method == "PUT" else {"prompt": "a"} if "completions" in path else None
    return http.request(method, path, json=body, headers=bearer(key))


NORMAL = ("GET /v1/models", "POST /v1/completions", "GET /server_info", "GET /get_hicache_l3_cache_layout")
OPTIONAL = ("GET /flush_cache", "POST /flush_cache")
FORCED = (
    f"GET {STORAGE}",
    f"PUT {STORAGE}",
    f"DELETE {STORAGE}",
    f"POST {CLEAR}",
    f"GET {CLEAR_OLD}",
    f"POST {CLEAR_OLD}",
)
OPEN = ("GET /health", "GET /ready", "GET /metrics")
# keys the server has -> the key that opens (normal, optional, forced) endpoints; None: no key needed
RULES = [
    (None, None, (None, None, "off")),
    ("user", None, ("user", "user", "off")),
    (None, "admin", (None, "admin", "admin")),
    ("user", "admin", ("user", "admin", "admin")),
]


@pytest.mark.parametrize(("api_key", "admin_key", "opens"), RULES)
def test_which_key_opens_what(
    api_key: str | None, admin_key: str | None, opens: tuple[str | None, ...]
) -> None:
    http = client(api_key=api_key, admin_key=admin_key)
    for targets, needed in zip((NORMAL, OPTIONAL, FORCED), opens, strict=True):
        for target in targets:
            if needed == "off":
                reply = call(http, target, api_key)
                assert (reply.status_code, reply.json()) == (400, {"error": NO_ADMIN_KEY}), target
                continue
            for wrong in {None, "user", "admin", "wrong"} - {needed}:
                if needed is None:
                    break
                reply = call(http, target, wrong)
                assert (reply.status_code, reply.json()) == (401, {"error": "Unauthorized"}), (target, wrong)
            assert call(http, target, needed).status_code == 200, target
    for target in OPEN:
        assert call(http, target).status_code == 200


def test_switched_off_endpoints_still_need_the_api_key() -> None:
    http = client(api_key="user")
    assert call(http, f"GET {STORAGE}").status_code == 401


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("bearer user", 200),
        ("BEARER user", 200),
        ("Bearer  user ", 200),
        ("Basic user", 401),
        ("user", 401),
        ("Bearer", 401),
        ("Bearer user2", 401),
        ("Bearer use", 401),
        ("Bearer \u00fcser", 401),
    ],
)
def test_authorization_header(header: str, status: int) -> None:
    http = client(api_key="user")
    assert http.get("/v1/models", headers={"Authorization": header.encode()}).status_code == status


def test_a_refused_request_reaches_nothing() -> None:
    service = ScriptedService()
    http = client(service, api_key="user", admin_key="admin")
    for target in (*NORMAL, *OPTIONAL, *FORCED):
        call(http, target, "wrong")
    assert service.calls == [] and service.requests == []


def test_flush() -> None:
    service = ScriptedService()
    http = client(service)
    for method in ("GET", "POST"):
        reply = http.request(method, "/flush_cache")
        assert (reply.status_code, reply.text) == (200, FLUSHED)
    http.post("/flush_cache?timeout=2.5")
    assert service.calls == [("flush", 0.0), ("flush", 0.0), ("flush", 2.5)]


@pytest.mark.parametrize("timeout", ["-1", "x", "nan", "inf", "1e9"])
def test_flush_with_a_bad_timeout(timeout: str) -> None:
    service = ScriptedService()
    reply = client(service).post(f"/flush_cache?timeout={timeout}")
    assert reply.status_code == 400 and "timeout" in reply.text and service.calls == []


def test_flush_that_fails_says_why() -> None:
    service = ScriptedService()
    http = client(service)
    service.outcome = AdminResult(False, "Timed out waiting for idle state.")
    assert http.post("/flush_cache?timeout=1").text == "Timed out waiting for idle state."
    service.outcome = AdminResult(False, "")
    reply = http.post("/flush_cache")
    assert (reply.status_code, reply.text) == (400, "Flush cache failed.\n")


def test_second_flush_while_one_waits_is_refused() -> None:
    service = ScriptedService()
    app = application(service)
    inner: list[httpx.Response] = []

    async def flush(timeout_s: float) -> AdminResult:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as http:
            inner.append(await http.post("/flush_cache"))
        return AdminResult(True, "")

    service.flush = flush  # type: ignore[method-assign]
    assert TestClient(app).post("/flush_cache").status_code == 200
    assert (inner[0].status_code, inner[0].text) == (400, FLUSH_BUSY)


VIEW_EMPTY = {
    "hicache_storage_backend": None,
    "hicache_storage_backend_extra_config": None,
    "hicache_storage_prefetch_policy": "timeout",
    "hicache_write_policy": "write_through",
}


def test_attach_detach_and_the_view() -> None:
    service = ScriptedService()
    http = client(service, admin_key="a")
    http.headers = bearer("a")
    assert http.get(STORAGE).json() == VIEW_EMPTY
    body = {
        "hicache_storage_backend": "file",
        "hicache_storage_backend_extra_config_json": '{"file_storage_path": "/d"}',
        "hicache_storage_prefetch_policy": "best_effort",
        "hicache_write_policy": "write_back",
    }
    reply = http.put(STORAGE, json=body)
    assert (reply.status_code, reply.text) == (200, "HiCache storage backend attached.\ndone.\n")
    assert service.calls == [
        AttachRequest("file", '{"file_storage_path": "/d"}', "best_effort", "write_back")
    ]
    shown = {k.removesuffix("_json"): v for k, v in body.items()}
    assert http.get(STORAGE).json() == shown
    again = {"hicache_storage_backend": "file", "hicache_write_policy": "write_through"}
    assert http.put(STORAGE, json=again).status_code == 200
    assert http.get(STORAGE).json() == {**shown, "hicache_write_policy": "write_through"}
    for _ in range(2):
        reply = http.delete(STORAGE)
        assert (reply.status_code, reply.text) == (200, "HiCache storage backend detached.\ndone.\n")
    assert http.get(STORAGE).json() == {**VIEW_EMPTY, "hicache_storage_prefetch_policy": "best_effort"}


def test_refused_attach_and_detach_change_no_view() -> None:
    service = ScriptedService()
    http = client(service, admin_key="a", hicache_storage_backend="file")
    http.headers = bearer("a")
    busy = "Reject attach: scheduler is not idle. #queue-req=3 #running-req=2"
    service.outcome = AdminResult(False, busy)
    reply = http.put(STORAGE, json={**ATTACH, "hicache_write_policy": "write_back"})
    assert (reply.status_code, reply.text) == (400, f"Failed to attach HiCache storage backend.\n{busy}")
    reply = http.delete(STORAGE)
    assert reply.status_code == 400 and reply.text.startswith("Failed to detach HiCache storage backend.\n")
    assert http.get(STORAGE).json() == {**VIEW_EMPTY, "hicache_storage_backend": "file"}


def test_an_attach_body_too_long_to_be_parsed_beside_requests_is_refused() -> None:
    service = ScriptedService()
    body = {**ATTACH, "hicache_storage_backend_extra_config_json": "[" + "1," * 200_000 + "1]"}
    reply = client(service, admin_key="a").put(STORAGE, json=body, headers=bearer("a"))
    assert reply.status_code == 400 and "larger than 262144 bytes" in reply.json()["message"]
    assert not service.calls


@pytest.mark.parametrize("path", ["/flush_cache/", f"{STORAGE}/", "/v1/completions/", "/metrics/"])
def test_no_path_is_redirected_to_the_host_a_client_names(path: str) -> None:
    http = client(ScriptedService(), admin_key="a")
    reply = http.post(path, headers={**bearer("a"), "host": "evil.example"}, follow_redirects=False)
    assert reply.status_code == 404 and "location" not in reply.headers


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "hicache_storage_backend"),
        ({"hicache_storage_backend": None}, "hicache_storage_backend"),
        ({"hicache_storage_backend": ""}, "hicache_storage_backend"),
        ({**ATTACH, "hicache_write_policy": 3}, "hicache_write_policy"),
        (
            {**ATTACH, "hicache_storage_backend_extra_config_json": {}},
            "hicache_storage_backend_extra_config_json",
        ),
        ([], "body"),
    ],
)
def test_bad_attach_body(body: object, param: str) -> None:
    service = ScriptedService()
    reply = client(service, admin_key="a").put(STORAGE, json=body, headers=bearer("a"))
    error = reply.json()
    assert (reply.status_code, error["object"], error["type"]) == (400, "error", "Bad Request")
    assert (error["code"], error["param"]) == (400, param) and error["message"]
    assert service.calls == []


def test_view_and_server_info_show_no_secrets() -> None:
    service = ScriptedService()
    http = client(service, api_key="user-secret", admin_key="admin-secret")
    extra = '{"endpoint": "https://host", "secret_access_key": "k-secret", "url": "s3://b/bucket"}'
    body = {"hicache_storage_backend": "s3", "hicache_storage_backend_extra_config_json": extra}
    assert http.put(STORAGE, json=body, headers=bearer("admin-secret")).status_code == 200
    shown = http.get(STORAGE, headers=bearer("admin-secret")).text
    info = http.get("/server_info", headers=bearer("user-secret")).text
    metrics = http.get("/metrics").text
    assert "bucket" in shown and "***" in shown
    assert not any("secret" in text.replace("secret_access_key", "") for text in (shown, info, metrics))


def test_clear() -> None:
    service = ScriptedService()
    http = client(service, admin_key="a")
    http.headers = bearer("a")
    reply = http.post(CLEAR)
    assert (reply.status_code, reply.text) == (200, CLEARED)
    for method in ("GET", "POST"):
        assert http.request(method, CLEAR_OLD).text == DEPRECATED + CLEARED
    assert service.calls == ["clear"] * 3
    service.outcome = AdminResult(False, NO_HOST_TIER)
    reply = http.post(CLEAR)
    assert (reply.status_code, reply.text) == (400, CLEARED)
    service.outcome = AdminResult(False, "disk on fire")
    reply = http.post(CLEAR)
    assert reply.status_code == 400 and reply.text.startswith("Failed") and "disk on fire" in reply.text


def test_layout_is_never_shared() -> None:
    layout = client().get("/get_hicache_l3_cache_layout").json()
    assert layout["enabled"] is False and layout["reason"]


def test_earlier_drafts_of_the_paths_are_not_served() -> None:
    http = client(admin_key="a")
    for path in (
        "/attach_hicache_storage_backend",
        "/detach_hicache_storage_backend",
        "/hicache_storage_backend",
    ):
        assert http.post(path, headers=bearer("a")).status_code == 404
