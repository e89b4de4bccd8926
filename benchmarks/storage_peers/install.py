"""Unpacks the peers of the storage benchmark into build/peers: wheels without their dependencies.

    python -m benchmarks.storage_peers.install

SGLang 0.5.23 (the files its file backend needs) and LMCache 0.5.6: 25 MB, a few seconds, once.
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks.peers.install import FOLDER, unpack_wheel

SGLANG = FOLDER / "sglang-0.5.23-storage"
LMCACHE = FOLDER / "lmcache-0.5.6"


def unpack_sglang() -> None:
    """What SGLang's storage classes are made of, unless it is there."""
    unpack_wheel("sglang==0.5.23", SGLANG, ("sglang/srt/mem_cache/", "sglang/srt/environ.py"))


def unpack_lmcache() -> None:
    """LMCache's Python files, unless they are there."""
    unpack_wheel("lmcache==0.5.6", LMCACHE, ("lmcache/",))


def main() -> None:
    """Unpack what is missing. A wheel that cannot be had here leaves its column empty."""
    for name, unpack in (("SGLang", unpack_sglang), ("LMCache", unpack_lmcache)):
        try:
            unpack()
        except (subprocess.CalledProcessError, ValueError) as error:
            print(f"{name} cannot be had here: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
