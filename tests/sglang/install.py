"""Puts SGLang on this machine's CPU, into a virtual environment of its own, with hiradix from this checkout.

python -m tests.sglang.install [FOLDER]        (default build/sglang-venv; 1 minute, 2.8 GB)

SGLang's wheel asks for CUDA builds, so its dependencies are installed one by one, and what exists for no CPU
is replaced by `on_cpu/`: kernels in torch, empty modules for what a text model never calls, and a plugin that
lets SGLang's own HiCache run here, for comparisons.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests import lane_venv
from tests.lane_venv import ROOT, pip
from tests.storage_servers.install import install_redis_server

HERE = Path(__file__).resolve().parent
VENV = ROOT / "build" / "sglang-venv"
SGLANG = "0.5.23"
# The last line with the older contract that was tried, and what of its dependencies differs.
OLD_SGLANG = ("sglang==0.5.15.post1", "transformers==5.12.1", "tokenizers==0.22.2")
# What the tests themselves need there, of the versions that constraints.txt pins.
FOR_TESTS = ("pytest", "pytest-timeout", "hypothesis", "redis", "hiredis", "peercache", "radixview", "sgtop")


def python() -> Path:
    return lane_venv.python(VENV)


def old_packages(venv: Path = VENV) -> Path:
    """A folder that, before all others on the path, makes it the older SGLang."""
    return venv / "older-sglang"


def main(venv: Path = VENV) -> None:
    """Install what is missing; nothing when all is there as it should be."""
    install_redis_server()
    on_cpu = (path for path in sorted(HERE.glob("on_cpu/**/*")) if "__pycache__" not in path.parts)
    pins = (HERE / "requirements.txt", ROOT / "constraints.txt")
    lane_venv.make(venv, [*filter(Path.is_file, on_cpu), *pins, Path(__file__)], _install)


def _install(venv: Path) -> None:
    pip(venv, "torch==2.13.0")
    pip(venv, "--no-deps", "-r", str(HERE / "requirements.txt"))
    pip(venv, "--no-deps", f"sglang=={SGLANG}", "triton==3.9.0")
    # pins that hold SGLang's own packages still while the tests' are added
    pip(venv, "-c", str(HERE / "requirements.txt"), *(_pinned(name) for name in FOR_TESTS))
    pip(venv, "--no-deps", "-e", str(ROOT))
    pip(venv, "--no-deps", "--target", str(old_packages(venv)), *OLD_SGLANG)
    for part in (HERE / "on_cpu").iterdir():
        copy = shutil.copytree if part.is_dir() else shutil.copy
        copy(part, _site_packages(venv) / part.name)


def _pinned(name: str) -> str:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next((line for line in lines if line.startswith(f"{name}==")), name)


def _site_packages(venv: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    done = subprocess.run([lane_venv.python(venv), "-c", code], check=True, capture_output=True, text=True)
    return Path(done.stdout.strip())


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
