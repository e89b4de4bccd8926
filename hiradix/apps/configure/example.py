"""A file with every setting of the server, its meaning and its default: `hiradix config example`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from hiradix.apps.lmcache.toml_text import toml
from hiradix.apps.server.flag_table import SECTIONS, Flag
from hiradix.settings import OBJECTS, REQUIRED, Setting, Type, shown_default, shown_values
from hiradix.sources import CONFIG

WIDTH = 110
_HEAD = """\
# Every setting of `hiradix serve` with its default, as `hiradix config example` prints it.
#
#     hiradix config check serve.toml
#     hiradix serve --config serve.toml
#
# What stands behind #: has no default, or one that is found at the start: take the mark away and give a value.
# Objects are tables; they stand at the end, as TOML needs it.
"""


def example_toml() -> str:
    """The text of an example file. The server accepts it, once the model is named."""
    tables: list[Flag] = []
    lines = [_HEAD]
    for section, flags in SECTIONS.items():
        own = [flag for flag in flags if flag.status != "refused" and flag.setting is not CONFIG]
        tables += [flag for flag in own if flag.setting.type in OBJECTS]
        plain = [flag for flag in own if flag.setting.type not in OBJECTS]
        if plain:
            lines += [f"# ---- {section} {'-' * (WIDTH - 7 - len(section))}", ""]
        for flag in plain:
            lines += [*_text(flag.setting), _value(flag.setting), ""]
    lines += [f"# ---- Objects {'-' * (WIDTH - 14)}", ""]
    for flag in tables:
        lines += [*_text(flag.setting), f"[{flag.setting.name}]", ""]
    return "\n".join(lines)


def _text(one: Setting) -> Iterator[str]:
    text = f"{one.text} ({shown_values(one)})".replace("`", "")
    yield from textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def _value(one: Setting) -> str:
    if one.default_text or callable(one.default) or one.default in (None, "", REQUIRED):
        shown = shown_default(one).replace("`", "")
        return f"#: {one.name} = ...  # {'required' if one.default is REQUIRED else f'default: {shown}'}"
    value = list(one.default) if one.type is Type.LIST else one.default
    return toml({one.name: value}).strip()
