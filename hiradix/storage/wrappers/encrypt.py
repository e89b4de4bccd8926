"""Encryption at rest: AES-256-GCM with a key of its own for each fingerprint.

A stored page is `HRE1`, the length of the page (u32, little endian), a random nonce of 12 bytes, the
ciphertext and its tag of 16 bytes. The key's name and the fingerprint are authenticated with it, so a page
that was changed, swapped or written with another key is a miss. Names are not hidden: they are hashes.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import logging
import os
import struct
from collections.abc import Mapping

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from hiradix.config_files import read_small_file
from hiradix.errors import ConfigError
from hiradix.storage.kit.call_threads import fill_head
from hiradix.storage.kit.meters import MissReason
from hiradix.storage.kit.options import flag
from hiradix.storage.protocol import Page, StorageBackend, page_bytes
from hiradix.storage.wrappers.wrapper import CodingWrapper

logger = logging.getLogger(__name__)

_HEAD = struct.Struct("<4sI12s")
_MAGIC = b"HRE1"
_TAG_BYTES = 16
KEY_BYTES = 32
OVERHEAD_BYTES = _HEAD.size + _TAG_BYTES


def read_key(path: str) -> bytes:
    """32 bytes from a file: raw, 64 hex digits, or base64. Raises ConfigError that does not show them."""
    try:
        raw, _ = read_small_file(path)
    except OSError as error:
        raise ConfigError(f"{flag('encryption_key_file')}: cannot read {path}: {error}") from error
    for decode in (bytes, lambda text: binascii.unhexlify(text.strip()), base64.b64decode):
        try:
            key = decode(raw)
        except (ValueError, binascii.Error):
            continue
        if len(key) == KEY_BYTES:
            return key
    wanted = f"{KEY_BYTES} bytes, raw, hex or base64"
    raise ConfigError(f"{flag('encryption_key_file')}: {path} must hold {wanted}")


class EncryptedStorage(CodingWrapper):
    """Pages are encrypted on their way in. It proves identity and content, so no seal is needed. Thread-safe.

    master_key: 32 bytes, from which the fingerprint's key is derived (HKDF-SHA256).
    """

    def __init__(self, inner: StorageBackend, master_key: bytes, fingerprint: str):
        super().__init__(inner)
        self.traits = dataclasses.replace(self.traits, verifies=True)
        self._context = b"hiradix-page-key-1\0" + fingerprint.encode("ascii")
        self._cipher = AESGCM(HKDF(SHA256(), KEY_BYTES, salt=None, info=self._context).derive(master_key))

    def own_stats(self) -> Mapping[str, float]:
        return {"decrypt_refused": self._num_damaged}

    def _warn_of_first(self) -> None:
        """Log the likely reason at the first page that does not decrypt, as nothing else shows why all are
        misses."""
        logger.warning(
            "%s: a stored page is damaged or of another key, and is replaced when it is put again. "
            "Servers with different keys need stores of their own, or they replace each other's pages",
            flag("encryption_key_file"),
        )

    def _bound(self, key: str, length: int) -> bytes:
        return b"%s\0%s\0%d" % (self._context, str(key).encode("utf-8"), length)

    def _most_bytes(self, num_bytes: int) -> int:
        return num_bytes + OVERHEAD_BYTES

    def _pack(self, key: str, page: Page) -> bytes:
        plain = b"".join(page)
        nonce = os.urandom(12)
        body: bytes = self._cipher.encrypt(nonce, plain, self._bound(key, len(plain)))
        return _HEAD.pack(_MAGIC, len(plain), nonce) + body

    def _unpack(self, key: str, stored: memoryview, page: Page) -> MissReason | None:
        magic, length, nonce = _HEAD.unpack_from(stored)
        body = stored[_HEAD.size : _HEAD.size + length + _TAG_BYTES]
        if magic != _MAGIC or length > page_bytes(page):
            return MissReason.DAMAGED
        try:
            plain = self._cipher.decrypt(nonce, bytes(body), self._bound(key, length))
        except InvalidTag:
            return MissReason.DAMAGED
        fill_head(memoryview(plain), page)
        return None
