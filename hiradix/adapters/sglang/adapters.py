"""LoRA adapters by their weights.

SGLang keeps an adapter's pages apart by its `lora_id` at the end of the extra key. Those of `--lora-paths`
are made of name and path, so that all nodes agree: after a restart they are the same for weights that were
trained further, whose pages in storage are others. All other adapters get an id nobody else has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hiradix.prefix_cache import weights_digest

_ID_LENGTH = 32
_MARK = "@"


@dataclass(frozen=True)
class Adapters:
    """Digests of the weights of adapters whose ids say nothing of them, by id. ids: of all given at start."""

    digests: Mapping[str, str] = field(default_factory=dict)
    ids: frozenset[str] = frozenset()

    @staticmethod
    def given(references: Iterable[Any] | None) -> Adapters:
        """Those of `--lora-paths` that are folders; SGLang's records. Reads some of each one's weights."""
        known, ids = {}, set()
        for one in references or ():
            ids.add(str(getattr(one, "lora_id", "")))
            path = str(getattr(one, "lora_path", ""))
            if path and Path(path).is_dir():
                known[one.lora_id] = weights_digest(path, "adapter_config.json")
        return Adapters(known, frozenset(ids - {""}))

    def of(self, extra_key: str | None) -> str:
        """The adapter that computes the pages of an extra key: what tells it from others, "" for none.

        Ids of adapters that were not given at start are nobody else's: the pages of each have a name anyway.
        """
        key = self.plain(extra_key) or ""
        return key[-_ID_LENGTH:] if key[-_ID_LENGTH:] in self.ids else ""

    def named(self, extra_key: str | None) -> str | None:
        """The extra key with the weights of the adapter it ends in, if that is one of these."""
        if not self.digests or not extra_key:
            return extra_key
        digest = self.digests.get(extra_key[-_ID_LENGTH:])
        return extra_key if digest is None else f"{extra_key}{_MARK}{digest}"

    def plain(self, extra_key: str | None) -> str | None:
        """The extra key as SGLang has it."""
        if not self.digests or not extra_key:
            return extra_key
        key, _, digest = extra_key.rpartition(_MARK)
        return key if digest and self.digests.get(key[-_ID_LENGTH:]) == digest else extra_key


NO_ADAPTERS = Adapters()
