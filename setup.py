"""HIRADIX_COMPILE=1 compiles hiradix/tree, and what the floors up to the drop-in classes do at each turn: by
mypyc from the same source, and what is in C. Set by build_backend.py. HIRADIX_COMPILE_LEVEL (3): how far it
is optimised. The rest: pyproject.toml."""

import os
import tempfile
from pathlib import Path

from setuptools import Extension, setup

AT_EACH_TURN = {
    "policy": "ghd_learner ghd_order ghosts leaves no_regret places segments uses write_policy",
    "cache": "core in_flight load_back pages storage_backup write_through",
    "transfer": "controller counters drivers gate job_table jobs runners worker",
    "memory": "allocator",
    "prefix_cache": "cache names slots",
}
BY_HAND = {
    f"hiradix.{folder}.{name}": f"hiradix/{folder}/{name}.c"
    for folder, names in (("tree", "_ids"), ("policy", "_counting _gittins _lanes _names"))
    for name in names.split()
}
# A build by itself has none of these, and where they are, to read their types takes longer than all else.
UNREAD = "[mypy]\n[mypy-torch.*,transformers.*,triton.*]\nfollow_imports = skip\n"
INTERPRETED = ("__init__", "native")  # of the tree; `native` has two forms, one of them for mypyc to read


def extensions() -> list:
    """One C extension for each module of the tree and `AT_EACH_TURN`, and those in C; or none."""
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
    level = os.environ.get("HIRADIX_COMPILE_LEVEL", "3")
    with tempfile.NamedTemporaryFile("w", suffix=".ini") as config:
        config.write(UNREAD)
        config.flush()
        # `make lint` judges types: a stricter mypy is no reason not to compile.
        options = [f"--config-file={config.name}", "--follow-imports=silent", "--ignore-missing-imports"]
        compiled = mypycify(
            [*options, *modules],
            opt_level=level,
            debug_level="0",
            group_name="hiradix_tree",
            target_dir="build/mypyc",
        )
    include = [numpy.get_include()]
    arguments = [f"-O{level}", "-ffp-contract=off"]  # sums and products as numpy has them, on every processor
    by_hand = [
        Extension(name, [source], include_dirs=include, extra_compile_args=arguments)
        for name, source in BY_HAND.items()
    ]
    return [*compiled, *by_hand]


setup(ext_modules=extensions())
