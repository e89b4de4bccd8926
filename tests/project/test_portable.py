"""What is committed works anywhere: no paths of one machine, no package indexes, nothing outside it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.project.repo import ROOT, committed_files

# Written in two pieces so that this file does not find itself.
FORBIDDEN = {
    "a machine's path": re.compile(
        r"(?<![\w.])/(?:" + "wo" + r"rk|ho" + r"me|ro" + r"ot|op" + r"t|mnt|Users)/\w"
    ),
    "a scratch path": re.compile(r"/tm" + r"p/\w/|/tm" + r"p/bash"),
    "a package index": re.compile(
        r"(?:py" + r"pi|pytho" + r"nhosted|download\.pyto" + r"rch)\.(?:org|python)"
    ),
    "a folder beside the checkout": re.compile(r"\.\./sha" + r"red"),
}
TEXT = {".py", ".md", ".toml", ".txt", ".cfg", ".yaml", ".yml", ".json", ".sh", ""}


def offences(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8", errors="replace")
    return [
        f"{path.relative_to(ROOT)}:{number}: {what}: {line.strip()[:80]}"
        for number, line in enumerate(text.splitlines(), 1)
        for what, pattern in FORBIDDEN.items()
        if pattern.search(line)
    ]


def test_committed_files_name_no_machine() -> None:
    texts = [p for p in committed_files() if p.suffix in TEXT]
    assert len(texts) > 20
    assert [line for path in texts for line in offences(path)] == []


def test_no_large_or_binary_file_is_committed() -> None:
    assert [str(p) for p in committed_files() if p.stat().st_size > 4_000_000] == []


@pytest.mark.parametrize(
    "line", ["cd /wo" + "rk/main", "--index-url https://py" + "pi.org/simple", "../sha" + "red/x"]
)
def test_the_rule_sees_each_kind(line: str) -> None:
    assert any(pattern.search(line) for pattern in FORBIDDEN.values())
