"""Keys from files and the environment, tenants by key, salts that are asked for, and hints that tell
nobody's keys."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from hiradix.apps.engine.api import Scope
from hiradix.apps.server.app import AppSettings, create_app
from hiradix.apps.server.auth import KeyRing, Keys
from hiradix.apps.server.flags import ServeConfig, parse_serve_args
from hiradix.config import HiCacheConfig, parse_extra_config
from hiradix.errors import ConfigError
from hiradix.storage.wrappers.wrap import WrapConfig
from hiradix.tree.key import Namespace
from tests.e2e.tiny_model import write_tiny_model
from tests.server.scripted import MODEL, ScriptedService
from tests.server.test_real_engine import PROMPT, cached, flags, real_application
from tests.server.test_serve import DEADLINE_S, server

TENANTS = {"key-a": "alice", "key-a2": "alice", "key-b": "bob", "key-n": None}
HINTS = ("/v1/end_of_session", "/v1/keep_alive")


def client(service: ScriptedService, keys: Keys | None = None, needs_salt: bool = False) -> TestClient:
    settings = AppSettings(
        MODEL, HiCacheConfig(enable_hierarchical_cache=True), keys or Keys(), needs_salt=needs_salt
    )
    return TestClient(create_app(service, settings))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def scope_of(key: str, **fields: Any) -> Scope:
    service = ScriptedService()
    http = client(service, Keys("user", "admin", TENANTS))
    assert (
        http.post("/v1/completions", json={"prompt": "a", **fields}, headers=bearer(key)).status_code == 200
    )
    return service.requests[0].scope


# -- tenants ----------------------------------------------------------------------------


def test_a_tenant_has_a_namespace_of_his_own() -> None:
    spaces: dict[tuple[str | None, str | None], str] = {}
    for key in ("user", "key-n", "key-a", "key-b"):
        for fields in (
            {},
            {"cache_salt": "s"},
            {"extra_key": "e"},
            {"cache_salt": "s", "extra_key": "e"},
            {"cache_salt": "alice"},
            {"extra_key": "s"},
        ):
            scope = scope_of(key, **fields)
            owner = TENANTS.get(key) or ""
            assert spaces.setdefault((scope.extra_key, scope.cache_salt), owner) == owner
            if owner:
                assert Namespace(scope.extra_key, scope.cache_salt).tenant == f"salt:tenant:{owner}"
    assert len(spaces) == 6 + 6 + 6
    assert scope_of("key-a", cache_salt="s") == scope_of("key-a2", cache_salt="s")


@pytest.mark.parametrize("path", ["/v1/completions", *HINTS])
@pytest.mark.parametrize("key", ["user", "key-b", "key-n"])
def test_no_client_names_anothers_salt(path: str, key: str) -> None:
    service = ScriptedService()
    http = client(service, Keys("user", "admin", TENANTS))
    body = {"prompt": "a", "cache_salt": "tenant:alice"}
    reply = http.post(path, json=body, headers=bearer(key))
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "cache_salt"
    assert not service.requests and not service.calls


def test_tenants_share_no_page(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    (tmp_path / "keys").write_text("key-a alice\nkey-a2 alice # the next one\n\nkey-b bob\n")
    arguments = flags(model, "--api-keys", str(tmp_path / "keys"))
    config = parse_serve_args(arguments)
    with real_application(arguments) as app:
        app.state.key_ring.put_in(Keys(None, "admin", config.tenants))
        http = TestClient(app)

        def hit(key: str, **fields: Any) -> int:
            body = {"prompt": PROMPT, "max_tokens": 2, **fields}
            reply = http.post("/v1/completions", json=body, headers=bearer(key))
            assert reply.status_code == 200, reply.text
            return sum(cached(reply.json()).values())

        assert [hit("key-a"), hit("key-a") > 0, hit("key-a2") > 0, hit("key-b"), hit("key-b") > 0] == [
            0, True, True, 0, True
        ]  # fmt: skip
        assert [
            hit("key-a", cache_salt="x"),
            hit("key-b", cache_salt="x"),
            hit("key-a2", cache_salt="x") > 0,
        ] == [0, 0, True]
        told = http.post("/v1/keep_alive", json={"prompt": PROMPT}, headers=bearer("key-b")).json()
        assert "cached_tokens" in told, "of his own"
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 401


def test_quotas_are_by_tenant() -> None:
    values = {"quotas": {"tenant:alice": "1KiB"}, "quota_path": "/x", "quota": 5}
    config = WrapConfig.from_mapping(values).quota
    scope = scope_of("key-a", cache_salt="any of many")
    assert config.limit(Namespace(scope.extra_key, scope.cache_salt).tenant, 1) == 1024
    assert config.limit(Namespace(None, "tenant:bob").tenant, 1) == 5


def test_a_tenants_key_administers_nothing() -> None:
    service = ScriptedService()
    http = client(service, Keys(None, None, TENANTS))
    assert http.post("/flush_cache", headers=bearer("key-a")).status_code == 400
    assert http.get("/hicache/storage-backend", headers=bearer("key-a")).status_code == 400
    assert http.get("/hicache/storage-backend").status_code == 401
    http = client(service, Keys("user", "admin", TENANTS))
    for path in ("/flush_cache", "/hicache/storage-backend/clear"):
        for key in ("key-a", "user"):
            assert http.post(path, headers=bearer(key)).status_code == 401
    assert service.calls == []


def test_keys_are_kept_as_digests() -> None:
    keys = Keys("user", "admin", TENANTS)
    ring = KeyRing(keys)
    assert not any(key in repr(keys) for key in ("user", "admin", "key-a"))
    for good in (b"Bearer key-b", b"bearer  key-b "):
        found = ring.caller(good)
        assert found is not None and found.tenant == "bob"
    for bad in (b"", b"Bearer", b"Bearer key-", b"Basic key-b", b"key-b", "Bearer k\u00e9y".encode()):
        assert ring.caller(bad) is None and not ring.is_admin(bad)
    assert ring.caller(b"Bearer admin") is None and ring.is_admin(b"Bearer admin")


# -- salts and hints ----------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", *HINTS])
def test_a_salt_may_be_asked_for(path: str) -> None:
    service = ScriptedService()
    http = client(service, Keys(None, None, {}), needs_salt=True)
    body: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
    )
    for salt in ({}, {"cache_salt": None}, {"cache_salt": ""}, {"extra_key": "x"}):
        reply = http.post(path, json=body | salt)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "cache_salt"
    assert http.post(path, json=body | {"cache_salt": "s"}).status_code == 200
    http = client(service, Keys(None, None, TENANTS), needs_salt=True)
    assert http.post(path, json=body, headers=bearer("key-a")).status_code == 200
    assert http.post(path, json=body, headers=bearer("key-n")).status_code == 400


@pytest.mark.parametrize("path", HINTS)
@pytest.mark.parametrize(
    ("key", "salt", "may_know"),
    [
        ("", None, False),
        ("", "", False),
        ("", "s", True),
        ("admin", None, True),
        ("wrong", None, False),
        ("user", None, False),
        ("user", "s", True),
        ("key-a", None, True),
        ("key-n", None, False),
        ("key-n", "s", True),
    ],
)
def test_hints_tell_counts_to_those_whose_they_are(
    path: str, key: str, salt: str | None, may_know: bool
) -> None:
    service = ScriptedService()
    needs_keys = key in ("user", "key-a", "key-n")
    http = client(service, Keys("user", "admin", TENANTS) if needs_keys else Keys(None, "admin"))
    body = {"prompt": "abc", **({} if salt is None else {"cache_salt": salt})}
    reply = http.post(path, json=body, headers=bearer(key) if key else {})
    assert reply.status_code == 200 and len(service.calls) == 1
    assert reply.json() == {"object": path[4:], **({"cached_tokens": 3} if may_know else {})}


def test_the_admin_key_opens_hints_beside_the_api_key() -> None:
    service = ScriptedService()
    http = client(service, Keys("user", "admin"))
    assert http.post(HINTS[0], json={"prompt": "abc"}, headers=bearer("admin")).json()["cached_tokens"] == 3
    assert http.post(HINTS[0], json={"prompt": "abc"}, headers=bearer("x")).status_code == 401
    assert http.post("/v1/completions", json={"prompt": "abc"}, headers=bearer("admin")).status_code == 401


# -- where keys come from -----------------------------------------------------------------


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "config.json").write_text("{}")
    for name in ("HIRADIX_API_KEY", "HIRADIX_ADMIN_API_KEY"):
        monkeypatch.delenv(name, raising=False)

    def parse(*arguments: str) -> ServeConfig:
        return parse_serve_args(["--model-path", str(tmp_path), *arguments])

    return parse


def secret(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


KINDS = [
    ("--api-key", "HIRADIX_API_KEY", "api_key"),
    ("--admin-api-key", "HIRADIX_ADMIN_API_KEY", "admin_api_key"),
]


@pytest.mark.parametrize(("flag", "variable", "field"), KINDS)
def test_which_key_counts(
    flag: str, variable: str, field: str, start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = secret(tmp_path / "key", "of-file\n")
    assert getattr(start(), field) is None
    assert getattr(start(f"{flag}-file", path), field) == "of-file"
    assert getattr(start(flag, "k-arg"), field) == "k-arg"
    monkeypatch.setenv(variable, "of-env\n")
    assert getattr(start(), field) == "of-env"
    for arguments, key in (((flag, "k-arg"), "k-arg"), ((f"{flag}-file", path), "of-file")):
        config = start(*arguments)
        assert getattr(config, field) == key and any(variable in note for note in config.notes)
        assert "of-env" not in repr(config) and key not in repr(config) + "".join(config.notes)
    with pytest.raises(ConfigError, match=f"{flag} and {flag}-file exclude each other"):
        start(flag, "k-arg", f"{flag}-file", path)
    monkeypatch.setenv(variable, "")
    with pytest.raises(ConfigError, match=variable):
        start()


@pytest.mark.parametrize("text", ["", "\n", "two\nlines", "sch\u00f6n", "a\x00b"])
def test_a_file_without_a_key_is_refused_and_not_shown(text: str, start: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        start("--api-key-file", secret(tmp_path / "key", text))
    assert "--api-key-file" in str(caught.value) and "two" not in str(caught.value)
    with pytest.raises(ConfigError, match="--admin-api-key-file"):
        start("--admin-api-key-file", str(tmp_path / "none"))


@pytest.mark.parametrize("flag", ["--api-key-file", "--api-keys"])
def test_a_file_that_others_may_read_is_told(flag: str, start: Any, tmp_path: Path) -> None:
    assert start(flag, secret(tmp_path / "key", "key")).notes == ()
    (note,) = start(flag, secret(tmp_path / "key", "key", 0o644)).notes
    assert flag in note and "644" in note


EXTRA = "--hicache-storage-backend-extra-config"
FILE_FLAGS = ["--api-key-file", "--admin-api-key-file", "--api-keys", EXTRA]


@pytest.mark.parametrize("flag", FILE_FLAGS)
def test_a_pipe_that_nobody_writes_does_not_hold_the_start(
    flag: str, start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hiradix.config_files.FILE_TIMEOUT_S", 0.05)
    path = tmp_path / "pipe.json"
    os.mkfifo(path)
    asked = f"@{path}" if flag == EXTRA else str(path)
    with pytest.raises(ConfigError, match=f"{flag}.*within 0.05 s"):
        start(flag, asked)
    keeper = os.open(path, os.O_RDWR)  # and one that somebody has open for ever
    try:
        os.write(keeper, b"{")
        with pytest.raises(ConfigError, match=f"{flag}.*within 0.05 s"):
            start(flag, asked)
    finally:
        os.close(keeper)


def test_a_pipe_that_is_written_is_a_file(start: Any) -> None:
    """As of a shell's <(command)."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as file:
        file.write(b"key-a alice\n")
    try:
        assert start("--api-keys", f"/dev/fd/{reader}").tenants == {"key-a": "alice"}
    finally:
        os.close(reader)


