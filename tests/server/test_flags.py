"""The command line: every upstream flag is implemented, accepted or refused by name, and documented."""

from __future__ import annotations

from pathlib import Path

import pytest

from hiradix.apps.engine.api import EngineConfig
from hiradix.apps.server.flag_table import FLAGS
from hiradix.apps.server.flags import ServeConfig, make_parser, parse_serve_args
from hiradix.config import HiCacheConfig
from hiradix.errors import ConfigError
from hiradix.intents.limits import IntentLimits

# Cache flags of SGLang 0.5.9 and 0.5.23.
UPSTREAM = """
--enable-hierarchical-cache --enable-hicache --disable-radix-cache --page-size --hicache-ratio --hicache-size
--hicache-host-memory-fraction --hicache-write-policy --hicache-io-backend --hicache-mem-layout
--hicache-storage-backend --hicache-storage-prefetch-policy --hicache-storage-backend-extra-config
--hicache-host-memory-mode --hicache-storage-prefetch-retry-poll-interval
--hicache-storage-prefetch-retry-max-attempts --disable-hicache-numa-detect --radix-eviction-policy
--radix-eviction-policy-config --radix-cache-backend --enable-session-radix-cache --enable-unified-memory
--enable-page-major-kv-layout --enable-hisparse --hisparse-config --enable-lmcache --lmcache-config-file
--enable-flexkv --flexkv-config-file --enable-unified-cache-external-linker
--unified-cache-external-linker-backend --unified-cache-external-linker-config --enable-linker-mla-dedup
--file-storage-path --disaggregation-decode-enable-offload-kvcache
--disaggregation-decode-enable-radix-cache --enable-cache-report --enable-metrics --extra-metric-labels
--kv-events-config --load-publish-endpoint --api-key --admin-api-key
""".split()


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def parse(model: str, *arguments: str) -> ServeConfig:
    return parse_serve_args(["--model-path", model, *arguments])


