"""Settings of remote backends that cannot be followed, or would be left aside: errors that name the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hiradix.config import EXTRA_CONFIG_FLAG
from hiradix.errors import ConfigError
from hiradix.storage import PageFingerprint, StorageContext, open_storage
from hiradix.storage.backends.mooncake.config import MooncakeConfig
from hiradix.storage.backends.redis.config import RedisConfig
from hiradix.storage.backends.s3.config import S3Config
from tests.storage_servers.servers import ACCESS, Server, redis_keys

TOO_MUCH: tuple[Any, ...] = (float("inf"), float("nan"), 1e308, 10**30, 10**400, 1e12, -1)
S3 = {"url": "s3://pages/x", "endpoint": "http://127.0.0.1:9", **ACCESS}
MASTER = {"master_server_address": "127.0.0.1:50051"}


def refused(make: Any, keys: dict[str, Any], message: str) -> str:
    with pytest.raises(ConfigError, match=message) as raised:
        make(keys)
    return str(raised.value)


@pytest.mark.parametrize("key", ["ttl_s", "timeout_s", "connect_timeout_s"])
@pytest.mark.parametrize("value", TOO_MUCH)
def test_redis_seconds_beyond_any_clock(key: str, value: Any) -> None:
    refused(RedisConfig.from_mapping, {key: value}, f"^{EXTRA_CONFIG_FLAG}: {key} must be")


@pytest.mark.parametrize("value", [1e-300, 0.0004, 0.00099])
def test_redis_pages_that_live_for_no_millisecond(value: float) -> None:
    """Redis counts milliseconds: less became 0, which is for ever."""
    refused(RedisConfig.from_mapping, {"ttl_s": value}, f"{EXTRA_CONFIG_FLAG}: ttl_s must be 0 or .* 0.001")


def test_redis_pages_that_live_long_enough(own_redis: Server) -> None:
    for value in (0, 0.001, 0.0015, 1e9):
        keys = {**redis_keys(own_redis), "ttl_s": value, "deadline_s": 60.0}
        store = open_storage("redis", StorageContext(PageFingerprint("model"), keys, 8))
        assert store.put(["key"], [[memoryview(b"a" * 8)]]) == [True]
        store.close()


@pytest.mark.parametrize(
    "address",
    ["a:0", "a:65536", "a:99999999999999999999", "a:-1", "a:x", "a:", "a", ":1", "a:²", "a:1,b", "a:1 b:2",
     "ok:1,a:99999", " , "],
)  # fmt: skip
def test_sentinels_at_no_port(address: str) -> None:
    refused(RedisConfig.from_mapping, {"sentinels": address}, f"^{EXTRA_CONFIG_FLAG}: sentinels: ")


def test_sentinels_at_ports() -> None:
    made = RedisConfig.from_mapping({"sentinels": " a:1 , [::1]:65535,", "sentinel_service": "pages"})
    assert made.sentinels == (("a", 1), ("::1", 65535))


@pytest.mark.parametrize("key", ["tls_ca_file", "tls_cert_file", "tls_key_file"])
@pytest.mark.parametrize("url", [None, "redis://127.0.0.1:1/0", "unix:///tmp/s"])
def test_redis_certificates_without_tls(key: str, url: str | None, tmp_path: Path) -> None:
    """They were left aside, and what was to be encrypted was not."""
    (tmp_path / "pem").write_text("x")
    keys = {key: str(tmp_path / "pem")} | ({} if url is None else {"url": url})
    refused(RedisConfig.from_mapping, keys, f"{EXTRA_CONFIG_FLAG}: {key} .*: url .* rediss://")


@pytest.mark.parametrize("key", ["tls_ca_file", "tls_cert_file", "tls_key_file"])
def test_redis_certificates_that_cannot_be_read(key: str, tmp_path: Path) -> None:
    own = {"tls_cert_file": __file__} if key == "tls_key_file" else {}
    keys = {"url": "rediss://127.0.0.1:1/0", **own, key: str(tmp_path / "none.pem")}
    refused(RedisConfig.from_mapping, keys, f"^{EXTRA_CONFIG_FLAG}: {key}: cannot read")


def test_redis_key_without_its_certificate() -> None:
    keys = {"url": "rediss://127.0.0.1:1/0", "tls_key_file": __file__}
    refused(RedisConfig.from_mapping, keys, "tls_key_file .*tls_cert_file")


@pytest.mark.parametrize("key", ["sentinel_service", "sentinel_password"])
def test_redis_sentinel_keys_without_sentinels(key: str) -> None:
    message = refused(RedisConfig.from_mapping, {key: "s3cret"}, f"{key} .*sentinels")
    assert "s3cret" not in message


def test_redis_sentinels_tls_without_sentinels_or_tls() -> None:
    keys = {"sentinel_tls": True, "url": "rediss://h/0"}
    refused(RedisConfig.from_mapping, keys, "sentinel_tls .*sentinels")
    keys |= {"url": "redis://h/0", "sentinels": "a:1"}
    refused(RedisConfig.from_mapping, keys, "sentinel_tls .*rediss:")


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"password": "s3cret", "password_file": __file__}, ("password", "password_file")),
        ({"url": "redis://:0ther@h/0", "password": "s3cret"}, ("password", "url")),
        ({"url": "redis://h/0?password=0ther", "password": "s3cret"}, ("password", "url")),
        ({"url": "redis://:0ther@h/0", "password_file": __file__}, ("password_file", "url")),
        ({"url": "redis://me:0ther@h/0", "username": "s3cret"}, ("username", "url")),
    ],
)
def test_redis_secrets_that_are_given_twice(keys: dict[str, Any], named: tuple[str, str]) -> None:
    """Only one of the two was used."""
    message = refused(RedisConfig.from_mapping, keys, ".*".join(f": {name}" for name in named))
    assert "s3cret" not in message and "0ther" not in message


def test_redis_user_in_the_url_and_password_beside_it() -> None:
    made = RedisConfig.from_mapping({"url": "redis://me@h/0", "password": "s3cret"})
    assert made.secrets == {"password": "s3cret"}


@pytest.mark.parametrize("key", ["password", "sentinel_password"])
def test_a_secret_of_the_wrong_type_is_not_shown(key: str) -> None:
    message = refused(RedisConfig.from_mapping, {key: 271828, "sentinels": "a:1"}, f"{key} must be text")
    assert "271828" not in message


@pytest.mark.parametrize("url", ["redis://h:99999/0", "redis://h:0/0", "redis://h:-1/0", "redis://h:x/0"])
def test_redis_at_no_port(url: str) -> None:
    refused(RedisConfig.from_mapping, {"url": url}, f"^{EXTRA_CONFIG_FLAG}: url")


@pytest.mark.parametrize("key", ["timeout_s", "connect_timeout_s", "retry_timeout_s", "max_size"])
@pytest.mark.parametrize("value", [value for value in TOO_MUCH if value != 1e12])
def test_s3_numbers_beyond_any_clock(key: str, value: Any) -> None:
    refused(S3Config.from_mapping, {**S3, key: value}, f"^{EXTRA_CONFIG_FLAG}: {key}")


@pytest.mark.parametrize("key", ["request_retries", "num_connections"])
@pytest.mark.parametrize("value", [10**30, 2**32, -1])
def test_s3_counts_beyond_any_machine(key: str, value: int) -> None:
    refused(S3Config.from_mapping, {**S3, key: value}, f"^{EXTRA_CONFIG_FLAG}: {key} must be")


@pytest.mark.parametrize(
    "endpoint",
    ["127.0.0.1:9000", "9" * 40, "http://", "http://:80", "ftp://h", "http://h:99999", "http://h:x",
     "http://a b", "http://h:0"],
)  # fmt: skip
@pytest.mark.parametrize("inside", [False, True])
def test_s3_at_no_address(endpoint: str, inside: bool) -> None:
    """With some the library panics, which no handler of errors sees."""
    keys = {**S3, "store_options": {"endpoint": endpoint}} if inside else {**S3, "endpoint": endpoint}
    refused(S3Config.from_mapping, keys, f"^{EXTRA_CONFIG_FLAG}: endpoint")


@pytest.mark.parametrize(
    "endpoint", ["http://h", "https://h:443/", "http://[::1]:9/x", "http://10.0.0.1:9000"]
)
def test_s3_at_an_address(endpoint: str) -> None:
    assert S3Config.from_mapping({**S3, "endpoint": endpoint}).settings["endpoint"] == endpoint


@pytest.mark.parametrize("key", ["access_key_id", "secret_access_key", "session_token", "region"])
@pytest.mark.parametrize("value", ["s3cret\n", "s3cr\x7fet", "s3crèt"])
@pytest.mark.parametrize("inside", [False, True])
def test_s3_text_that_no_request_takes(key: str, value: str, inside: bool) -> None:
    """With a line's end, as a file has one, the library panics."""
    keys = {**S3, "store_options": {key: value}} if inside else {**S3, key: value}
    message = refused(S3Config.from_mapping, keys, f"^{EXTRA_CONFIG_FLAG}: {key} must be")
    assert "s3cr" not in message


