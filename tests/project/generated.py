"""Pages of docs/ whose tables are made from the code, and a file of all settings; `python -m
tests.project.generated` writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hiradix.apps.configure.example import example_toml
from hiradix.apps.lmcache.keys import lmcache_markdown
from hiradix.apps.server.fields import fields_markdown
from hiradix.apps.server.flag_table import flags_markdown
from hiradix.storage.attach.tables import storage_keys_markdown

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLE = DOCS.parent / "examples" / "serve.toml"
BEGIN = "<!-- made by python -m tests.project.generated -->\n"
END = "<!-- end -->\n"
PAGES: dict[str, Callable[[], str]] = {
    "flags.md": flags_markdown,
    "http-api.md": fields_markdown,
    "lmcache.md": lmcache_markdown,
    "storage-keys.md": storage_keys_markdown,
}


def page(name: str) -> str:
    """The text that the page should have: its own, with the tables of today."""
    before, _, rest = (DOCS / name).read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{PAGES[name]()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    for name in PAGES:
        (DOCS / name).write_text(page(name), encoding="utf-8")
    EXAMPLE.write_text(example_toml(), encoding="utf-8")
