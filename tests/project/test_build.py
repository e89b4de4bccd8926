"""What `pip install` builds: compiled where that is possible, plain Python where it is not, never neither."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from types import ModuleType

import pytest

from tests.project.repo import ROOT

Built = list[tuple[str, str]]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """build_backend.py on a machine that can compile."""
    spec = importlib.util.spec_from_file_location("build_backend", ROOT / "build_backend.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.delenv("HIRADIX_COMPILE", raising=False)
    monkeypatch.setattr(module, "can_compile", lambda: True)
    return module


@pytest.fixture
def built(backend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Built:
    """What setuptools was asked for, with what setup.py would read; compiling fails while `broken` is set."""
    calls: Built = []

    def stand_in(name: str) -> Callable[..., object]:
        def called(*args: object) -> object:
            calls.append((name, os.environ["HIRADIX_COMPILE"]))
            if os.environ["HIRADIX_COMPILE"] == "1" and "HIRADIX_BROKEN" in os.environ:
                raise SystemExit("error: command 'cc' failed")
            return ["setuptools"] if name.startswith("get_requires") else f"{name}.whl"

        return called

    for name in (
        "build_wheel",
        "build_editable",
        "get_requires_for_build_wheel",
        "get_requires_for_build_editable",
    ):
        monkeypatch.setattr(backend.build_meta, name, stand_in(name))
    return calls


def test_a_wheel_is_compiled_where_it_can_be(backend: ModuleType, built: Built) -> None:
    assert backend.build_wheel("out") == "build_wheel.whl"
    assert built == [("build_wheel", "1")]
    assert "HIRADIX_COMPILE" not in os.environ


def test_what_does_not_compile_is_built_as_plain_python(
    backend: ModuleType, built: Built, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HIRADIX_BROKEN", "1")
    assert backend.build_wheel("out") == "build_wheel.whl"
    assert built == [("build_wheel", "1"), ("build_wheel", "0")]
    assert "command 'cc' failed" in capsys.readouterr().err


def test_who_asks_for_the_compiled_form_gets_no_other(
    backend: ModuleType, built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIRADIX_BROKEN", "1")
    monkeypatch.setenv("HIRADIX_COMPILE", "1")
    with pytest.raises(SystemExit, match="'cc' failed"):
        backend.build_wheel("out")
    assert built == [("build_wheel", "1")]


def test_nothing_is_compiled_without_a_compiler_or_where_it_is_forbidden(
    backend: ModuleType, built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "can_compile", lambda: False)
    backend.build_wheel("out")
    monkeypatch.setattr(backend, "can_compile", lambda: True)
    monkeypatch.setenv("HIRADIX_COMPILE", "0")
    backend.build_wheel("out")
    assert built == [("build_wheel", "0")] * 2


def test_an_editable_install_is_plain_python_unless_it_is_asked_for(
    backend: ModuleType, built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.build_editable("out")
    monkeypatch.setenv("HIRADIX_COMPILE", "1")
    backend.build_editable("out")
    assert built == [("build_editable", "0"), ("build_editable", "1")]


def test_mypy_is_fetched_only_to_compile(
    backend: ModuleType, built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = ["setuptools", *backend.NEEDED]
    assert backend.get_requires_for_build_wheel() == compiled
    assert backend.get_requires_for_build_editable() == ["setuptools"]
    monkeypatch.setenv("HIRADIX_COMPILE", "1")
    assert backend.get_requires_for_build_editable() == compiled
    monkeypatch.setenv("HIRADIX_COMPILE", "0")
    assert backend.get_requires_for_build_wheel() == ["setuptools"]
    assert {value for _, value in built} == {"0"}, "what a build needs is asked before it is there"


def test_another_value_is_refused_by_name(backend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIRADIX_COMPILE", "yes")
    for hook in (backend.build_wheel, backend.build_editable, backend.get_requires_for_build_wheel):
        with pytest.raises(SystemExit, match="HIRADIX_COMPILE='yes'"):
            hook()


def test_a_compiler_is_looked_for_by_its_name(backend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    assert not backend.can_compile()
