"""Virtual environments for the lanes whose engine wants other packages than ours."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def python(venv: Path) -> Path:
    return venv / "bin" / "python"


def make(venv: Path, files: Sequence[Path], install: Callable[[Path], None]) -> None:
    """Make `venv` anew and `install` into it; nothing if it is there as it should be.

    files: what decides what is installed, beside this file and pyproject.toml.
    """
    venv = venv.resolve()
    decisive = (*files, Path(__file__), ROOT / "pyproject.toml")
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in decisive)).hexdigest()
    marker = venv / "installed"
    if marker.is_file() and marker.read_text() == digest:
        return
    shutil.rmtree(venv, ignore_errors=True)
    print(f"installing into {venv} ...", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    install(venv)
    marker.write_text(digest)


def install_pinned(venv: Path, requirements: Path) -> None:
    """Install hiradix from this checkout and what a file of lines "name==version" lists, nothing else.

    What this environment has in the same version, torch above all, is linked instead of unpacked again.
    """
    for line in requirements.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            _link(venv, *line.split("=="))
    pip(venv, "--no-deps", "-r", str(requirements))
    pip(venv, "--no-deps", "--no-build-isolation", "-e", str(ROOT))


def pip(venv: Path, *arguments: str) -> None:
    """pip install, whatever PYTHONPATH says here. Modules are compiled when they are first imported."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "pip", "--python", str(python(venv)), "--disable-pip-version-check"]
    install = ("install", "-q", "--no-compile", *arguments)
    subprocess.run([*command, *install], check=True, env=environment)


def site_packages(venv: Path) -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return venv / "lib" / version / "site-packages"


def _link(venv: Path, name: str, version: str) -> None:
    """Hard links to the files of a package of this environment, but for its commands.

    Nothing if it is another version here. pip and the interpreter replace files and never write into them, so
    neither environment changes the other.
    """
    try:
        package = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return
    if package.version.partition("+")[0] != version or package.files is None:
        return
    for file in package.files:
        source, target = Path(str(package.locate_file(file))), site_packages(venv) / file
        if ".." in file.parts or not source.is_file():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, target)
        except FileExistsError:
            pass
        except OSError:  # another file system
            shutil.copy2(source, target)
