"""Identities behind fingerprints, kept on this host: a store has digests only, and people want to know why.

One small file per fingerprint in the user's cache folder, written when a store is opened. A help for people
alone: nothing that is read from there decides whether a page is used.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hiradix.storage.fingerprint import PageFingerprint

logger = logging.getLogger(__name__)

MOST = 1000
SHOWN = 32  # hex digits by which stores name a fingerprint
_NAME = re.compile(r"[0-9a-f]{32}")
_FILE = re.compile(_NAME.pattern + r"\.(json|\d+)")  # with a number: not written to its end


def identities_folder() -> Path:
    """The folder of the identities."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hiradix" / "fingerprints"


def remember(fingerprint: PageFingerprint, folder: Path | None = None) -> None:
    """Note what a fingerprint stands for. Of more than `MOST` the oldest are forgotten; a folder that
    cannot be written costs the note."""
    if type(fingerprint) is not PageFingerprint:
        return  # a tool's stand-in, which has the digest and not the fields
    try:
        folder = folder or identities_folder()
        target = folder / f"{fingerprint.digest()[:SHOWN]}.json"
        folder.mkdir(parents=True, exist_ok=True)
        if target.exists():
            os.utime(target)
            return
        prune(folder, MOST, _FILE)
        written = target.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps(dataclasses.asdict(fingerprint)))
        written.replace(target)
    except (OSError, RuntimeError) as error:  # the latter: a user without a home
        logger.debug("a fingerprint is not remembered: %s", error)


def prune(folder: Path, most: int, names: re.Pattern[str]) -> None:
    """Make room for one more of at most `most` files of such names: what was written longest ago goes, and a
    tenth with it. Whatever else is in the folder is somebody's."""
    with os.scandir(folder) as entries:
        ours = (entry for entry in entries if names.fullmatch(entry.name) and entry.is_file())
        notes = sorted((entry.stat().st_mtime, entry.path) for entry in ours)
    if len(notes) >= most:
        for _, path in notes[: len(notes) - most + max(1, most // 10)]:
            Path(path).unlink(missing_ok=True)  # another process may prune, too


def recall(name: str, folder: Path | None = None) -> dict[str, Any] | None:
    """The fields of the fingerprint that stores call `name`, or None where this host never opened it."""
    if _NAME.fullmatch(name) is None:
        return None
    try:
        fields = json.loads(((folder or identities_folder()) / f"{name}.json").read_text())
    except (OSError, RuntimeError, ValueError):
        return None
    return fields if isinstance(fields, dict) else None


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Fields in which two fingerprints differ: why pages of the one are misses for the other."""
    names = sorted({*one, *other})
    return {name: (one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)}
