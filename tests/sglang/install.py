"""Puts SGLang on this machine's CPU, into a virtual environment of its own, with hiradix from this checkout.

python -m tests.sglang.install [FOLDER]        (default build/sglang-venv; half a minute, 2 GB of its own)

SGLang's wheel asks for CUDA builds, so its dependencies are listed beside this file, and what exists for no
CPU is replaced by `on_cpu/`: kernels in torch, empty modules for what a text model never calls, and a plugin
that lets SGLang's own HiCache run here, for comparisons.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tests import lane_venv
from tests.lane_venv import ROOT, install_pinned, pip
from tests.storage_servers.install import install_redis_server

HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE / "requirements.txt"
VENV = ROOT / "build" / "sglang-venv"
# The last line with the older contract that was tried, and what of its dependencies differs.
OLD_SGLANG = ("sglang==0.5.15.post1", "transformers==5.12.1", "tokenizers==0.22.2")
BEFORE = "0.5.22"  # the release before, with the contract of the one that is served here


def python() -> Path:
    return lane_venv.python(VENV)


def old_packages(venv: Path = VENV) -> Path:
    """A folder that, before all others on the path, makes it the older SGLang."""
    return venv / "older-sglang"


def packages_before(venv: Path = VENV) -> Path:
    """The same for the release before."""
    return venv / f"sglang-{BEFORE}"


def main(venv: Path = VENV) -> None:
    """Install what is missing; nothing when all is there as it should be."""
    install_redis_server()
    on_cpu = (path for path in sorted(HERE.glob("on_cpu/**/*")) if "__pycache__" not in path.parts)
    lane_venv.make(venv, [*filter(Path.is_file, on_cpu), REQUIREMENTS, Path(__file__)], _install)


def _install(venv: Path) -> None:
    install_pinned(venv, REQUIREMENTS)
    pip(venv, "--no-deps", "--target", str(old_packages(venv)), *OLD_SGLANG)
    pip(venv, "--no-deps", "--target", str(packages_before(venv)), f"sglang=={BEFORE}")
    for part in (HERE / "on_cpu").iterdir():
        copy = shutil.copytree if part.is_dir() else shutil.copy
        copy(part, lane_venv.site_packages(venv) / part.name)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
