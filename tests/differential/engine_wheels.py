"""The sources of engines' releases, read out of their wheels in the registry file by file.

pip says where a wheel is, and its own lazy reader asks for those ranges of it that are wanted: some hundred
kilobytes of a wheel of 350 MB. What was read is kept under build/peers/engines.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.peers.install import FOLDER
from hiradix.adapters.probe import Reads

ENGINES = FOLDER / "engines"
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def newest(package: str) -> str:
    """The newest final release in the registry."""
    command = (*_PIP, "index", "versions", package)
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    return said.partition("(")[2].partition(")")[0]


def sources_of(package: str, version: str) -> Reads:
    """The modules of a release. Each is fetched when it is first asked for, by any run."""
    folder = ENGINES / f"{package}-{version}"
    listing = folder / "files.json"

    @cache
    def wheel() -> zipfile.ZipFile:
        return _open(f"{package}=={version}")

    def names() -> set[str]:
        if not listing.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            found = [name for name in wheel().namelist() if name.endswith(".py")]
            _write(listing, json.dumps(found))
        return set(json.loads(listing.read_text()))

    def read(module: str) -> str | None:
        path = module.replace(".", "/")
        for name in (f"{path}.py", f"{path}/__init__.py"):
            if name in names():
                file = folder / name
                if not file.is_file():
                    file.parent.mkdir(parents=True, exist_ok=True)
                    _write(file, wheel().read(name).decode("utf-8-sig"))
                return file.read_text(encoding="utf-8")
        return None

    return read


def _write(file: Path, text: str) -> None:
    """All of it or nothing: a run may be stopped."""
    whole = file.with_name(f".{file.name}")
    whole.write_text(text, encoding="utf-8")
    whole.rename(file)


def _open(requirement: str) -> zipfile.ZipFile:
    from pip._internal.network.lazy_wheel import HTTPRangeRequestUnsupported, LazyZipOverHTTP
    from pip._internal.network.session import PipSession

    try:
        remote: Any = LazyZipOverHTTP(_place(requirement), PipSession())
        return zipfile.ZipFile(remote)
    except HTTPRangeRequestUnsupported:
        return zipfile.ZipFile(_downloaded(requirement))


def _place(requirement: str) -> str:
    """Where the wheel is that pip would install here."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        asked = ("install", "-q", "--dry-run", "--no-deps", "--ignore-installed", "--report", str(report))
        subprocess.run((*_PIP, *asked, requirement), check=True, capture_output=True, timeout=300)
        return str(json.loads(report.read_text())["install"][0]["download_info"]["url"])


def _downloaded(requirement: str) -> Path:
    folder = ENGINES / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    asked = ("download", "-q", "--no-deps", "-d", str(folder), requirement)
    subprocess.run((*_PIP, *asked), check=True, timeout=900)
    name = requirement.replace("==", "-")
    (wheel,) = folder.glob(f"{name}-*.whl")
    return wheel
