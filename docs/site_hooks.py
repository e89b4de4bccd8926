"""What the site has beside docs/: the pages of the repository's root, the examples, and links to either.

A page links to them as they lie in the repository (`../CONTRIBUTING.md`, `../examples/serve.sh`), which
works wherever Markdown is shown; here such a link leads to a copy of the file that is part of the site.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md")
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the root, and each file outside of docs/ that some page links to."""
    for name in PAGES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    for source in [*ROOT.glob("docs/**/*.md"), *(ROOT / name for name in PAGES)]:
        for target, _ in LINK.findall(source.read_text(encoding="utf-8")):
            path = (source.parent / target).resolve()
            uri = _uri(path)
            if uri is not None and path.is_file() and files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links to files of the repository into links to their copies."""
    here = Path(page.file.src_uri)
    folder = ROOT if page.file.src_uri in PAGES else (ROOT / "docs" / here).parent

    def replaced(link: re.Match[str]) -> str:
        target, anchor = link[1], link[2] or ""
        if "://" in target:
            return link[0]
        path = (folder / target).resolve()
        if path.is_relative_to(ROOT / "docs"):
            uri = str(path.relative_to(ROOT / "docs"))
        else:
            uri = _uri(path) or target
        up = "../" * (len(here.parts) - 1)
        return f"]({up}{uri}{anchor})"

    return LINK.sub(replaced, markdown).replace("[,", "\\[,")  # optional parts of a flag's value are no links


def _uri(path: Path) -> str | None:
    """Where in the site a file of the repository outside of docs/ is; None for what is no such file."""
    if not path.is_relative_to(ROOT) or path.is_relative_to(ROOT / "docs"):
        return None
    inside = path.relative_to(ROOT)
    return str(inside) if str(inside) in PAGES else f"files/{inside}"
