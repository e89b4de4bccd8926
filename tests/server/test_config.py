"""The cache configuration: defaults, checks that name the flag, normalisation, extra config."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hiradix.config import DEFAULT_HICACHE_RATIO, HiCacheConfig, normalise, parse_extra_config
from hiradix.errors import ConfigError
from hiradix.settings import redact


def test_defaults_are_those_of_upstream_but_for_the_policy() -> None:
    config = HiCacheConfig()
    assert (config.hicache_write_policy, config.hicache_io_backend, config.hicache_mem_layout) == (
        "write_through",
        "kernel",
        "page_first",
    )
    assert (config.hicache_storage_prefetch_policy, config.radix_eviction_policy) == ("timeout", "ghd")
    assert (DEFAULT_HICACHE_RATIO, config.hicache_size, config.hicache_host_memory_fraction) == (2.0, 0, 0.8)
    extra = parse_extra_config(None)
    assert (extra.prefetch_threshold, extra.prefetch_timeout_base) == (256, 1.0)
    assert (extra.prefetch_timeout_per_ki_token, extra.hicache_storage_pass_prefix_keys) == (0.25, False)


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("page_size", 0, "--page-size"),
        ("page_size", True, "--page-size"),
        ("page_size", 1.5, "--page-size"),
        ("hicache_ratio", 0, "--hicache-ratio"),
        ("hicache_ratio", float("nan"), "--hicache-ratio"),
        ("hicache_size", -1, "--hicache-size"),
        ("hicache_host_memory_fraction", 0.0, "--hicache-host-memory-fraction must be in (0, 1]."),
        ("hicache_host_memory_fraction", 1.1, "--hicache-host-memory-fraction must be in (0, 1]."),
        ("hicache_write_policy", "x", "--hicache-write-policy"),
        ("hicache_io_backend", "kernel_ascend", "--hicache-io-backend kernel_ascend"),
        ("hicache_mem_layout", "page_head", "--hicache-mem-layout page_head"),
        ("hicache_mem_layout", None, "--hicache-mem-layout"),
        ("hicache_host_memory_mode", "buffer_only", "--hicache-host-memory-mode buffer_only"),
        ("hicache_storage_prefetch_policy", "never", "--hicache-storage-prefetch-policy"),
        ("hicache_storage_backend", "file", "needs --enable-hierarchical-cache"),
        ("hicache_storage_backend", " ", "--hicache-storage-backend"),
        ("hicache_storage_backend_extra_config", {}, "-extra-config: expected an ExtraConfig"),
        ("radix_eviction_policy_config", "x", "--radix-eviction-policy-config"),
    ],
)
def test_bad_value_names_the_flag(field: str, value: object, flag: str) -> None:
    with pytest.raises(ConfigError) as caught:
        HiCacheConfig(**{field: value})  # type: ignore[arg-type]
    assert flag in str(caught.value)


def test_cache_on_and_off_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="mutually exclusive"):
        HiCacheConfig(enable_hierarchical_cache=True, disable_radix_cache=True)


@pytest.mark.parametrize(
    ("layout", "io_backend", "storage", "expected", "num_warnings"),
    [
        ("page_first", "kernel", None, ("page_first", "kernel"), 0),
        ("page_first", "direct", None, ("page_first_direct", "direct"), 1),
        ("page_first_direct", "kernel", None, ("page_first_direct", "direct"), 1),
        ("page_first_direct", "direct", None, ("page_first_direct", "direct"), 0),
        ("layer_first", "direct", None, ("layer_first", "direct"), 0),
        ("layer_first", "direct", "mooncake", ("page_first_direct", "direct"), 1),
        ("layer_first", "kernel", "mooncake", ("page_first", "kernel"), 1),
    ],
)
def test_normalisation(
    layout: str, io_backend: str, storage: str | None, expected: tuple[str, str], num_warnings: int
) -> None:
    config = HiCacheConfig(
        enable_hierarchical_cache=True,
        hicache_mem_layout=layout,
        hicache_io_backend=io_backend,
        hicache_storage_backend=storage,
    )
    once, warnings = normalise(config)
    assert (once.hicache_mem_layout, once.hicache_io_backend) == expected
    assert len(warnings) == num_warnings
    assert normalise(once) == (once, ())


def test_what_is_set_for_a_host_tier_that_is_off_is_said_to_do_nothing() -> None:
    assert normalise(HiCacheConfig()) == (HiCacheConfig(), ())
    config = HiCacheConfig(hicache_io_backend="direct", hicache_ratio=2.0)
    same, notes = normalise(config)
    assert same == config
    assert notes == ("--hicache-ratio, --hicache-io-backend: nothing without --enable-hierarchical-cache",)


FORMS = {
    "a.json": '{"prefetch_threshold": 64, "dir": "/x"}',
    "a.toml": 'prefetch_threshold = 64\ndir = "/x"\n',
    "a.yaml": "prefetch_threshold: 64\ndir: /x\n",
}


@pytest.mark.parametrize("name", FORMS)
def test_extra_config_from_a_file(name: str, tmp_path: Path) -> None:
    if name.endswith(".yaml"):
        pytest.importorskip("yaml")
    path = tmp_path / name
    path.write_text(FORMS[name])
    extra = parse_extra_config(f"@{path}")
    assert (extra.prefetch_threshold, dict(extra.backend)) == (64, {"dir": "/x"})


def test_yaml_without_its_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("a: 1")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match="pip install pyyaml"):
        parse_extra_config(f"@{path}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid"),
        ("[1]", "expected an object"),
        ("[" * 100_000, "not valid"),
        ('{"prefetch_threshold": true}', "prefetch_threshold must be int, got bool"),
        ('{"prefetch_threshold": -1}', "prefetch_threshold must be >= 0"),
        ('{"prefetch_timeout_base": "1"}', "prefetch_timeout_base must be number, got str"),
        ('{"prefetch_timeout_base": NaN}', "prefetch_timeout_base must be a finite number"),
        ('{"prefetch_timeout_base": 1' + 400 * "0" + "}", "prefetch_timeout_base must be at most"),
        (
            '{"prefetch_timeout_per_ki_token": false}',
            "prefetch_timeout_per_ki_token must be number, got bool",
        ),
        ('{"hicache_storage_pass_prefix_keys": 1}', "hicache_storage_pass_prefix_keys must be bool, got int"),
        ('{"tp_lcm_size": 2}', "tp_lcm_size"),
        ('{"allocator": "shm"}', "allocator"),
        ("@nowhere/cache.json", "cannot read"),
        ("@nowhere/cache.ini", "Unsupported config file nowhere/cache.ini (config format: .ini)"),
    ],
)
def test_malformed_extra_config_names_flag_and_key(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_extra_config(text)
    assert str(caught.value).startswith("--hicache-storage-backend-extra-config")
    assert words in str(caught.value)


def test_a_parse_error_does_not_repeat_the_text() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_extra_config('{"password": "hunter2"')
    assert "hunter2" not in str(caught.value)


@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | st.booleans(), max_size=5))
def test_unknown_keys_reach_the_backend_unchanged(values: dict[str, object]) -> None:
    values.pop("allocator", None)
    assert dict(parse_extra_config(json.dumps(values)).backend) == values


def test_redaction_hides_secrets_and_nothing_else() -> None:
    shown = redact(
        {
            "aws_secret_access_key": "s",
            "password": "p",
            "token": "t",
            "url": "redis://user:pw@host/0",
            "nested": [{"api_key": "k"}],
            "prefetch_timeout_per_ki_token": 0.25,
            "timeout_s_per_ki_token": 0.25,  # the same, as /server_info has it
            "max_size": 10,
        }
    )
    assert shown == {
        "aws_secret_access_key": "***",
        "password": "***",
        "token": "***",
        "url": "redis://***@host/0",
        "nested": [{"api_key": "***"}],
        "prefetch_timeout_per_ki_token": 0.25,
        "timeout_s_per_ki_token": 0.25,
        "max_size": 10,
    }


@pytest.mark.parametrize(
    "url",
    ["redis://host/0?{}", "redis://host/0?db=1&{}&x=2", "unix:///p?{}", "https://account.host/pages?sv=1&{}"],
)
@pytest.mark.parametrize("name", ["password", "ssl_password", "sig", "X-Amz-Signature", "X-Amz-Credential"])
def test_what_a_url_says_behind_its_question_mark_is_hidden(url: str, name: str) -> None:
    """redis-py takes the password there, too, and signed addresses have all that it needs to use them."""
    assert redact({"url": url.format(f"{name}=hunter2")}) == {"url": url.format(f"{name}=***")}
    plain = "redis://host/0?db=1&health_check_interval=30"
    assert redact({"url": plain}) == {"url": plain}


@pytest.mark.parametrize(
    "name",
    [
        "account_key", "azure_storage_account_key", "sas_key", "azure_storage_sas_token",
        "google_service_account_key", "aws_sse_customer_key_base64", "client_secret",
        "encryption_key", "key", "sk", "signature",
    ],
)  # fmt: skip
def test_keys_of_stores_that_open_them_are_hidden(name: str) -> None:
    shown = {"key_prefix": "pages", "encryption_key_file": "/etc/key", "tls_key_file": "/etc/k", "keys": 3,
             "aws_sse_kms_key_id": "arn", "aws_bucket_key_enabled": True}  # fmt: skip
    assert redact({"store_options": {name: "hunter2", **shown}}) == {"store_options": {name: "***", **shown}}


def test_configuration_needs_only_the_standard_library() -> None:
    code = (
        "import sys, hiradix.config; print(sorted({m.split('.')[0] for m in sys.modules} & "
        "{'torch', 'numpy', 'transformers', 'yaml', 'pydantic', 'fastapi'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
