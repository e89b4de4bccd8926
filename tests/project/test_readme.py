"""The README keeps its word: its Python runs and prints what it says, its links and commands exist."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.project.repo import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_python_block_runs_and_prints_what_it_says() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    said = re.findall(r"^print\(.*\)\s+# (.*)$", code, re.MULTILINE)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == said


def test_links_lead_somewhere() -> None:
    lost = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
        lost += [(page.name, to) for to in links if "://" not in to and not (page.parent / to).exists()]
    assert lost == []


def test_make_commands_exist() -> None:
    targets = set(re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z][\w-]*)", README)) | {"test", "demo", "lint"}
    assert named <= targets


def test_make_help_names_each_target_once() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):", text, re.MULTILINE)) - {"help"}
    assert sorted(re.findall(r"^# make ([a-z][\w-]*)", text, re.MULTILINE)) == sorted(targets)
    (phony,) = re.findall(r"^\.PHONY: ((?:.*\\\n)*.*)", text, re.MULTILINE)
    assert sorted(phony.replace("\\", "").split()) == sorted({*targets, "help", ".venv"})


def test_demo_and_test_come_first() -> None:
    assert README.index("make demo") < README.index("## The picture")
    assert README.index("make test") < README.index("## The picture")