def refusal(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_serve_args(list(arguments))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_upstream_flag_is_in_the_table() -> None:
    names = {name for flag in FLAGS for name in (flag.name, *flag.aliases)}
    assert set(UPSTREAM) <= names


def test_names_are_unique_and_refusals_have_reasons() -> None:
    names = [name for flag in FLAGS for name in (flag.name, *flag.aliases)]
    assert len(names) == len(set(names))
    assert all(flag.note for flag in FLAGS)


@pytest.mark.parametrize("flag", [f for f in FLAGS if f.status == "refused"], ids=lambda f: f.name)
def test_refused_flag_says_why(flag, model: str) -> None:  # type: ignore[no-untyped-def]
    for values in ([], ["x"]):
        message = refusal("--model-path", model, flag.name, *values)
        assert flag.name in message and flag.note in message


@pytest.mark.parametrize("flag", [f for f in FLAGS if f.status == "accepted"], ids=lambda f: f.name)
def test_accepted_flag_is_taken(flag, model: str) -> None:  # type: ignore[no-untyped-def]
    parse(model, flag.name)


def test_help_lists_every_flag_that_is_not_refused() -> None:
    text = make_parser().format_help()
    assert all(flag.name in text for flag in FLAGS if flag.status != "refused")


def test_page_size_defaults_to_64_with_the_cache_and_says_so(model: str) -> None:
    config = parse(model, "--enable-hierarchical-cache")
    assert config.engine.cache.page_size == 64
    assert any("--page-size" in note and "64" in note for note in config.notes)
    assert parse(model).engine.cache.page_size == 1
    chosen = parse(model, "--enable-hicache", "--page-size", "16")
    assert (chosen.engine.cache.page_size, chosen.notes) == (16, ())


def test_flags_of_a_host_tier_that_is_off_are_said_to_do_nothing(model: str) -> None:
    """Those that say what is the default, too."""
    given = ["--hicache-size", "4", "--hicache-write-policy=write_through", "--disable-hicache-numa-detect"]
    off, on = parse(model, *given), parse(model, "--enable-hicache", "--page-size", "1", *given)
    (note,) = off.notes
    assert note.endswith(": nothing without --enable-hierarchical-cache") and on.notes == ()
    assert all(flag.partition("=")[0] in note for flag in given if flag.startswith("--"))
    assert off.engine.cache.normalised() == off.engine.cache and off.engine.cache.hicache_size == 0
    assert on.engine.cache.hicache_size == 4


def test_rewrites_are_told(model: str) -> None:
    config = parse(model, "--enable-hicache", "--hicache-io-backend", "direct")
    assert config.engine.cache.hicache_mem_layout == "page_first_direct"
    assert any("page first direct" in note for note in config.notes)


def test_defaults(model: str) -> None:
    config = parse(model)
    assert (config.host, config.port, config.model_name) == ("127.0.0.1", 30000, model)
    assert (config.api_key, config.admin_api_key) == (None, None)
    assert config.engine.cache.served_model_name == model


def test_defaults_of_the_flags_are_those_of_the_configurations(model: str) -> None:
    cache = HiCacheConfig(page_size=1, served_model_name=model)
    engine = EngineConfig(model, cache=cache, model_name=model)
    found = parse(model)
    folder = Path(model).name
    expected = ServeConfig(engine, model, pages=found.pages, other_names=(folder,))  # those of the address
    assert found == expected
    on = parse(model, "--enable-hicache", "--page-size", "64")
    config = HiCacheConfig(enable_hierarchical_cache=True, served_model_name=model)
    assert on.engine == EngineConfig(model, cache=config, model_name=model)


def test_caps_on_wishes_are_settings_from_every_source(model: str, tmp_path: Path) -> None:
    file = tmp_path / "caps.toml"
    file.write_text("intent_max_receipts = 7\nintent_max_open = 1\n")
    environment = {
        "HIRADIX_CONFIG": str(file),
        "HIRADIX_INTENT_MAX_OPEN": "9",
        "HIRADIX_INTENT_HOST_SHARE": "0",
    }
    flags = ["--model-path", model, "--intent-tenant-bytes", "64MiB", "--intent-host-share", "0.5"]
    found = parse_serve_args(flags, environment)
    expected = IntentLimits(host_share=0.5, tenant_bytes=64 << 20, max_open=9, max_receipts=7)
    assert found.engine.intents == expected
    assert "--intent-host-share" in refusal("--model-path", model, "--intent-host-share", "0.6")


def test_values_reach_engine_and_cache(model: str) -> None:
    config = parse(
        model,
        *("--served-model-name", "m", "--max-total-tokens", "512", "--max-running-requests", "3"),
        *("--chunked-prefill-size", "-1", "--context-length", "99", "--num-threads", "2"),
        *("--swa-full-tokens-ratio", "0.5", "--max-mamba-cache-size", "40", "--hicache-io-backend", "auto"),
        *("--max-queued-requests", "9", "--random-seed", "7", "--check-invariants", "--dtype", "bfloat16"),
        *("--enable-hicache", "--hicache-ratio", "1.5", "--hicache-storage-backend", "file"),
        *("--file-storage-path", "/d", "--hicache-storage-backend-extra-config", '{"prefetch_threshold": 1}'),
        *("--extra-metric-labels", '{"zone": "a"}'),
    )
    engine, cache = config.engine, config.engine.cache
    assert (engine.max_total_tokens, engine.max_running_requests, engine.max_waiting_requests) == (512, 3, 9)
    assert (engine.chunked_prefill_size, engine.context_length, engine.num_threads) == (None, 99, 2)
    assert (engine.swa_full_tokens_ratio, engine.max_mamba_cache_size) == (0.5, 40)
    assert cache.hicache_io_backend == "auto"
    assert (engine.seed, engine.check, engine.dtype, engine.model_name) == (7, True, "bfloat16", "m")
    assert (cache.hicache_ratio, cache.hicache_storage_backend) == (1.5, "file")
    assert cache.hicache_storage_backend_extra_config.prefetch_threshold == 1
    assert dict(cache.hicache_storage_backend_extra_config.backend) == {"file_storage_path": "/d"}
    assert config.metric_labels == {"zone": "a"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--page-size x", "--page-size"),
        ("--page-size 0", "--page-size"),
        ("--port 70000", "--port"),
        ("--port", "--port"),
        ("--dtype int3", "--dtype"),
        ("--max-total-tokens 0", "--max-total-tokens"),
        ("--chunked-prefill-size 0", "--chunked-prefill-size"),
        ("--max-queued-requests 0", "--max-queued-requests"),
        ("--swa-full-tokens-ratio 0", "--swa-full-tokens-ratio"),
        ("--max-mamba-cache-size 0", "--max-mamba-cache-size"),
        ("--context-length -5", "--context-length"),
        ("--shutdown-timeout nan", "--shutdown-timeout"),
        ("--context-length 1", "--context-length must be >= 2"),  # a token of a prompt, one of its answer
        ("--max-total-tokens 2147483648", "--max-total-tokens"),
        ("--max-running-requests 9223372036854775808", "--max-running-requests"),
        ("--max-mamba-cache-size 1000000000000000000000", "--max-mamba-cache-size"),
        ("--num-threads 20000", "--num-threads"),
        ("--tp-size 2 --dist-timeout inf", "--dist-timeout"),
        ("--dist-timeout 1e300", "--dist-timeout"),
        ("--hicache-ratio 1e308", "--hicache-ratio"),
        ("--hicache-size 1e308", "--hicache-size"),
        ("--hicache-ratio -1", "--hicache-ratio"),
        ("--hicache-host-memory-fraction 2", "--hicache-host-memory-fraction"),
        ("--hicache-io-backend kernel_ascend", "--hicache-io-backend kernel_ascend"),
        ("--hicache-storage-backend file", "--hicache-storage-backend"),
        ("--enable-hicache --disable-radix-cache", "disable-radix-cache"),
        ("--hicache-storage-backend-extra-config {", "--hicache-storage-backend-extra-config"),
        ("--radix-eviction-policy-config []", "--radix-eviction-policy-config"),
        ('--extra-metric-labels {"a-b":"c"}', "--extra-metric-labels"),
        ('--extra-metric-labels {"a":1}', "--extra-metric-labels"),
        ('--extra-metric-labels {"le":"1"}', "--extra-metric-labels"),
        ('--extra-metric-labels {"finish_reason":"x"}', "--extra-metric-labels"),
        ("--enable-hicache --hicache-storage-backend nosuch --file-storage-path /x", "nosuch"),
        ("--enable-hicache --hicache-storage-backend nosuch", "--hicache-storage-backend nosuch"),
        ("--radix-eviction-policy nosuch", "--radix-eviction-policy"),
        (
            '--radix-eviction-policy slru --radix-eviction-policy-config {"a":1}',
            "--radix-eviction-policy-config",
        ),
        ("--no-such-flag", "--no-such-flag"),
        ("--hicache-rat 2", "--hicache-rat"),
    ],
)
def test_bad_argument_names_the_flag(arguments: str, words: str, model: str) -> None:
    assert words in refusal("--model-path", model, *arguments.split(" "))


