"""HIRADIX_COMPILE=1 compiles hiradix/tree and what a policy does at each turn with mypyc: the same source,
faster. The rest: pyproject.toml."""

import os
import sys
from pathlib import Path

from setuptools import setup

COMPILE = os.environ.get("HIRADIX_COMPILE") == "1"
ASKED_ONLY = "egg_info" in sys.argv  # pip asks what the build needs, before that is there
POLICY = ("ghd_learner", "ghd_order", "ghosts", "lanes", "leaves", "segments", "uses")
NEEDED = ["mypy>=1.11", "numpy>=1.26"]  # numpy for its types


def extensions() -> list:
    """One C extension for each module of the tree and of `POLICY`, or none."""
    if not COMPILE or ASKED_ONLY:
        return []
    try:
        from mypyc.build import mypycify
    except ImportError:
        raise SystemExit("HIRADIX_COMPILE=1 needs mypy to build with: pip install mypy") from None
    modules = sorted(str(path) for path in Path("hiradix/tree").glob("*.py") if path.name != "__init__.py")
    modules += [f"hiradix/policy/{name}.py" for name in POLICY]
    options = ["--config-file=", "--strict", "--python-version=3.11"]
    return mypycify(
        [*options, *modules],
        opt_level="3",
        debug_level="0",
        group_name="hiradix_tree",
        target_dir="build/mypyc",
    )


setup(ext_modules=extensions(), setup_requires=NEEDED if COMPILE and ASKED_ONLY else [])
