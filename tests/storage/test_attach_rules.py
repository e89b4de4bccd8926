"""What a request over HTTP may attach: rules, the table of settings, and what is answered of a failure."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hiradix.config import EXTRA_CONFIG_FLAG, SECRET_KEYS, ExtraConfig
from hiradix.errors import ConfigError
from hiradix.settings import Setting, Type, redact
from hiradix.storage.attach.rules import (
    DEFAULT,
    AttachRefused,
    AttachRules,
    Prepared,
    default_of,
    in_log,
    over_http,
    parse_prepared,
    parse_rule,
    rules_of,
)
from hiradix.storage.attach.tables import (
    BACKEND_SETTINGS,
    CACHE_SETTINGS,
    COMMON_SETTINGS,
    PERMITTABLE,
    settings_over_http,
)

SECRETS = {"password": "hunter2", "nested": {"secret_access_key": "wJalrXUtn"}}


def rules(*texts: str, **prepared: dict[str, Any]) -> AttachRules:
    found = {name: Prepared(keys.pop("backend"), keys) for name, keys in prepared.items()}
    return AttachRules(found, tuple(map(parse_rule, texts)))


def refused(own: AttachRules, backend: str, keys: object) -> str:
    text = keys if isinstance(keys, str) or keys is None else json.dumps(keys)
    with pytest.raises(AttachRefused) as caught:
        own.wanted(backend, text)
    assert str(caught.value).startswith(f"{caught.value.param}: ")
    return caught.value.param


# -- the table --------------------------------------------------------------------------


def test_a_setting_is_closed_unless_its_record_opens_it() -> None:
    assert Setting("new", Type.TEXT, None, "").over_http is None
    open_keys = {name: settings_over_http(name, is_outermost=False) for name in BACKEND_SETTINGS}
    closed = {name: sorted({*BACKEND_SETTINGS[name]} - set(keys)) for name, keys in open_keys.items() if keys}
    naming = ["is_mla_model", "naming", "sglang_model_name"]
    assert {name: keys for name, keys in closed.items() if keys} == {
        "file": naming,
        "s3": ["store_options"],
        "mooncake": ["device_name"],
        "nixl": ["plugin_options", "store_options"],
    }
    assert [name for name in BACKEND_SETTINGS if not open_keys[name]] == ["dynamic"]
    weaker = {name: one.over_http.refused for name, one in COMMON_SETTINGS.items() if one.over_http}
    assert {name: refused for name, refused in weaker.items() if refused} == {
        "checksum": (False,),
        "quantise": ("fp8",),
    }
    (verify,) = [one.over_http for name, one in open_keys["disk"].items() if name == "verify"]
    assert verify is not None and verify.refused == ("recovered", "off")


def test_keys_of_the_cache_are_permitted_at_the_outermost_level_but_for_the_identity() -> None:
    """Whoever says whose pages these are takes the comparison away; no regret is for the start."""
    own = set(CACHE_SETTINGS) - {"hicache_storage_identity", "hicache_no_regret"}
    assert own and not set(settings_over_http("file", False)) & own
    assert set(settings_over_http("file", True)) & set(CACHE_SETTINGS) == own


def test_secrets_of_every_backend_may_come_from_the_environment() -> None:
    tables = (COMMON_SETTINGS, *BACKEND_SETTINGS.values())
    secret = {name for table in tables for name, one in table.items() if one.type is Type.SECRET}
    assert secret == set(SECRET_KEYS)
    assert all(redact({name: "hunter2"}) == {name: "***"} for name in secret)


# -- what is permitted ------------------------------------------------------------------


def test_nothing_is_permitted_without_rules(tmp_path: Path) -> None:
    for backend in (*PERMITTABLE, "dynamic", "hf3fs", "nobody"):
        for keys in (None, {}, {"file_storage_path": str(tmp_path)}):
            assert refused(AttachRules(), backend, keys) == "hicache_storage_backend"


def test_folders_below_a_path_and_no_others(tmp_path: Path) -> None:
    kv, other = tmp_path / "kv", tmp_path / "kv2"
    kv.mkdir()
    other.mkdir()
    (kv / "out").symlink_to(other)
    (kv / "in").symlink_to(kv / "real")
    own = rules(f"backend=disk,path={kv}")
    for path, real in (
        (kv, kv),
        (kv / "a/b", kv / "a/b"),
        (kv / "in", kv / "real"),
        (f"{kv}//a/../b", kv / "b"),
    ):
        found = own.wanted("disk", json.dumps({"disk_storage_path": str(path), "max_size": "1GiB"}))
        assert found.text is not None
        assert json.loads(found.text) == {"disk_storage_path": str(real), "max_size": "1GiB"}
    for path in (
        other,
        kv / "out",
        kv / "out/x",
        kv / "..",
        f"{kv}/../kv2",
        "/",
        "kv",
        "~",
        "",
        "~root/x",
        "/\0",
    ):
        assert refused(own, "disk", {"disk_storage_path": str(path)}) == "disk_storage_path"
    for value in (1, [str(kv)], {"a": str(kv)}, True):
        assert refused(own, "disk", {"disk_storage_path": value}) == "disk_storage_path"
    assert refused(own, "disk", {}) == "disk_storage_path"  # the default folder is not below it
    assert refused(own, "file", {"file_storage_path": str(kv)}) == "hicache_storage_backend"
    assert refused(own, "disk", {"disk_storage_path": str(kv), "quota_path": str(other)}) == "quota_path"


def test_the_environments_folder_beats_the_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = rules(f"backend=file,path={tmp_path}/kv")
    keys = {"file_storage_path": f"{tmp_path}/kv/x"}
    assert own.wanted("file", json.dumps(keys)).backend == "file"
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "elsewhere"))
    assert refused(own, "file", keys) == "file_storage_path"


GOOD_REDIS = [
    {"url": "redis://cache:6379"}, {"url": "redis://u:p%40@CACHE./3"}, {"url": "rediss://cache"},
    {"sentinels": "cache:6379, cache:6379"}, {"url": "redis://cache", "password": "x", "ttl_s": 3},
]  # fmt: skip
BAD_REDIS = [
    {},
    {"url": "redis://other"},
    {"url": "redis://cache:6380"},
    {"url": "redis://cache@other"},
    {"url": "redis://cache:6379@other"},
    {"url": "redis://cache#@other"},
    {"url": "redis://cache?host=other"},
    {"url": "redis:///0?host=other"},
    {"url": "redis://cache\\@other"},
    {"url": "redis://cache/0?ssl_ca_certs=/etc/x"},
    {"url": "unix:///run/redis.sock"},
    {"url": "redis://[::1]"},
    {"url": "redis://c\u0430che"},
    {"url": "http://cache"},
    {"url": "redis://cache:6379\t"},
    {"url": " redis://cache"},
    {"url": "redis://cache:0"},
    {"url": "redis://a b"},
    {"url": "redis://cache", "sentinels": "other:26379"},
    {"sentinels": "cache:6379,other:1"},
    {"sentinels": "cache"},
    {"url": 7},
    {"url": None},
    {"url": ["redis://cache"]},
    {"url": "redis://cache,other"},
]


@pytest.mark.parametrize("keys", GOOD_REDIS)
def test_a_host_of_redis_is_permitted(keys: dict[str, object]) -> None:
    assert rules("backend=redis,host=cache:6379").wanted("redis", json.dumps(keys)).backend == "redis"


@pytest.mark.parametrize("keys", BAD_REDIS)
def test_no_other_host_of_redis_is(keys: dict[str, object]) -> None:
    assert refused(rules("backend=redis,host=cache:6379"), "redis", keys) in ("url", "sentinels")


def test_a_host_without_a_port_is_any_port_of_it() -> None:
    own = rules("backend=valkey,host=10.0.0.1,host=[::1]:7000")
    for url in ("redis://10.0.0.1:1", "redis://10.0.0.1", "redis://[0:0::1]:7000"):
        assert own.wanted("valkey", json.dumps({"url": url})).backend == "valkey"
    for url in (
        "redis://10.0.0.2",
        "redis://[::1]",
        "redis://167772161",
        "redis://10.1",
        "redis://[::ffff:10.0.0.1]",
    ):
        assert refused(own, "valkey", {"url": url}) == "url"


def test_a_socket_is_a_path(tmp_path: Path) -> None:
    own = rules(f"backend=redis,path={tmp_path}")
    assert own.wanted("redis", json.dumps({"url": f"unix://{tmp_path}/s"})).backend == "redis"
    for url in (
        "unix:///run/s",
        f"unix://{tmp_path}/../s",
        f"unix://{tmp_path}/s?db=1",
        f"unix://{tmp_path}/%2e%2e/s",
    ):
        assert refused(own, "redis", {"url": url}) == "url"


FILES = ("password_file", "tls_ca_file", "tls_cert_file", "tls_key_file", "encryption_key_file")


@pytest.mark.parametrize("key", FILES)
def test_files_are_read_only_where_a_rule_names_them(key: str, tmp_path: Path) -> None:
    keys = {"url": "redis://cache", key: str(tmp_path / "ca.pem")}
    (tmp_path / "link").symlink_to("/etc/passwd")
    assert refused(rules(f"backend=redis,host=cache,path={tmp_path}"), "redis", keys) == key
    own = rules(f"backend=redis,host=cache,file={tmp_path}/ca.pem")
    assert own.wanted("redis", json.dumps(keys)).backend == "redis"
    assert refused(own, "redis", {**keys, key: str(tmp_path / "link")}) == key
    assert refused(own, "redis", {**keys, key: "/etc/passwd"}) == key


GOOD_S3 = [
    ("backend=s3,host=minio:9000", {"url": "s3://any/x", "endpoint": "http://minio:9000"}),
    ("backend=s3,url=s3://b/kv", {"url": "s3://b/kv/x", "region": "eu-central-1"}),
    ("backend=s3,url=gs://b", {"url": "gs://b"}),
]
BAD_S3 = [
    ("backend=s3,host=minio:9000", {"url": "s3://any/x"}),
    ("backend=s3,host=minio:9000", {"url": "gs://any/x", "endpoint": "http://minio:9000"}),
    ("backend=s3,host=minio:9000", {"url": "s3://any/x", "endpoint": "http://minio:9001"}),
    ("backend=s3,host=minio:9000", {"url": "s3://any/x", "endpoint": "http://minio:9000@169.254.169.254"}),
    ("backend=s3,host=minio:9000", {"url": "s3://any/x", "endpoint": "http://169.254.169.254/latest"}),
    ("backend=s3,host=minio:9000", {"url": "s3://any", "endpoint": "https://minio"}),
    ("backend=s3,url=s3://b/kv", {"url": "s3://b/kv2"}),
    ("backend=s3,url=s3://b/kv", {"url": "s3://b/kv/../x"}),
    ("backend=s3,url=s3://b/kv", {"url": "s3://other/kv"}),
    ("backend=s3,url=s3://b/kv", {"url": "s3://b/kv", "endpoint": "http://minio:9000"}),
    ("backend=s3,url=s3://b/kv", {"url": "s3://b/kv", "region": "evil.example/"}),
    ("backend=s3,url=s3://b/kv", {"url": "abfs://b@evil.example/kv"}),
    ("backend=s3,url=s3://b/kv", {"url": "s3://b/kv", "store_options": {"proxy_url": "http://evil"}}),
    ("backend=s3,url=s3://b/kv,host=minio:9000", {"url": "s3://c", "endpoint": "http://minio:9000"}),
]


@pytest.mark.parametrize(("rule", "keys"), GOOD_S3)
def test_buckets_that_are_permitted(rule: str, keys: dict[str, object]) -> None:
    assert rules(rule).wanted("s3", json.dumps(keys)).backend == "s3"


@pytest.mark.parametrize(("rule", "keys"), BAD_S3)
def test_buckets_that_are_not(rule: str, keys: dict[str, object]) -> None:
    assert refused(rules(rule), "s3", keys) in ("url", "endpoint", "region", "store_options")


@pytest.mark.parametrize(
    ("keys", "param"),
    [
        ({"master_server_address": "other:1"}, "master_server_address"),
        ({}, "master_server_address"),
        ({"master_server_address": "master:50051", "metadata_server": "http://other/m"}, "metadata_server"),
        ({"master_server_address": "master:50051", "local_hostname": "other"}, "local_hostname"),
        ({"master_server_address": "master:50051", "device_name": "x"}, "device_name"),
        ({"master_server_address": "master:50051,other:1"}, "master_server_address"),
        ({"master_server_address": "etcd://master:50051"}, "master_server_address"),
    ],
)
def test_members_of_mooncake(keys: dict[str, object], param: str) -> None:
    own = rules("backend=mooncake,host=master")
    assert own.wanted("mooncake", '{"master_server_address": "master:50051"}').backend == "mooncake"
    assert refused(own, "mooncake", keys) == param


def test_both_halves_of_a_tier_are_looked_at(tmp_path: Path) -> None:
    own = rules("backend=tier", f"backend=disk,path={tmp_path}", "backend=redis,host=cache")
    near, far = (
        {"backend": "disk", "disk_storage_path": str(tmp_path)},
        {"backend": "redis", "url": "redis://cache"},
    )
    assert own.wanted("tier", json.dumps({"upper": near, "lower": far, "promote": True})).backend == "tier"
    assert own.wanted(
        "tier", json.dumps({"upper": near, "lower": {"backend": "tier", "upper": near, "lower": far}})
    )
    for half, key in (
        ({**far, "url": "redis://other"}, "lower.url"),
        ({**far, "password_file": "/etc/passwd"}, "lower.password_file"),
        ({"backend": "dynamic", "module_path": "os"}, "lower.backend"),
        ({"backend": "tier", "upper": near, "lower": {**far, "url": "redis://x"}}, "lower.lower.url"),
        ({**near, "disk_storage_path": "/"}, "lower.disk_storage_path"),
        ({**near, "prefetch_threshold": 1}, "lower.prefetch_threshold"),
        ([], "lower"),
        (None, None),
        ({"backend": 1}, "lower"),
    ):
        if key is not None:
            assert refused(own, "tier", {"upper": near, "lower": half}) == key
    deep: dict[str, Any] = near
    for _ in range(50):
        deep = {"backend": "tier", "upper": deep, "lower": near}
    deep.pop("backend")
    assert refused(own, "tier", deep).endswith("upper.backend")


@pytest.mark.parametrize(
    "keys",
    [
        {"no_such_key": 1},
        {"tp_lcm_size": 1},
        {"naming": "sglang"},
        {"checksum": False},
        {"quantise": "fp8"},
        {"num_workers": 10**9},
        {"staging_size": "1TiB"},
        {"staging_size": "x"},
        {"password_env": "HOME"},
        {"deadline_s": {"env": "HOME"}},
        {"compression": ["zstd"]},
        {"compression": "x" * 5000},
    ],
)
def test_settings_that_nobody_may_send(keys: dict[str, object], tmp_path: Path) -> None:
    own = rules(f"backend=file,path={tmp_path}")
    assert refused(own, "file", {"file_storage_path": str(tmp_path), **keys}) == next(iter(keys))


@pytest.mark.parametrize(
    "text", ["@/etc/passwd", "  @x.json", "\u2003@x.json", "{", "[]", "3", "[" * 100_000, "1" * 9999]
)
def test_text_that_is_no_object(text: str, tmp_path: Path) -> None:
    own = rules(f"backend=file,path={tmp_path}")
    assert refused(own, "file", text) == "hicache_storage_backend_extra_config_json"


def test_one_of_several_rules_must_permit_all(tmp_path: Path) -> None:
    own = rules(f"backend=file,path={tmp_path}/a", f"backend=file,path={tmp_path}/b,file={tmp_path}/key")
    keys = {"file_storage_path": f"{tmp_path}/b", "encryption_key_file": f"{tmp_path}/key"}
    assert own.wanted("file", json.dumps(keys))
    assert refused(own, "file", {**keys, "file_storage_path": f"{tmp_path}/a"})


# -- what was prepared ------------------------------------------------------------------


def test_prepared_ones_are_attached_by_name() -> None:
    own = rules(
        cold={"backend": "redis", "url": "redis://far", "password_file": "/etc/key"},
        default={"backend": "file"},
    )
    found = own.named("cold")
    assert found.backend == "redis" and json.loads(found.text or "")["password_file"] == "/etc/key"
    assert "far" not in repr(found) and "far" not in repr(own)
    assert own.wanted("cold", None) == found == own.wanted("cold", "  ")
    assert own.wanted("file", None).name == DEFAULT
    assert refused(own, "cold", "{}") == "hicache_storage_backend"
    assert refused(own, "redis", None) == "hicache_storage_backend"
    for name in ("warm", "", None, ["cold"]):
        with pytest.raises(AttachRefused, match="cold"):
            own.named(name)


def test_what_was_attached_at_start_is_the_default() -> None:
    extra = ExtraConfig(prefetch_threshold=7, backend={"file_storage_path": "/x"})
    found = default_of("file", extra)[DEFAULT]
    assert ExtraConfig.from_mapping(found.keys) == extra and default_of(None, extra) == {}


def test_prepared_ones_are_looked_at_at_start(tmp_path: Path) -> None:
    (tmp_path / "cold.json").write_text('{"backend": "file", "file_storage_path": "/x"}')
    assert parse_prepared("--attachable", "cold", f"@{tmp_path}/cold.json").keys["file_storage_path"] == "/x"
    for name, value in (
        ("default", "{}"),
        ("file", '{"backend": "file"}'),
        ("a b", "{}"),
        ("a", "{}"),
        ("a", "[]"),
        ("a", "{"),
        ("a", '{"backend": "nobody"}'),
        ("a", '{"backend": "file", "tp_lcm_size": 1}'),
        ("a", "@no/such.json"),
    ):
        with pytest.raises(ConfigError, match=f"--attachable {name}"):
            parse_prepared("--attachable", name, value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "disk",
        "path=/x",
        "backend=disk,path=x",
        "backend=dynamic",
        "backend=hf3fs",
        "backend=disk,backend=file",
        "backend=redis,host=a b",
        "backend=redis,host=a:99999",
        "backend=s3,url=http://x",
        "backend=disk,where=/x",
    ],
)
def test_bad_rules_name_the_flag(text: str) -> None:
    with pytest.raises(ConfigError, match="--attach-allow|host"):
        parse_rule(text)


def test_rules_of_settings_beside_what_is_attached_at_start() -> None:
    prepared = {"cold": {"backend": "file", "file_storage_path": "/x"}}
    allowed = ("backend=disk,path=/a,b", "backend=redis,host=cache")
    own = rules_of(prepared, allowed, str, default_of("disk", ExtraConfig()))
    assert set(own.prepared) == {"cold", DEFAULT} and [rule.backend for rule in own.rules] == [
        "disk",
        "redis",
    ]
    assert own.rules[0].folders == ("/a,b",)
    assert rules_of({}, (), str, default_of(None, ExtraConfig())) == AttachRules()
    with pytest.raises(ConfigError, match="^HIRADIX_ATTACH_ALLOW no"):
        rules_of({}, ("no",), lambda name: f"HIRADIX_{name.upper()}")


# -- what is told -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Error 111 connecting to 10.0.0.9:6379. Connection refused.", "connect: refused"),
        ("not open within 60 s", "connect: timed out"),
        ("Error -2 connecting to evil:1. Name or service not known.", "connect: unknown host"),
        ("AuthenticationError: invalid username-password pair", "connect: not admitted"),
        (f"{EXTRA_CONFIG_FLAG}: ttl_s must be number, got str", "ttl_s: bad value"),
        (f"{EXTRA_CONFIG_FLAG}: connect_timeout_s must be number", "connect_timeout_s: bad value"),
        (
            f"{EXTRA_CONFIG_FLAG}: password_file: cannot read /etc/shadow: [Errno 13]",
            "password_file: could not",
        ),
        (f"{EXTRA_CONFIG_FLAG}: root:x:0:0 is no key", "hicache_storage_backend: could not"),
        (f"{EXTRA_CONFIG_FLAG}: lower: {EXTRA_CONFIG_FLAG}: url: no", "lower.url: could not"),
        (
            f"{EXTRA_CONFIG_FLAG}: upper: {EXTRA_CONFIG_FLAG}: lower: {EXTRA_CONFIG_FLAG}: ttl_s must be",
            "upper.lower.ttl_s: bad value",
        ),
        ("-ERR root:x:0:0:root:/root:/bin/bash", "hicache_storage_backend: could not"),
        ("<html>internal secret</html>", "hicache_storage_backend: could not"),
    ],
)
def test_an_answer_has_a_setting_and_a_kind_of_failure(text: str, told: str) -> None:
    answer = over_http(f"Failed to attach storage backend 'redis': {text}")
    assert answer.startswith(told) and not re.search(r"root|/etc|10\.0|evil|secret", answer)


@pytest.mark.parametrize(
    "text",
    [
        "Reject attach: scheduler is not idle. #queue-req=1 #running-req=2",
        "HiCache storage backend is already enabled with backend 'file'. "
        "Cannot attach different backend 'disk'. Detach first.",
        "Invalid hicache_write_policy: 'x'. Expected one of ['write_back', 'write_through'].",
        "Hierarchical cache is not enabled.",
    ],
)
def test_our_own_words_are_answered(text: str) -> None:
    assert over_http(text) == text


@pytest.mark.parametrize("flag", ["hicache_write_policy", "hicache_storage_prefetch_policy"])
def test_a_policy_that_is_no_word_is_named(flag: str) -> None:
    told = over_http(f"Invalid {flag}: 'root:x:0\\n'. Expected one of ['write_back'].")
    assert told == f"{flag}: bad value; the server's log says more"


def test_the_log_has_the_text_without_secrets() -> None:
    told = in_log("could not: hunter2 at redis://u:pw@h\nwith wJalrXUtn", json.dumps(SECRETS))
    assert told == "could not: *** at redis://***@h with ***"
