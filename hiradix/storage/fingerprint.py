"""Fingerprints: the model, shape and format that a page's bytes belong to. Different ones never meet."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass

from hiradix.errors import ConfigError


@dataclass(frozen=True)
class PageFingerprint:
    """Everything that decides what the bytes of a page mean. Any difference makes every page a miss.

    model_id, revision: which weights. dtype: of the stored numbers. layout: order of axes inside a page.
    shape: the pool's shape as integers (layers, heads, head dims, ...). codec: lossy encoding, "" for none.
    component: what of a page of tokens it is, such as "window-4096"; "" for full attention.

    >>> ours = PageFingerprint("my-model", "main", "bfloat16", "page_first", page_size=16)
    >>> ours.digest() == dataclasses.replace(ours, page_size=32).digest()
    False
    """

    model_id: str
    revision: str = ""
    dtype: str = ""
    layout: str = ""
    page_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    shape: tuple[int, ...] = ()
    codec: str = ""
    component: str = ""

    def __post_init__(self) -> None:
        if not self.model_id:
            raise ConfigError("model_id is empty: storage could not tell this model's pages from another's")

    def digest(self) -> str:
        """64 hex digits, equal exactly when all fields are."""
        fields = dataclasses.asdict(self) | {"shape": [int(number) for number in self.shape]}
        if not self.component:
            del fields["component"]  # so full attention's pages keep the names they have had without it
        framed = json.dumps(fields, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
        return hashlib.sha256(b"hiradix-page-fingerprint-1\0" + framed.encode("ascii")).hexdigest()
