"""Settings that no machine can follow: an error at the start that names the key, not faults in use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hiradix.apps.storage_tools import main
from hiradix.config import EXTRA_CONFIG_FLAG, parse_extra_config
from hiradix.errors import ConfigError
from hiradix.storage import PageFingerprint, StorageContext, open_storage

TOO_MUCH: tuple[Any, ...] = (float("inf"), float("-inf"), float("nan"), 1e308, 10**30, 10**400, 1e12, -1)
SECONDS = {
    "file": ("deadline_s", "admin_timeout_s", "breaker_retry_s", "retry_wait_s", "negative_ttl_s",
             "touch_interval_s", "lock_timeout_s"),
    "disk": ("touch_interval_s", "lock_timeout_s"),
}  # fmt: skip
COUNTS = {"file": ("num_workers", "breaker_failures", "retries"), "disk": ("io_threads",)}
SIZES = {
    "file": ("staging_size", "max_size", "min_free_space", "quota"),
    "disk": ("max_size", "min_free_space", "segment_size"),
}
PAGE_BYTES = 4096


def start(backend: str, folder: Path, **keys: Any) -> None:
    own = {f"{backend}_storage_path": str(folder / "pages"), "quota_path": str(folder / "quotas")}
    context = StorageContext(PageFingerprint("model"), {**own, **keys}, PAGE_BYTES)
    open_storage(backend, context).close()


def cases(keys: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(backend, key) for backend, names in keys.items() for key in names]


@pytest.mark.parametrize(("backend", "key"), cases(SECONDS))
@pytest.mark.parametrize("value", TOO_MUCH)
def test_seconds_beyond_any_clock(backend: str, key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{EXTRA_CONFIG_FLAG}: {key} must be"):
        start(backend, tmp_path, **{key: value})


@pytest.mark.parametrize("key", ["deadline_s", "admin_timeout_s"])
@pytest.mark.parametrize("value", [0, 1e-300, 0.0005])
def test_a_deadline_that_nothing_meets(key: str, value: float, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{key} must be a finite number >= 0.001"):
        start("file", tmp_path, **{key: value})


@pytest.mark.parametrize(("backend", "key"), cases(COUNTS))
@pytest.mark.parametrize("value", [10**30, 2**63, -1])
def test_counts_beyond_any_machine(backend: str, key: str, value: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{EXTRA_CONFIG_FLAG}: {key} must be"):
        start(backend, tmp_path, **{key: value})


@pytest.mark.parametrize(("backend", "key"), cases(SIZES))
@pytest.mark.parametrize("value", [10**30, 2**63, "9" * 20, "99999999999TiB", -1])
def test_sizes_beyond_any_file(backend: str, key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{EXTRA_CONFIG_FLAG}: {key}"):
        start(backend, tmp_path, **{key: value})


def test_a_quota_of_a_tenant_beyond_any_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quotas 'salt:a'.* too large"):
        start("file", tmp_path, quotas={"salt:a": 2**63})


def test_what_is_large_and_can_be(tmp_path: Path) -> None:
    start("file", tmp_path, deadline_s=1e6, touch_interval_s=1e9, max_size=2**62, breaker_failures=10**9)
    start("disk", tmp_path, lock_timeout_s=0, max_size="1000TiB")


@pytest.mark.parametrize(("retries", "wait_s"), [(20, 0.05), (1, 61.0), (100, 1e-6)])
def test_retries_that_go_on_for_longer_than_a_server_is_away(
    retries: int, wait_s: float, tmp_path: Path
) -> None:
    """A worker that sleeps between them is missing, also when the store has been back for long."""
    with pytest.raises(ConfigError, match=f"{EXTRA_CONFIG_FLAG}: retries .*retry_wait_s.* 60 s"):
        start("file", tmp_path, retries=retries, retry_wait_s=wait_s)
    start("file", tmp_path, retries=100, retry_wait_s=0)
    start("file", tmp_path, retries=10, retry_wait_s=0.05)


@pytest.mark.parametrize("key", ["prefetch_timeout_base", "prefetch_timeout_per_ki_token"])
def test_prefetch_timeouts_beyond_any_clock(key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{EXTRA_CONFIG_FLAG}: {key} must be"):
        parse_extra_config(json.dumps({key: 1e308}))


@pytest.mark.parametrize("suffix", ["", ".json", ".toml", ".yaml"])
def test_a_number_of_more_digits_than_python_reads(suffix: str, tmp_path: Path) -> None:
    number = "9" * 5000
    text = {".toml": f"max_size = {number}", ".yaml": f"max_size: {number}"}.get(
        suffix, f'{{"max_size": {number}}}'
    )
    if suffix:
        (tmp_path / f"keys{suffix}").write_text(text)
        text = f"@{tmp_path}/keys{suffix}"
    with pytest.raises(ConfigError, match=f"^{EXTRA_CONFIG_FLAG}: .*not valid"):
        parse_extra_config(text)


@pytest.mark.parametrize("backend", ["file", "disk"])
def test_text_that_no_system_call_takes(backend: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{backend}_storage_path must be text"):
        start(backend, tmp_path, **{f"{backend}_storage_path": "/tmp/\ud800"})
    with pytest.raises(ConfigError, match="encryption_key_file must be text"):
        start(backend, tmp_path, encryption_key_file="\ud800")


def test_a_path_in_no_utf_8_is_a_path(tmp_path: Path) -> None:
    start("file", tmp_path, file_storage_path=str(tmp_path / "p\udcff"))
    assert (tmp_path / "p\udcff" / "hiradix.lock").exists()


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["bench", "file://{}", "--set", f"max_size={'9' * 5000}"], "max_size"),
        (["bench", "file://{}", "--set", f"max_size={'[' * 100_000}"], "max_size"),
        (["bench", "file://{}", "--set", f"deadline_s={10**30}"], "deadline_s"),
        (["bench", "file://{}", "--pages", str(10**15)], "--pages"),
        (["bench", "file://{}", "--page-bytes", "8000000TiB", "--pages", "2"], "--pages"),
        (["bench", "file://{}", "--page-bytes", str(10**30)], "--page-bytes"),
    ],
)
def test_tools_name_what_is_too_large(
    arguments: list[str], key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main([part.format(tmp_path) if part.startswith("file") else part for part in arguments])
    assert status == 2 and key in capsys.readouterr().err
