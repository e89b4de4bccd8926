"""How many bytes of text one token can stand for at most: longer texts are known not to fit unread."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

Json = Mapping[str, Any]

# What is equivalent to a text in NFC: UTF-8 is up to 3 times as long decomposed, singletons 3 times again.
_NFC_SHRINKS = 9
_BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))


class TokenBound:
    """`least(text)`: a number of tokens that no encoding of `text` is below; 0 where nothing is known.

    Known of byte-level and byte-fallback tokenizers that drop no part of a text, but for bytes that have no
    token: there every other byte is in a token, and no token has more bytes than the longest of the
    vocabulary. `description` is a tokenizer.json.
    """

    def __init__(self, description: str):
        found = json.loads(description)
        normalizers = _flat(found["normalizer"], "normalizers")
        splits = _flat(found["pre_tokenizer"], "pretokenizers")
        self._longest, self._dropped = 0, b""
        self._shrinks = _NFC_SHRINKS if any(each["type"] == "NFC" for each in normalizers) else 1
        if not _keeps_text(found, normalizers, splits):
            return
        names = _names(found["model"])
        size: Callable[[str], int] = _utf8
        if any(split["type"] == "ByteLevel" for split in splits):
            self._dropped, size = _dropped(names), len
            if self._dropped and any(each["type"] != "NFC" for each in normalizers):
                return  # they may write what is dropped
        elif not (found["model"].get("byte_fallback") and names.issuperset(_BYTE_TOKENS)):
            return
        added = [_utf8(token["content"]) for token in found["added_tokens"]]
        self._longest = max(max(map(size, names)), *added, 0)

    def least(self, text: str) -> int:
        """O(len(text)): its bytes are counted."""
        if not self._longest:
            return 0
        is_changed = self._shrinks > 1 and not text.isascii()
        if is_changed and self._dropped:
            return 0
        num_bytes = len(text.encode().translate(None, self._dropped))
        return -(-num_bytes // (self._longest * (self._shrinks if is_changed else 1)))


def _keeps_text(found: Json, normalizers: Sequence[Json], splits: Sequence[Json]) -> bool:
    """Whether no part of a text is lost before the vocabulary is looked at."""
    return (
        found["model"]["type"] in ("BPE", "Unigram")
        and all(map(_keeps_length, normalizers))
        and all(map(_keeps_all, splits))
        and not any(token["lstrip"] or token["rstrip"] for token in found["added_tokens"])  # take any spaces
    )


def _dropped(names: Container[str]) -> bytes:
    """The bytes for which a byte-level vocabulary has no token."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # bytes that stand for themselves
    others = [byte for byte in range(256) if byte not in own]
    shown = {**{byte: chr(byte) for byte in own}, **{byte: chr(256 + n) for n, byte in enumerate(others)}}
    return bytes(byte for byte, name in shown.items() if name not in names)


def _names(model: Json) -> set[str]:
    vocab = model["vocab"]
    return set(vocab if isinstance(vocab, dict) else (entry[0] for entry in vocab))


def _flat(part: Json | None, name: str) -> list[Json]:
    """A component without its sequences."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [leaf for inner in part[name] for leaf in _flat(inner, name)]


def _keeps_length(normalizer: Json) -> bool:
    """Whether it makes no text shorter (NFC: only by a known factor, and only what is not ASCII)."""
    if normalizer["type"] == "Replace":
        old = normalizer["pattern"].get("String")
        return old is not None and _utf8(old) <= _utf8(normalizer["content"])
    return normalizer["type"] in ("NFC", "Prepend")


def _keeps_all(split: Json) -> bool:
    """Whether every byte of the text stays in one of the pieces."""
    if split["type"] in ("Split", "Punctuation"):
        return bool(split["behavior"] != "Removed")
    return split["type"] in ("ByteLevel", "Metaspace", "Digits")


def _utf8(text: str) -> int:
    return len(text.encode())
