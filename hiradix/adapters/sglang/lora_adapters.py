"""LoRA adapters by their weights.

SGLang keeps an adapter's pages apart by its `lora_id` at the end of the extra key, behind which elastic
expert parallelism puts the number of its ranks. Those of `--lora-paths` are made of name and path, so that
all nodes agree: after a restart they are the same for weights that were trained further, whose pages in
storage are others. All other adapters get an id nobody else has.

What clients give as an extra key is put before the id, and is the whole of it in requests without an adapter:
`keep_apart` has none of those end as if it were an id.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hiradix.adapters.sglang.hooks import after
from hiradix.prefix_cache import origin_of
from hiradix.tree.key import ADAPTER, as_client_gave, of_client

logger = logging.getLogger(__name__)

ADAPTER_CONFIG = "adapter_config.json"
_ID_LENGTH = 32
_ID_LIKE = re.compile(rf"[0-9a-f]{{{_ID_LENGTH}}}")
_ELASTIC = "|elastic_ep_size="
_MARK = "\0"
_REQUEST = "sglang.srt.managers.schedule_batch.Req.__init__"


@dataclass(frozen=True)
class LoraAdapters:
    """Digests of the weights of adapters whose ids say nothing of them, by id. ids: of all given at start."""

    digests: Mapping[str, str] = field(default_factory=dict)
    ids: frozenset[str] = frozenset()

    @staticmethod
    def given(references: Iterable[Any] | None, is_hub: bool = True) -> LoraAdapters:
        """The adapters of `--lora-paths`; SGLang's records. Reads each one's weights, of a folder or of a hub
        name's snapshot. is_hub: whether names are Hugging Face's."""
        known, ids = {}, set()
        for one in references or ():
            ids.add(str(getattr(one, "lora_id", "")))
            path = str(getattr(one, "lora_path", ""))
            if not path:
                continue
            origin = origin_of(path, config_name=ADAPTER_CONFIG, is_hub=is_hub)
            known[one.lora_id] = origin.revision
            if not origin.is_read:
                logger.warning("hiradix: adapter %s: its weights are not found, only its name counts", path)
        return LoraAdapters(known, frozenset(ids - {""}))

    def of(self, extra_key: str | None) -> str:
        """The adapter that computes the pages of an extra key: what tells it from others, "" for none.

        Ids of adapters that were not given at start are nobody else's: the pages of each have a name anyway.
        """
        found = _id_in(self.plain(extra_key) or "")
        return found if found in self.ids else ""

    def named(self, extra_key: str | None) -> str | None:
        """The extra key with the weights of the adapter it ends in, if that is one of these."""
        if not extra_key:
            return extra_key
        digest = self.digests.get(_id_in(extra_key)) if self.digests else None
        return of_client(extra_key) if digest is None else f"{ADAPTER}{digest}{_MARK}{extra_key}"

    def plain(self, extra_key: str | None) -> str | None:
        """The extra key as SGLang has it."""
        if not extra_key:
            return extra_key
        if not extra_key.startswith(ADAPTER):
            return as_client_gave(extra_key)
        return extra_key[len(ADAPTER) :].partition(_MARK)[2]


NO_ADAPTERS = LoraAdapters()


def apart(extra_key: str) -> str:
    """The extra key of a request without an adapter, so that it ends in no adapter's id; each has its own."""
    is_like_one = extra_key.endswith(_MARK) or _ID_LIKE.fullmatch(_id_in(extra_key))
    return extra_key + _MARK if is_like_one else extra_key


def _id_in(extra_key: str) -> str:
    """The part of `extra_key` in which SGLang puts an adapter's id, if the request has one."""
    before, _, ranks = extra_key.rpartition(_ELASTIC)
    return (before if before and ranks.isdecimal() else extra_key)[-_ID_LENGTH:]


def keep_apart() -> None:
    """Have this process's requests without an adapter stay out of adapters' namespaces. Idempotent."""
    after(_REQUEST, _made)


def _made(_: Any, request: Any, *__: Any, **___: Any) -> None:
    """Keep the extra key of a new request without an adapter apart from adapters' ids. Called after SGLang
    has made the request."""
    if request.lora_id is None and isinstance(request.extra_key, str):
        request.extra_key = apart(request.extra_key)
