"""What nobody runs is broken: every benchmark and every command of the docs has a form that a lane runs."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

from tests.benchmarks.quick_forms import FORMS
from tests.project.repo import ROOT

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Parts of other programs, which those run: no commands of their own.
PARTS = {"bench_vllm_lmcache": "benchmarks.bench_vllm_lmcache"}


def programs() -> dict[str, str]:
    """Each file of benchmarks/ that can be run as a program, and its text."""
    found = {}
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if any(
            isinstance(node, ast.If) and "__main__" in ast.dump(node.test) for node in ast.parse(text).body
        ):
            found[path.stem] = text
    return found


def test_every_benchmark_has_a_quick_form() -> None:
    found = programs()
    for part, module in PARTS.items():
        assert any(module in text for name, text in found.items() if name != part), f"nobody runs {part}"
    forms = [form.program for form in FORMS]
    assert sorted(forms) == sorted(found.keys() - PARTS.keys())
    for name in forms:
        text = found[name] if name != "serve_multiturn" else (ROOT / "hiradix/apps/bench/main.py").read_text()
        assert '"--quick"' in text and '"--out"' in text, f"{name} takes no --quick or no --out"


def test_every_bench_target_has_a_quick_form() -> None:
    targets = re.findall(r"^(bench-[\w-]+):.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert len(targets) == len(re.findall(r"^bench-[\w-]+:", MAKEFILE, re.MULTILINE))
    for target, recipe in targets:
        named = set(re.findall(r"\$\(PY\) benchmarks/(\w+)\.py|-m benchmarks\.(\w+)", recipe))
        run = {own for pair in named for own in pair if own and own not in ("peers", "storage_peers")}
        assert run, f"{target} runs no benchmark"
        assert run == {form.program for form in FORMS if form.target == target}, target


def test_the_lane_plays_every_quick_form() -> None:
    (recipe,) = re.findall(r"^test-bench:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert "tests/benchmarks" in recipe


def commands_in(page: Path) -> list[list[str]]:
    """Each `python benchmarks/...` of a page, in code blocks and in the text, as words."""
    text = page.read_text(encoding="utf-8")
    return [
        shlex.split(line.split("#")[0].replace("[", " ").replace("]", " "))
        for line in re.findall(r"python3? (benchmarks/\w+\.py[^`\n|]*)", text)
    ]


def test_commands_of_the_docs_exist_and_take_their_flags() -> None:
    found = [(page.name, command) for page in PAGES for command in commands_in(page)]
    assert len(found) >= 10
    for page, (path, *arguments) in found:
        assert (ROOT / path).is_file(), f"{page}: {path}"
        text = (ROOT / path).read_text(encoding="utf-8")
        for flag in (word for word in arguments if word.startswith("--")):
            assert f'"{flag}"' in text, f"{page}: {path} takes no {flag}"


def test_make_targets_of_the_docs_exist() -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", MAKEFILE, re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"`make ([a-z][\w-]*)", page.read_text(encoding="utf-8")))
        assert named <= targets, f"{page.name}: {sorted(named - targets)}"


def test_json_of_the_docs_parses() -> None:
    import json

    for page in PAGES:
        for block in re.findall(r"```json\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            json.loads(block if block.lstrip().startswith(("{", "[")) else "{" + block + "}")