@pytest.mark.parametrize("path", ["/dev/zero", "/", "~nobody-of-this-name/key"])
def test_what_is_no_file_of_a_key_is_refused(path: str, start: Any) -> None:
    with pytest.raises(ConfigError, match="--api-key-file"):
        start("--api-key-file", path)


@pytest.mark.parametrize(
    "text",
    [
        "# keys\nkey-a alice\n\nkey-b  bob # of b\nkey-n\n",
        '{"key-a": "alice", "key-b": "bob", "key-n": null}',
    ],
)
def test_keys_by_tenant(text: str, start: Any, tmp_path: Path) -> None:
    config = start("--api-keys", secret(tmp_path / "keys", text))
    assert config.tenants == {"key-a": "alice", "key-b": "bob", "key-n": None}
    assert "key-a" not in repr(config)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# none",
        "{",
        "{}",
        '{"k-secret": 3}',
        '{"k-secret": "a b"}',
        '{"k-secret": "a", "k-secret": "b"}',
        "k-secret a b",
        "k-secret a\nk-secret b",
        "k-secret a/b",
        "k-secr\u00e9t a",
        "user alice",
        "admin",
        "[1]",
        '["k-secret"]',
        '[\n "k-secret",\n "k-other"\n]',
    ],
)
def test_a_bad_file_of_keys_is_refused_and_not_shown(text: str, start: Any, tmp_path: Path) -> None:
    path = secret(tmp_path / "keys", text)
    with pytest.raises(ConfigError) as caught:
        start("--api-keys", path, "--api-key", "user", "--admin-api-key", "admin")
    assert str(caught.value).startswith("--api-keys ") and "k-secret" not in str(caught.value)


