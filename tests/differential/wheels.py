"""Unpacks the peers' wheels, alone, into build/peers; what they import beside torch is mocked or there.

    python -m tests.differential.wheels

65 MB, a few seconds, once; `benchmarks/peers/install.py` uses the same folders for SGLang.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.peers.install import FOLDER, HERE, SGLANG_VERSIONS, unpack_wheel, wheel_folder

VERSIONS = (*SGLANG_VERSIONS, "0.5.15.post1")
# The records of 0.5.15 and 0.5.23 are made with it. The pin is the benchmarks'.
MSGSPEC = next(
    line for line in (HERE / "requirements.txt").read_text().splitlines() if line.startswith("msgspec")
)
MSGSPEC_FOLDER = FOLDER / MSGSPEC.replace("==", "-")


def folders() -> list[Path]:
    """What has to be there."""
    return [*map(wheel_folder, VERSIONS), MSGSPEC_FOLDER]


def share_drivers() -> None:
    """Let a peer's process import the benchmarks' drivers."""
    sys.path.insert(0, str(HERE))
    sys.path.append(str(MSGSPEC_FOLDER))


def main() -> None:
    """Unpack what is not there yet."""
    for version in VERSIONS:
        unpack_wheel(f"sglang=={version}", wheel_folder(version))
    unpack_wheel(MSGSPEC, MSGSPEC_FOLDER)


if __name__ == "__main__":
    main()
