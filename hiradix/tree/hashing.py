"""Chained page hashes: the names of pages in storage.

    hash(page) = sha256(prior || each token as uint32 little-endian)         prior: the page before's
                 sha256(prior || 0xff || each token as uint64 little-endian) if a token needs over 32 bits
    with an extra: sha256(tag || length of extra as uint64 || extra || the hash above)

The first page's prior is the namespace's seed, or nothing in the plain namespace. A bigram counts as its
two tokens. Pure functions over copied rows: workers run them, the scheduler thread never does.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

DIGEST_BYTES: Final = 32
_NAMESPACE_TAG = b"sglang-cache-namespace-v1"
_EXTRA_TAG = b"hiradix-page-extra-v1"


def namespace_seed(extra_key: str | None, cache_salt: str | None) -> bytes:
    """The seed of a namespace's hash chains: 32 bytes, or b"" for the plain namespace."""
    return tagged_seed(_NAMESPACE_TAG, extra_key, cache_salt)


def tagged_seed(tag: bytes, extra_key: str | None, cache_salt: str | None) -> bytes:
    """A digest of both under a tag, different for each pair, None included; b"" for two times None."""
    if extra_key is None and cache_salt is None:
        return b""
    seed = hashlib.sha256(tag)
    for part in (extra_key, cache_salt):
        if part is None:
            seed.update(b"\x00")
        else:
            text = part.encode()
            seed.update(b"\x01" + len(text).to_bytes(8, "little") + text)
    return seed.digest()


@dataclass(frozen=True, eq=False)
class PageRows:
    """Consecutive pages to hash, copied out of the tree so that a worker may read them.

    prior: digest of the page before `start`, or the namespace's seed (b"" if plain) when start is 0.
    rows: int64 [P, S]; of bigrams [P, S + 1], the last token of a row being the first of the next.
    extras: per page a digest or None; None if no page has one.
    start: pages before the first row.
    tenant: `Namespace.tenant` of the pages.
    extra_key: of the pages' namespace.
    """

    prior: bytes
    rows: npt.NDArray[np.int64]
    extras: tuple[bytes | None, ...] | None = None
    is_bigram: bool = False
    start: int = 0
    tenant: str = ""
    extra_key: str | None = None

    def __len__(self) -> int:
        return len(self.rows)


def hash_run(prior: bytes, run: bytes, page_size: int) -> list[bytes]:
    """The digests of the pages of a packed run of int32 tokens (not bigrams, without extras)."""
    digest, digests, step = prior, [], 4 * page_size
    for at in range(0, len(run), step):
        digest = hashlib.sha256(digest + run[at : at + step]).digest()
        digests.append(digest)
    return digests


def hash_pages(rows: PageRows) -> list[bytes]:
    """The digest of each page of `rows`, 32 bytes each. About 1.5 us + 3 ns per token and page.

    A digest covers its page and all before it, so equal pages behind different ones have different names.

    >>> rows = PageRows(b"", np.array([[1, 2], [1, 2]]))
    >>> first, second = hash_pages(rows)
    >>> len(first), first == second
    (32, False)
    """
    tokens = rows.rows
    if rows.is_bigram:
        pairs = np.stack([tokens[:, :-1], tokens[:, 1:]], axis=2)
        tokens = pairs.reshape(len(tokens), 2 * pairs.shape[1])
    is_wide = np.any((tokens < 0) | (tokens > 0xFFFFFFFF), axis=1)
    narrow = tokens.astype("<u4")
    digests = []
    digest = rows.prior
    for page, wide in enumerate(is_wide):
        data = b"\xff" + tokens[page].astype("<u8").tobytes() if wide else narrow[page].tobytes()
        digest = hashlib.sha256(digest + data).digest()
        extra = rows.extras[page] if rows.extras is not None else None
        if extra is not None:
            digest = hashlib.sha256(_EXTRA_TAG + len(extra).to_bytes(8, "little") + extra + digest).digest()
        digests.append(digest)
    return digests
