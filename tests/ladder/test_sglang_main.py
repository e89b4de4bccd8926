"""The ladder's start of SGLang, with a program in SGLang's place: no SGLang is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.ladder import store
from tests.puppet import ROOT

PARENT = """
import multiprocessing, sys
from sglang import scheduler
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=scheduler.run)
    child.start()
    child.join(60)
    sys.exit(child.exitcode)
"""
CHILD = """
def run():
    from hiradix.storage.registry import storage_backend_names
    print(*storage_backend_names())
"""


def test_the_store_is_known_in_a_process_that_sglang_spawns(tmp_path: Path) -> None:
    sglang = tmp_path / "sglang"
    sglang.mkdir()
    for name, text in (("__init__", ""), ("launch_server", PARENT), ("scheduler", CHILD)):
        (sglang / f"{name}.py").write_text(text)
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    environment = os.environ | {"PYTHONPATH": path, "HIRADIX_LADDER_FAULT": str(tmp_path / "planted")}
    command = [sys.executable, "-m", "tests.ladder.sglang_main"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)
    assert ended.returncode == 0, ended.stderr
    assert store.NAME in ended.stdout.split()
