"""setuptools' build backend, which compiles where it can: a wheel has the compiled form (setup.py) if there
are a C compiler and Python's headers, and plain Python if there are not or the compilation fails.

HIRADIX_COMPILE=1: compiled, or the build fails. HIRADIX_COMPILE=0: plain Python. Editable installs, which are
for working on the source, are plain Python unless it is 1."""

import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path

from setuptools import build_meta

FLAG = "HIRADIX_COMPILE"
NEEDED = ["mypy>=1.11", "numpy>=1.26"]  # mypyc; numpy for its types and headers


def asked() -> str:
    """What HIRADIX_COMPILE says: "1", "0", or "" where it is not set; SystemExit for anything else."""
    value = os.environ.get(FLAG, "")
    if value not in ("", "0", "1"):
        raise SystemExit(f"{FLAG}={value!r}: 1 compiles, 0 does not, unset compiles a wheel where it can")
    return value


def can_compile() -> bool:
    """Whether a C compiler and Python's headers are there."""
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    return shutil.which(compiler) is not None and Path(sysconfig.get_path("include"), "Python.h").is_file()


@contextmanager
def told(value: str) -> Iterator[None]:
    """setup.py reads `value`."""
    before = os.environ.get(FLAG)
    os.environ[FLAG] = value
    try:
        yield
    finally:
        os.environ.pop(FLAG)
        if before is not None:
            os.environ[FLAG] = before


def plainly(hook: Callable) -> Callable:
    """The hook, for what is the same in both forms: nothing is compiled in it."""

    @wraps(hook)
    def called(*args, **kwargs):
        with told("0"):
            return hook(*args, **kwargs)

    return called


build_sdist = plainly(build_meta.build_sdist)
get_requires_for_build_sdist = plainly(build_meta.get_requires_for_build_sdist)
prepare_metadata_for_build_wheel = plainly(build_meta.prepare_metadata_for_build_wheel)
prepare_metadata_for_build_editable = plainly(build_meta.prepare_metadata_for_build_editable)


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    is_compiled = asked() == "1" or (asked() == "" and can_compile())
    return plainly(build_meta.get_requires_for_build_wheel)(config_settings) + NEEDED * is_compiled


def get_requires_for_build_editable(config_settings: dict | None = None) -> list[str]:
    return plainly(build_meta.get_requires_for_build_editable)(config_settings) + NEEDED * (asked() == "1")


def build_editable(*args, **kwargs) -> str:
    with told(asked() or "0"):
        return build_meta.build_editable(*args, **kwargs)


def build_wheel(*args, **kwargs) -> str:
    """The wheel's file name. A try that does not compile leaves nothing in the plain wheel: setuptools
    gathers the two in folders of their own."""
    if asked() == "" and can_compile():
        try:
            with told("1"):
                return build_meta.build_wheel(*args, **kwargs)
        except (Exception, SystemExit) as error:
            print(f"hiradix: plain Python, as it could not be compiled: {error}", file=sys.stderr)
    with told(asked() or "0"):
        return build_meta.build_wheel(*args, **kwargs)
