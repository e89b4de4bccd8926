"""What an environment lacks: a plain pytest skips the tests that need it, a lane fails."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.project.repo import ROOT

NOT_HERE = {
    "vllm": ("tests/vllm/test_calls.py", "make test-vllm"),
    "nixl": ("tests/storage_servers/test_nixl.py", "hiradix[nixl]"),
}


@pytest.mark.parametrize("missing", NOT_HERE)
def test_what_is_not_installed_is_skipped_by_name_and_fails_a_lane(missing: str) -> None:
    if find_spec(missing) is not None:
        pytest.skip(f"{missing} is installed")
    file, told = NOT_HERE[missing]
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "--collect-only", file]
    for in_lane, status, shown in ((False, 5, told), (True, 2, f"No module named '{missing}")):
        environment = {name: value for name, value in os.environ.items() if name != "HIRADIX_ALL_CLIENTS"}
        environment |= {"HIRADIX_ALL_CLIENTS": "1"} if in_lane else {}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150)
        assert (done.returncode, shown in done.stdout) == (status, True), done.stdout
