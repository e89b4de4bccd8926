"""Keys of the `nixl` backend. `docs/storage-keys.md` lists them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hiradix.errors import ConfigError
from hiradix.settings import OPEN, OverHttp, Type, fields_of, read, redact, setting
from hiradix.storage.kit.options import flag

FILE_PLUGINS = ("POSIX", "GDS", "GDS_MT")
PLUGINS = (*FILE_PLUGINS, "OBJ")


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    for name, value in values.items():
        if not isinstance(value, str):
            got = f"{redact(value, str(name))!r} for {name}"
            raise ConfigError(f"{flag('plugin_options')} must be an object of texts, got {got}")
    return dict(values)


@dataclass(frozen=True)
class NixlConfig:
    """The plugin that moves the bytes, and its options. rest: the keys of the store, as of `file` or `s3`."""

    plugin: str = setting(
        "plugin",
        Type.TEXT,
        "POSIX",
        "`GDS` and `GDS_MT` where they are installed: these three with the keys of `file`; `OBJ`: with those "
        "of `s3`",
        choices=PLUGINS,
        over_http=OPEN,
    )
    plugin_options: Mapping[str, str] = setting(
        "plugin_options",
        Type.OBJECT,
        dict,
        "the plugin's own parameters, as texts; for `POSIX` the first of `use_uring`, `use_aio`, "
        "`use_posix_aio` that works",
        to=_texts,
    )
    buffer_bytes: int = setting(
        "buffer_size",
        Type.SIZE,
        16 << 20,
        "registered memory of each call, for pages that are not in the host pool",
        over_http=OverHttp(float(1 << 30)),
    )
    zero_copy: bool = setting(
        "zero_copy",
        Type.BOOL,
        None,
        "calls run on the caller's thread and move the host pool's own pages",
        default_text="true for files",
        over_http=OPEN,
    )
    rest: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @staticmethod
    def from_mapping(values: Mapping[str, Any]) -> NixlConfig:
        """Reads its own keys, raising ConfigError; `rest` has the others."""
        config = read(NixlConfig, values, flag)
        own = {one.name for _, one in fields_of(NixlConfig)}
        return dataclasses.replace(
            config,
            zero_copy=config.plugin in FILE_PLUGINS if config.zero_copy is None else config.zero_copy,
            rest={key: value for key, value in values.items() if key not in own},
        )