def test_unknown_model_path() -> None:
    assert "--model-path" in refusal("--model-path", "/nonexistent/model")
    assert "--model-path" in refusal()


def test_directory_without_a_model(tmp_path: Path) -> None:
    assert "config.json" in refusal("--model-path", str(tmp_path))


def test_the_path_reaches_the_disk_backend_under_its_own_key(model: str) -> None:
    arguments = "--enable-hicache --hicache-storage-backend disk --file-storage-path /d"
    cache = parse(model, *arguments.split()).engine.cache
    assert dict(cache.hicache_storage_backend_extra_config.backend) == {"disk_storage_path": "/d"}


def test_the_file_backends_path_is_for_that_backend(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hiradix.apps.server.flags.load_storage_backend", lambda name: None)
    arguments = "--enable-hicache --hicache-storage-backend other --file-storage-path /x"
    assert "--file-storage-path" in refusal("--model-path", model, *arguments.split())


def test_an_open_server_is_pointed_out(model: str) -> None:
    assert any("--api-key" in note for note in parse(model, "--host", "0.0.0.0").notes)
    assert parse(model, "--host", "0.0.0.0", "--api-key", "k").notes == ()


def test_keys_are_in_no_repr(model: str) -> None:
    config = parse(model, "--api-key", "k1secret", "--admin-api-key", "k2secret")
    assert (config.api_key, config.admin_api_key) == ("k1secret", "k2secret")
    assert "secret" not in repr(config)
    assert "--api-key" in refusal("--model-path", model, "--api-key", "")