@pytest.mark.parametrize("options", [{"proxy_url": "::::"}, {"timeout": "1s"}, {"region": 5}])
def test_s3_options_with_which_the_library_panics(options: dict[str, Any]) -> None:
    context = StorageContext(PageFingerprint("model"), {**S3, "store_options": options}, 8)
    with pytest.raises(ConfigError, match="storage-backend"):
        open_storage("s3", context)


@pytest.mark.parametrize("value", TOO_MUCH)
def test_mooncake_seconds_beyond_any_clock(value: Any) -> None:
    refused(MooncakeConfig.from_mapping, {**MASTER, "timeout_s": value}, "timeout_s must be")


@pytest.mark.parametrize("key", ["global_segment_size", "buffer_size", "replica_num"])
@pytest.mark.parametrize("value", [10**30, 2**63, -1])
def test_mooncake_numbers_beyond_any_machine(key: str, value: int) -> None:
    refused(MooncakeConfig.from_mapping, {**MASTER, key: value}, f"^{EXTRA_CONFIG_FLAG}: {key}")


@pytest.mark.parametrize("port", ["", ":", ":0", ":65536", ":x", ":99999999999999999999"])
def test_mooncake_master_at_no_port(port: str) -> None:
    context = StorageContext(PageFingerprint("model"), {"master_server_address": f"127.0.0.1{port}"}, 8)
    with pytest.raises(ConfigError, match=f"^{EXTRA_CONFIG_FLAG}: master_server_address: cannot reach"):
        open_storage("mooncake", context)


def test_nixl_memory_beyond_any_machine(tmp_path: Path) -> None:
    keys = {"file_storage_path": str(tmp_path), "buffer_size": 10**30}
    with pytest.raises(ConfigError, match="buffer_size: .* too large"):
        open_storage("nixl", StorageContext(PageFingerprint("model"), keys, 4096))
