"""Virtual environments for the lanes whose engine wants other packages than ours."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def python(venv: Path) -> Path:
    return venv / "bin" / "python"


def make(venv: Path, files: Sequence[Path], install: Callable[[Path], None]) -> None:
    """Make `venv` anew and `install` into it; nothing if it is there as it should be.

    files: what decides what is installed, beside this file and pyproject.toml.
    """
    venv = venv.resolve()
    decisive = (*files, Path(__file__), ROOT / "pyproject.toml")
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in decisive)).hexdigest()
    marker = venv / "installed"
    if marker.is_file() and marker.read_text() == digest:
        return
    shutil.rmtree(venv, ignore_errors=True)
    print(f"installing into {venv} (one to two minutes) ...", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    install(venv)
    marker.write_text(digest)


def pip(venv: Path, *arguments: str) -> None:
    """pip install, whatever PYTHONPATH says here."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python(venv)), "-m", "pip", "install", "-q", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, env=environment)
