"""The examples run and print what they say; the backend passes the suite that its docstring names."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.storage_backend import FolderBackend
from hiradix.adapters.vllm.settings import parse_settings
from hiradix.apps.server.flags import parse_serve_args
from hiradix.storage import PageFingerprint, StorageContext
from hiradix.testing.storage import (
    FINGERPRINT,
    PAGE_BYTES,
    PersistentContract,
    SharedContract,
    StorageContract,
)
from tests.project.repo import ROOT

EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_prints_what_it_says(path: Path) -> None:
    said = re.findall(r"^\s+print\(.*\)  # (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert said and done.stdout.splitlines() == said


def test_the_backend_is_as_short_as_the_docs_say() -> None:
    lines, first = inspect.getsourcelines(FolderBackend)
    assert len(lines) <= 60, f"{len(lines)} lines from line {first}"


class TestFolderBackend(StorageContract, PersistentContract, SharedContract):
    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> FolderBackend:
        return FolderBackend(StorageContext(fingerprint, {"folder_path": str(place)}, PAGE_BYTES))


def start_line(tmp_path: Path, engine: str) -> list[str]:
    """What `serve.sh` would run, by programs in its path that print their arguments."""
    for name in ("hiradix", "python", "vllm"):
        program = tmp_path / name
        program.write_text('#!/bin/sh\nprintf "%s\\0" "$(basename "$0")" "$@"\n', encoding="utf-8")
        program.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        [EXAMPLES / "serve.sh", engine, "MODEL", "PAGES", "--port", "30001"],
        capture_output=True, text=True, timeout=30, env={"PATH": path}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\0")[:-1]


def test_our_engine_takes_its_start_line(tmp_path: Path) -> None:
    program, command, *arguments = start_line(tmp_path, "hiradix")
    assert (program, command) == ("hiradix", "serve")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}", encoding="utf-8")
    config = parse_serve_args([str(model) if argument == "MODEL" else argument for argument in arguments])
    assert config.port == 30001
    assert config.engine.cache.hicache_storage_backend == "disk"


def test_vllm_start_line_is_what_the_connector_takes(tmp_path: Path) -> None:
    (text,) = [argument for argument in start_line(tmp_path, "vllm") if argument.startswith("{")]
    settings = parse_settings(json.loads(text)["kv_connector_extra_config"], page_size=16)
    assert settings.cache.hicache_storage_backend == "disk"
    assert settings.cache.hicache_storage_backend_extra_config.backend == {"disk_storage_path": "PAGES"}


def test_sglang_start_line_has_its_keys(tmp_path: Path) -> None:
    arguments = start_line(tmp_path, "sglang")
    assert arguments[-2:] == ["--port", "30001"]
    extra = arguments[arguments.index("--hicache-storage-backend-extra-config") + 1]
    assert json.loads(extra) == {"disk_storage_path": "PAGES"}


@pytest.mark.parametrize("given", [[], ["hiradix", "MODEL"]])
def test_a_start_line_that_lacks_something_is_told_what(given: list[str]) -> None:
    done = subprocess.run(
        [EXAMPLES / "serve.sh", *given], capture_output=True, text=True, timeout=30, check=False
    )  # fmt: skip
    assert done.returncode == 2 and "MODEL_DIR PAGES_DIR" in done.stderr


def test_an_unknown_engine_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [EXAMPLES / "serve.sh", "tgi", "MODEL", "PAGES"],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "tgi" in done.stderr
