"""`hiradix config`: check, show, explain, example and migrate, as a user calls them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hiradix.adapters.vllm.settings import parse_settings
from hiradix.apps.configure.catalogue import known
from hiradix.apps.configure.example import example_toml
from hiradix.apps.lmcache.keys import EXTRA_KEYS, KEYS, Fate
from hiradix.apps.lmcache.migrate import _Migration, from_variables, migrate
from hiradix.apps.lmcache.toml_text import toml
from hiradix.apps.server.flag_table import FLAGS, TABLE
from hiradix.apps.server.flags import parse_serve_args, resolve_serve
from hiradix.cli import main
from hiradix.config import parse_extra_config
from hiradix.errors import ConfigError
from hiradix.settings import PREFIX
from tests.project.repo import ROOT

LMCACHE = """\
chunk_size: 256
local_cpu: true
max_local_cpu_size: 20
local_disk: "file:///data/pages/"
max_local_disk_size: 100
remote_url: "redis://bob:k1secret@cache:6379/3"
remote_serde: "cachegen"
cache_policy: "LRU"
save_decode_cache: true
blocking_timeout_secs: 4
extra_config:
  use_odirect: true
  ping_interval: 30
"""


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith((PREFIX, "LMCACHE_")):
            monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "serve.toml"
    path.write_text(f'model_path = "{tmp_path}"\nport = 1\nadmin_api_key = "k1secret"\nlog_level = "debug"\n')
    path.chmod(0o600)
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> tuple[str, str]:
    assert main(["config", *map(str, arguments)]) == status
    found = capsys.readouterr()
    assert not re.search(r"k\dsecret", found.out + found.err)
    return found.out, found.err


def test_check_says_all_that_is_wrong(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "check", file)[0] == "ok: 5 settings are given, the rest are defaults\n"
    file.write_text(file.read_text() + "prot = 1\npage_size = 0\n")
    out, err = run(capsys, "check", file, status=2)
    assert err.splitlines() == [
        f"error: {file}:5: 'prot' is no setting; did you mean port?",
        f"error: {file}:6: page_size must be >= 1, got 0",
    ]
    told = json.loads(run(capsys, "check", "--json", file, status=2)[0])
    assert (told["ok"], len(told["problems"])) == (False, 2)
    assert "did you mean" in run(capsys, "check", "--prot=1", status=2)[1]


def test_check_looks_at_what_only_makes_sense_together(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, err = run(capsys, "check", file, "--hicache-storage-backend", "disk", status=2)
    assert err == "error: --hicache-storage-backend disk needs --enable-hierarchical-cache\n"
    out, _ = run(capsys, "check", file, "--hicache-size", "3")
    assert out.startswith("note: --hicache-size: nothing without --enable-hierarchical-cache\n")


def test_show_says_each_value_and_who_says_it(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIRADIX_PORT", "2")
    monkeypatch.setenv("HIRADIX_API_KEY", "k2secret")
    found = json.loads(run(capsys, "show", "--json", "--config", file, "--page-size", "8")[0])
    rows = {row["name"]: row for row in found["settings"]}
    assert list(rows) == [one.name for one in TABLE]
    port = {
        "name": "port",
        "value": 2,
        "source": "environment",
        "place": "HIRADIX_PORT",
        "overrules": [f"{file}:2"],
    }
    assert rows["port"] == port
    shown = {name: (row["value"], row["source"], row["place"]) for name, row in rows.items()}
    assert shown["page_size"] == (8, "flag", "--page-size")
    assert shown["log_level"] == ("debug", "file", f"{file}:4")
    assert shown["admin_api_key"] == ("***", "file", f"{file}:3")
    assert shown["api_key"] == ("***", "environment", "HIRADIX_API_KEY")
    assert shown["dtype"] == ("float32", "default", None)
    lines = run(capsys, "show", "--given", "--config", file)[0].splitlines()
    assert [line.split()[0] for line in lines] == [
        "config",
        "model_path",
        "port",
        "api_key",
        "admin_api_key",
        "log_level",
    ]
    assert lines[2].split(maxsplit=1)[1].strip() == f"2                         HIRADIX_PORT (over {file}:2)"


def test_show_hides_the_secrets_of_stores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extra = json.dumps({"lower": {"backend": "redis", "password": "k1secret", "url": "redis://:k1secret@h"}})
    prepared = 'cold={"backend": "file", "encryption_key": "k1secret"}'
    arguments = ["--hicache-storage-backend-extra-config", extra, "--attachable", prepared]
    out, _ = run(capsys, "show", "--given", *arguments)
    assert out.count("***") == 3
    extra = json.dumps({"lower": {"options": '{"password": "k1secret"}', "all": ['["k1secret"]']}})
    arguments = ["--hicache-storage-backend-extra-config", extra, "--attachable", 'cold=["k1secret"]']
    out, _ = run(capsys, "show", "--given", *arguments)
    assert out.count("***") == 3, "JSON within"


@pytest.mark.parametrize("entry", known(), ids=lambda entry: f"{entry.owner}-{entry.one.name}")
def test_each_setting_is_explained(entry: Any) -> None:
    lines = list(entry.lines())
    assert lines[0].startswith(entry.one.name) and entry.one.text.replace("`", "") in lines[1]
    assert entry.status == "refused" or any("over HTTP" in line for line in lines)
    assert entry.as_json()["said"] == dict(entry.said)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hicache_size", "HIRADIX_HICACHE_SIZE"),
        ("--tp", "also called"),
        ("HIRADIX_CHECK", "check_invariants"),
        ("HIRADIX_LOAD_MODE", "kv_connector_extra_config: load_mode"),
        ("disk.max_size", "storage, of disk"),
        ("hicache_io_backend", "kernel_ascend: Ascend NPUs"),
        ("hicache_no_regret", "HIRADIX_HICACHE_NO_REGRET, hicache_storage_backend_extra_config"),
        ("enable_hisparse", "refused"),
        ("password", "password_env names"),
        ("save_decode_cache", "always so"),
    ],
)
def test_explain(name: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in run(capsys, "explain", name)[0]
    assert json.loads(run(capsys, "explain", "--json", name)[0])


def test_explain_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    _, err = run(capsys, "explain", "hicahe_size", status=2)
    assert err == "hiradix config explain: error: hicahe_size is no setting; did you mean hicache_size?\n"


def test_the_example_is_what_the_server_takes_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "serve.toml"
    path.write_text(example_toml())
    bare = ["--model-path", str(tmp_path)]
    assert parse_serve_args([*bare, "--config", str(path)], {}).engine == parse_serve_args(bare, {}).engine
    found = resolve_serve(["--config", str(path)], {})
    assert found.problems == ()
    text = example_toml()
    assert all(
        f"\n{one.name} = " in text or f"#: {one.name} = " in text or f"[{one.name}]" in text
        for one in TABLE[1:]
    )


# -- from LMCache -------------------------------------------------------------------------


def test_a_file_of_lmcaches_becomes_one_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lmcache.yaml"
    path.write_text(LMCACHE)
    out, _ = run(capsys, "migrate", path)
    settings = tomllib.loads(out)
    extra = settings.pop("hicache_storage_backend_extra_config")
    assert settings == {
        "page_size": 256, "enable_hierarchical_cache": True, "hicache_size": 21.475,
        "hicache_storage_backend": "tier", "radix_eviction_policy": "lru",
    }  # fmt: skip
    assert extra == {
        "upper": {"backend": "disk", "disk_storage_path": "/data/pages/", "max_size": 100 << 30,
                  "direct_io": "on"},
        "lower": {
            "backend": "redis", "url": "redis://cache:6379/3", "username": "bob",
            "password_env": "REDIS_PASSWORD",
            "deadline_s": 4.0, "breaker_retry_s": 30.0,
        },
    }  # fmt: skip
    told = [line.removeprefix("# ") for line in out.splitlines() if line.startswith("# ")][1:]
    names = [line.partition(":")[0] for line in told]
    assert names[:11] == [line.partition(":")[0] for line in LMCACHE.splitlines()[:11]]
    assert names[11:] == ["extra_config.use_odirect", "extra_config.ping_interval"]


def test_what_was_migrated_is_what_the_server_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_PASSWORD", "k1secret")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "lmcache.yaml").write_text(LMCACHE)
    ours = tmp_path / "hiradix.toml"
    ours.write_text(run(capsys, "migrate", tmp_path / "lmcache.yaml")[0])
    config = parse_serve_args(["--config", str(ours), "--model-path", str(tmp_path)])
    assert config.engine.cache.hicache_storage_backend == "tier"
    for_vllm = json.loads(run(capsys, "migrate", "--for", "vllm", tmp_path / "lmcache.yaml")[0])
    assert parse_settings(for_vllm, 16).cache.hicache_size == 21.475
    for_sglang = run(capsys, "migrate", "--for", "sglang", tmp_path / "lmcache.yaml")[0]
    assert parse_extra_config(for_sglang).backend["lower"]["password"] == "k1secret"


def test_variables_of_lmcaches_are_a_file_of_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {
        "CHUNK_SIZE": "128",
        "LOCAL_CPU": "True",
        "CACHE_POLICY": "LFU",
        "EXTRA_CONFIG": "{}",
    }.items():
        monkeypatch.setenv(f"LMCACHE_{name}", text)
    told = json.loads(run(capsys, "migrate", "--json")[0])
    ours = {"page_size": 128, "enable_hierarchical_cache": True, "radix_eviction_policy": "lfu"}
    assert told["settings"] == ours
    assert {key["name"]: key["fate"] for key in told["keys"]} == {
        "chunk_size": "becomes", "local_cpu": "becomes", "cache_policy": "becomes", "extra_config": "not here",
    }  # fmt: skip
    assert from_variables({"LMCACHE_MAX_LOCAL_CPU_SIZE": "5.0"}) == {"max_local_cpu_size": 5.0}


URLS = [
    ("redis://h:1", "redis", {"url": "redis://h:1"}),
    ("rediss://h:1", "redis", {"url": "rediss://h:1"}),
    ("unix:///run/redis.sock", "redis", {"url": "unix:///run/redis.sock"}),
    ("redis-sentinel://a:1,b:2", "redis", {"url": "redis://master", "sentinels": "a:1,b:2"}),
    ("valkey://h:1", "valkey", {"url": "redis://h:1"}),
    ("s3://bucket/pages", "s3", {"url": "s3://bucket/pages"}),
    ("fs://host:0/shared/pages", "file", {"file_storage_path": "/shared/pages"}),
    (
        "mooncakestore://h:1/?device=mlx5_0",
        "mooncake",
        {"master_server_address": "h:1", "device_name": "mlx5_0"},
    ),
]


@pytest.mark.parametrize(("url", "backend", "keys"), URLS)
def test_each_remote_store_becomes_a_backend(url: str, backend: str, keys: dict[str, Any]) -> None:
    settings = migrate({"remote_url": url}).settings
    assert settings["hicache_storage_backend"] == backend
    assert settings["hicache_storage_backend_extra_config"] == keys
    assert settings["enable_hierarchical_cache"]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis-sentinel://bob:k1secret@a:1,b:2", ""),
        ("redis://:k1/secret@h:1", "remote_url: a / ? or # of a password is written %2F"),
        ("redis://:k1#secret@h:1", "remote_url: a / ? or # of a password is written %2F"),
        ("s3://name:k1secret@bucket/pages", "remote_url: this store takes no name and password"),
        ("mooncakestore://name:k1secret@h:1", "remote_url: this store takes no name and password"),
        ("redis:k1secret@h:1", "remote_url: expected a URL"),
        ("redis://:k1secret@[h:1", "remote_url: is no URL that can be read"),
    ],
)
def test_no_password_of_a_url_is_repeated(url: str, message: str) -> None:
    try:
        done = migrate({"remote_url": url})
    except ConfigError as error:
        assert message and str(error).startswith(message) and "secret" not in str(error)
        return
    assert not message and "secret" not in str(done)
    assert done.settings["hicache_storage_backend_extra_config"] == {
        "url": "redis://master", "sentinels": "a:1,b:2", "username": "bob", "password_env": "REDIS_PASSWORD",
    }  # fmt: skip


@pytest.mark.parametrize("scheme", ["lm", "infinistore", "eic", "external", "audit", "blackhole"])
def test_a_store_that_is_not_spoken_to_is_told(scheme: str) -> None:
    done = migrate({"remote_url": f"{scheme}://h:1"})
    assert done.settings == {} and done.told[0].text.startswith("nothing: ")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"chunk_sise": 1}, "chunk_sise: is no setting of LMCache's that is known; did you mean chunk_size?"),
        ({"chunk_size": "x"}, "chunk_size must be number, got str"),
        ({"local_cpu": 1}, "local_cpu must be bool, got int"),
        ({"cache_policy": "ARC"}, "cache_policy: 'arc' is not known; known: lru, lfu, fifo, mru"),
        ({"remote_url": "ftp://h"}, "remote_url: scheme 'ftp' is not known; known: redis"),
        ({"remote_url": "fs://h:0/a,/b"}, "remote_url: several folders become one"),
        ({"remote_serde": "zip"}, "remote_serde: 'zip' is not known"),
        ({"extra_config": 3}, "extra_config must be an object, got int"),
    ],
)
def test_a_value_that_lmcache_would_not_take_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        migrate(values)
    assert str(caught.value).startswith(message)


def test_each_key_that_becomes_a_setting_is_made_and_names_one_there_is() -> None:
    names = {entry.one.name for entry in known()} | {"access_key_id_env", "secret_access_key_env"}
    for key in (*KEYS.values(), *EXTRA_KEYS.values()):
        assert {to.rpartition(".")[2] for to in key.to} <= names, key
        assert key.fate is Fate.BECOMES or not key.to
    made = {name.removeprefix("_") for name in vars(_Migration) if not name.startswith("_extra")}
    assert [key.name for key in KEYS.values() if key.to and key.name not in made | {"config_file"}] == []


def test_the_inventory_of_keys_is_whole() -> None:
    """The keys that LMCache documents, its newer ones beside them."""
    documented = """
        chunk_size local_cpu max_local_cpu_size local_disk max_local_disk_size remote_url
        remote_serde use_layerwise save_decode_cache pre_caching_hash_algorithm enable_blending
        blend_recompute_ratio blend_min_tokens blend_special_str enable_p2p lookup_url
        distributed_url error_handling enable_controller lmcache_instance_id controller_url
        lmcache_worker_port enable_nixl nixl_role nixl_receiver_host nixl_receiver_port
        nixl_buffer_size nixl_buffer_device nixl_enable_gc enable_xpyd nixl_peer_host
        nixl_peer_init_port nixl_peer_alloc_port nixl_proxy_host nixl_proxy_port weka_path gds_path
        cufile_buffer_size audit_actual_remote_url extra_config save_unfull_chunk
        blocking_timeout_secs external_lookup_client py_enable_gc cache_policy
        cache_engine_internal_api_server_enabled cache_engine_internal_api_server_port_start
    """.split()
    assert [name for name in documented if name not in KEYS] == []


VALUES = st.recursive(
    st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=1), inner, max_size=4)
    | st.lists(st.integers(), max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=1, max_size=5), VALUES, max_size=5))
def test_toml_that_is_written_is_read_back(values: dict[str, Any]) -> None:
    assert tomllib.loads(toml(values)) == values


def test_the_command_needs_no_torch() -> None:
    code = (
        "import sys\nfrom hiradix.cli import main\nassert main(['config', 'explain', 'port']) == 0\n"
        "assert not {'torch', 'transformers', 'fastapi', 'uvicorn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=True, capture_output=True)


def test_refused_flags_are_explained_with_their_reason() -> None:
    for flag in FLAGS:
        if flag.status == "refused":
            assert any(entry.one.name == flag.setting.name and entry.status == "refused" for entry in known())
