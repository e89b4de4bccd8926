"""The suite for authors of storage backends, as they have it: out of a wheel, far from the source.

And the data that comes with it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from hiradix.apps.traces.sessions import SAMPLE
from tests.project.repo import ROOT

TOY = '''
from hiradix.testing.storage import FINGERPRINT, StorageContract

import hiradix

assert hiradix.__file__.startswith({where!r}), hiradix.__file__
FOLDERS = {{}}


class Shelf:
    """Pages in a dict."""

    def __init__(self, pages):
        self.pages = pages

    def exists(self, keys):
        return next((n for n, key in enumerate(keys) if key not in self.pages), len(keys))

    def get(self, keys, into):
        for key, page in zip(keys, into):
            page[0][:] = self.pages.get(key, bytes(len(page[0])))
        return [key in self.pages for key in keys]

    def put(self, keys, pages):
        for key, page in zip(keys, pages):
            self.pages.setdefault(key, bytes(page[0]){broken})
        return [True] * len(keys)

    def delete(self, keys):
        for key in keys:
            self.pages.pop(key, None)

    def clear(self):
        self.pages.clear()

    def close(self):
        pass


class TestShelf(StorageContract):
    def open(self, place, fingerprint=FINGERPRINT, **config):
        return Shelf(FOLDERS.setdefault(place, {{}}))
'''
ASKED = "byte_for_byte or batch or order or plain_miss or neighbours or leading"


def test_a_backend_is_tried_from_a_wheel(tmp_path: Path) -> None:
    source, wheels, installed = (tmp_path / name for name in ("source", "wheels", "installed"))
    left_out = shutil.ignore_patterns("build", "tests", "benchmarks", "docs", ".*", "__pycache__", "*.so")
    shutil.copytree(ROOT, source, ignore=left_out)
    wheels.mkdir()
    environment = {**os.environ, "HIRADIX_COMPILE": "0", "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    build = f"import build_backend; build_backend.build_wheel({str(wheels)!r})"
    asked = [sys.executable, "-c", build]
    subprocess.run(asked, cwd=source, env=environment, check=True, timeout=150, capture_output=True)
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(installed)
    assert (installed / SAMPLE.relative_to(ROOT)).read_bytes() == SAMPLE.read_bytes()
    for broken in ("", "[::-1]"):
        (tmp_path / "test_shelf.py").write_text(TOY.format(where=str(installed), broken=broken))
        asked = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", ASKED, "test_shelf.py"]
        ran = subprocess.run(
            asked, cwd=tmp_path, env={**environment, "PYTHONPATH": str(installed)},
            capture_output=True, text=True, timeout=150,
        )  # fmt: skip
        assert ran.returncode == bool(broken), ran.stdout + ran.stderr
        assert ("wrong bytes served" if broken else "9 passed") in ran.stdout, ran.stdout
