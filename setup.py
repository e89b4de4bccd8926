"""HIRADIX_COMPILE=1 compiles hiradix/tree, and what the floors up to the drop-in classes do at each turn: by
mypyc from the same source, and the tree's `_ids.c`. Set by build_backend.py. The rest: pyproject.toml."""

import os
from pathlib import Path

from setuptools import Extension, setup

AT_EACH_TURN = {
    "policy": "ghd_learner ghd_order ghosts lanes leaves no_regret ranks segments uses write",
    "cache": "backup core flights load_back pages storing",
    "transfer": "controller counters desk drivers gate jobs runners worker",
    "memory": "allocator",
    "prefix_cache": "figures hiradix lower_tiers radix slots",
}
INTERPRETED = ("__init__", "native")  # of the tree; `native` has two forms, one of them for mypyc to read


def extensions() -> list:
    """One C extension for each module of the tree and `AT_EACH_TURN`, and `_ids.c`; or none."""
    if os.environ.get("HIRADIX_COMPILE") != "1":
        return []
    try:
        import numpy
        from mypyc.build import mypycify
    except ImportError:
        raise SystemExit("HIRADIX_COMPILE=1 needs mypy and numpy: pip install mypy numpy") from None
    modules = sorted(str(path) for path in Path("hiradix/tree").glob("*.py") if path.stem not in INTERPRETED)
    modules += [
        f"hiradix/{folder}/{name}.py" for folder, names in AT_EACH_TURN.items() for name in names.split()
    ]
    # `make lint` judges types: a stricter mypy is no reason not to compile. A build by itself has no torch.
    options = ["--config-file=", "--follow-imports=silent", "--ignore-missing-imports"]
    compiled = mypycify(
        [*options, *modules],
        opt_level="3",
        debug_level="0",
        group_name="hiradix_tree",
        target_dir="build/mypyc",
    )
    ids = Extension(
        "hiradix.tree._ids",
        ["hiradix/tree/_ids.c"],
        include_dirs=[numpy.get_include()],
        extra_compile_args=["-O3"],
    )
    return [*compiled, ids]


setup(ext_modules=extensions())
