"""Settings for every test: what is random is the same on every run, and judged by results, not speed.

Hypothesis draws the same examples each time and remembers none; `HIRADIX_SEED` (`make explore`) draws others.
Here and not beside the tree's tests: only this file is loaded where the workers' reports come together.
"""

from __future__ import annotations

import logging
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.seeds import EXPLORING, FIRST

HERE = Path(__file__).resolve().parent
settings.register_profile(
    "shared-machine",
    deadline=None,
    print_blob=True,
    derandomize=not EXPLORING,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("shared-machine")
os.environ.setdefault("OMP_NUM_THREADS", "1")


def draw_no_constants_of_ours() -> None:
    """Keep hypothesis from taking numbers and texts from the source of modules that happen to be loaded.

    Examples would depend on which tests ran before in the same process.
    """
    try:
        from hypothesis.internal.conjecture import providers
    except ImportError:
        return  # a version that does not do this
    if hasattr(providers, "_get_local_constants"):
        nothing = providers.Constants()
        providers._get_local_constants = lambda: nothing


if not EXPLORING:
    draw_no_constants_of_ours()

ENGINES = ("sglang", "vllm")  # by folder; each is installed beside ours by its lane
CLIENTS = {
    "redis": "redis",
    "obstore": "s3",
    "mooncake": "mooncake",
    "nixl": "nixl",
    "llguidance": "structured",
    "openai": "dev",
    "anthropic": "dev",
    "langchain_openai": "dev",
}  # in which extra each is


class Module(pytest.Module):
    """A file of tests, skipped where what it imports is not installed.

    In a lane of the Makefile, which sets HIRADIX_ALL_CLIENTS, that is an error.
    """

    def _getobj(self) -> object:
        if os.environ.get("HIRADIX_ALL_CLIENTS") == "1":
            return super()._getobj()
        for engine in ENGINES:
            if self.path.parent == HERE / engine and find_spec(engine) is None:
                pytest.skip(f"{engine} is not installed here: make test-{engine}", allow_module_level=True)
        try:
            return super()._getobj()
        except self.CollectError as error:
            missing = getattr(error.__cause__, "name", None) or ""
            extra = CLIENTS.get(missing.partition(".")[0])
            if extra is None:
                raise
            pytest.skip(f"needs pip install 'hiradix[{extra}]'", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    module: pytest.Module = Module.from_parent(parent, path=module_path)
    return module


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long(seconds): about what it takes; begun early, the longest first")
    config.addinivalue_line("markers", "seeded: plays lives whose seeds `tests.seeds` gives")
    if EXPLORING and config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(FIRST)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What draws without a seed of its own draws the same, whichever tests ran before."""
    random.seed(FIRST)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(FIRST)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(FIRST)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Take back what a test changes of its process's logging: `hiradix serve`, called in it, sets handlers."""
    root = logging.getLogger()
    level, handlers = root.level, set(root.handlers)
    yield
    root.setLevel(level)
    for handler in set(root.handlers) - handlers:
        root.removeHandler(handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first, a short one behind each, so that no worker idles beside a long one at the end.

    A worker holds the test after the one it runs: that should not be a long one that another could begin.
    Module fixtures are made again for a test that is moved away from its neighbours.
    """
    marks = {item: item.get_closest_marker("long") for item in items}
    long = [(mark.args[0], item) for item, mark in marks.items() if mark is not None]
    for _, item in long:
        if item.get_closest_marker("timeout") is None:  # for hangs, not for slow machines
            item.add_marker(pytest.mark.timeout(600))
    first = [item for _, item in sorted(long, key=lambda one: -one[0])]
    others = [item for item, mark in marks.items() if mark is None]
    pairs = zip_longest(first, others[: len(first)])
    items[:] = [item for pair in pairs for item in pair if item is not None] + others[len(first) :]


def pytest_terminal_summary(terminalreporter) -> None:
    """How much was tried: what tests tell by `record_property("told", ...)`, and the tree's random lives."""
    note_seconds(terminalreporter)
    runs, moves, drawn = 0, 0, Counter()
    for report in terminalreporter.getreports("passed"):
        properties = dict(report.user_properties)
        runs += properties.get("tree_runs", 0)
        moves += properties.get("tree_moves", 0)
        drawn.update(properties.get("tree_drawn", {}))
        if "told" in properties:
            terminalreporter.write_line(properties["told"])
    if runs:
        values = ", ".join(f"{value} {count}" for value, count in sorted(drawn.items()))
        terminalreporter.write_line(f"tree against page map: {runs} runs, {moves} moves ({values})")


def note_seconds(terminalreporter) -> None:
    """Add a line "seconds<TAB>test" for each to the file that `HIRADIX_SECONDS` names, for `.ci/run`.

    A test's seconds are those of its setup, which may be a fixture of its module, its call and its teardown.
    """
    path = os.environ.get("HIRADIX_SECONDS")
    if not path or hasattr(terminalreporter.config, "workerinput"):
        return  # or one of xdist's workers, whose reports come together elsewhere
    spent: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                spent[report.nodeid] += report.duration
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(f"{seconds:.1f}\t{test}\n" for test, seconds in spent.items() if seconds >= 0.1)
