"""Unpacks SGLang's 0.5.9 wheel, alone, into build/peers; what it imports beside torch is mocked or there.

    python tests/differential/install.py

Five megabytes, a few seconds, once; `benchmarks/peers/install.py` uses the same folder.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSION = "0.5.9"
ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "peers" / f"sglang-{VERSION}"


def main() -> None:
    """Unpack the wheel if it is not there yet."""
    if FOLDER.is_dir():
        return
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as scratch:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "-d", scratch, f"sglang=={VERSION}"], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        unpacked = Path(scratch) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
        unpacked.rename(FOLDER)


if __name__ == "__main__":
    main()