def test_a_key_with_a_hash_sign_is_not_cut(start: Any, tmp_path: Path) -> None:
    """What is left of it would be a shorter key, of nobody's tenant."""
    text = "key#a alice\n#key-b bob\n  # a comment\nkey-c carol #d\n#\n"
    config = start("--api-keys", secret(tmp_path / "keys", text))
    assert config.tenants == {"key#a": "alice", "key-c": "carol"}


def test_the_file_is_read_again_on_sighup(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "keys"
    secret(path, "key-a alice")
    with server(str(tmp_path), "answer", "--api-keys", str(path)) as running:
        running.wait_ready()
        import httpx

        def status(key: str) -> int:
            url, body = f"{running.url}/v1/completions", {"prompt": "a"}
            return httpx.post(
                url, json=body, headers=bearer(key), timeout=DEADLINE_S, trust_env=False
            ).status_code

        def said(words: str) -> None:
            assert running.process.stderr is not None
            assert any(words in line for line in iter(running.process.stderr.readline, ""))

        assert (status("key-a"), status("key-b")) == (200, 401)
        path.write_text("key-b bob")
        running.process.send_signal(signal.SIGHUP)
        said("was read again: 1 keys")
        assert (status("key-a"), status("key-b"), status("user-secret")) == (401, 200, 200)
        path.write_text("")
        running.process.send_signal(signal.SIGHUP)
        said("stay as they are")
        assert status("key-b") == 200
        running.end(signal.SIGTERM)


# -- passwords of storage -----------------------------------------------------------------


def test_passwords_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHE_PASSWORD", "hunter2")
    text = json.dumps(
        {"password_env": "CACHE_PASSWORD", "lower": {"secret_access_key_env": "CACHE_PASSWORD"}}
    )
    found = parse_extra_config(text).backend
    assert found == {"password": "hunter2", "lower": {"secret_access_key": "hunter2"}}
    for bad in (
        {"password_env": "NO_SUCH_VARIABLE"},
        {"password_env": ""},
        {"password_env": 3},
        {"password_env": "CACHE_PASSWORD", "password": "x"},
        {"upper": {"password_env": "NO_SUCH_VARIABLE"}},
    ):
        with pytest.raises(ConfigError, match="password_env"):
            parse_extra_config(json.dumps(bad))
    assert parse_extra_config('{"url_env": "CACHE_PASSWORD"}').backend == {"url_env": "CACHE_PASSWORD"}
    assert "CACHE_PASSWORD" in os.environ


# -- what tenants wish of the cache -----------------------------------------------------


def test_a_tenants_key_asks_for_what_is_his_alone(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    with real_application(flags(model)) as app:
        app.state.key_ring.put_in(Keys("user", "admin", TENANTS))
        http = TestClient(app)

        def wish(key: str, verb: str, selector: dict[str, Any], **fields: Any) -> tuple[int, dict[str, Any]]:
            body = {"selector": selector, **fields}
            reply = http.post(f"/hicache/prefix/{verb}", json=body, headers=bearer(key))
            found: dict[str, Any] = reply.json()
            return reply.status_code, found

        def on_device(key: str, selector: dict[str, Any]) -> int:
            status, found = wish(key, "locate", selector)
            assert status == 200, found
            count: int = found["found"]["device"]["tokens"]
            return count

        prompt = {"tokens": PROMPT}
        longest = "\u754c" * 256
        for fields in ({"session_id": "s"}, {"session_id": longest}, {"cache_salt": "x"}):
            body = {"prompt": PROMPT, "max_tokens": 2, **fields}
            assert http.post("/v1/completions", json=body, headers=bearer("key-a")).status_code == 200
        whole = len(PROMPT) // 16 * 16
        his = [
            prompt,
            {"session": longest},
            {"session": "s"},
            {**prompt, "cache_salt": "x"},
            {"tenant": "salt:tenant:alice"},
        ]
        assert all(on_device("key-a", selector) >= whole for selector in his)
        assert all(on_device("key-b", selector) == 0 for selector in his[:4])
        for selector in ({"tenant": "salt:tenant:alice"}, {"everything": True}, {"tenant": ""}):
            for verb, fields in (("locate", {}), ("forget", {}), ("hold", {"ttl_s": 9.0})):
                status, refused = wish("key-b", verb, selector, **fields)
                assert status == 409 and refused["state"] == "refused" and not refused["found"], (
                    verb,
                    selector,
                )
        for salted in (
            {**prompt, "cache_salt": "tenant:alice"},
            {"session": "s", "cache_salt": "tenant:alice"},
        ):
            assert wish("key-b", "forget", salted)[0] == 400
        status, held = wish("key-a", "hold", prompt, ttl_s=60.0)
        assert status == 202 and held["asked_by"] == "salt:tenant:alice"
        path = f"/hicache/intents/{held['id']}"
        for key, expected in (("key-a2", 200), ("key-b", 404), ("admin", 200), ("user", 401), ("key-n", 401)):
            assert http.get(path, headers=bearer(key)).status_code == expected, key
        assert http.delete(path, headers=bearer("key-b")).status_code == 404
        for key, name in (("key-a", "alice"), ("key-b", "bob")):
            assert {one["asked_by"] for one in listed(http, key)} == {f"salt:tenant:{name}"}
        assert wish("key-a", "bring", prompt, target="elsewhere")[1]["reason"].endswith("the operator's")
        rows = http.get("/hicache/tenants", headers=bearer("key-a")).json()["tenants"]
        assert [row["tenant"] for row in rows] == ["salt:tenant:alice"]
        assert wish("key-a", "forget", prompt)[0] in (200, 202)
        assert on_device("key-a", prompt) == 0 and on_device("key-a", his[3]) >= whole


def listed(http: TestClient, key: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = http.get("/hicache/intents", headers=bearer(key)).json()["intents"]
    return found


def test_without_an_admin_key_tenants_ask_for_their_own_and_nobody_else_does() -> None:
    http = client(ScriptedService(), Keys("user", None, TENANTS))
    statuses = [
        http.get("/hicache/tenants", headers=bearer(key)).status_code for key in ("key-a", "user", "wrong")
    ]
    assert statuses == [200, 400, 401]


@pytest.mark.parametrize(
    ("selector", "field"),
    [
        ({"tokens": [1] * 101}, "selector.tokens"),
        ({"text": "x" * 101}, "selector.tokens"),
        ({"text": 3}, "selector.text"),
        ({"messages": [{"role": "user", "content": "hi", "x": 1}]}, "selector.messages.0.x"),
        ({"messages": [{str(n): n for n in range(50)}] * 40}, "selector.messages"),
        ({"messages": [{"role": "user", "content": None}]}, "selector.messages.0.content"),
        ({"session": "s" * 257}, "selector.session"),
        ({"tokens": [1], "cache_salt": 3}, "selector.cache_salt"),
    ],
)
def test_what_a_tenants_wish_may_not_have_is_named(selector: dict[str, Any], field: str) -> None:
    """In the form of all listeners. A prefix longer than the context is in no cache, and work to read."""
    http = client(ScriptedService(), Keys("user", None, TENANTS))
    reply = http.post("/hicache/prefix/locate", json={"selector": selector}, headers=bearer("key-a"))
    assert reply.status_code == 400 and reply.json()["field"] == field, reply.text
    assert reply.json()["message"].startswith(field)


@pytest.mark.parametrize("body", ["{", "[]", "[" + "0," * (1 << 20) + "0]"])
def test_a_wish_that_is_no_object_is_refused_by_why(body: str) -> None:
    http = client(ScriptedService(), Keys("user", "admin", TENANTS))
    reply = http.post("/hicache/intents", content=body, headers=bearer("admin"))
    assert reply.status_code == 400 and reply.json()["message"].startswith("body: "), reply.text
    assert ("1048576 values" in reply.json()["message"]) == (len(body) > 9)
