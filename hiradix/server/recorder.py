"""--record-trace: what the traffic looks like to a cache, without what is in it.

Each request that ends adds a line: when, how many tokens, and names of the prompt's blocks. A name is a
keyed, chained hash of all tokens up to the block's end; the key is random, kept in memory only and gone with
the process, so names of one file can be compared with each other and with nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from hiradix.engine.api import Scope
from hiradix.errors import ConfigError

logger = logging.getLogger(__name__)

BLOCK_TOKENS = 64
NAME_BYTES = 8
MAX_BYTES = 256 << 20


class TraceRecorder:
    """Appends to a new file, at most `max_bytes`; then it stops and says so. Threads may share it.

    Raises ConfigError when the file exists or cannot be made.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.monotonic):
        self._path, self._left, self._clock = path, max_bytes, clock
        self._started = clock()
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise ConfigError(f"--record-trace {path}: {error.strerror or error}") from error
        self._file = os.fdopen(descriptor, "w", encoding="ascii")
        self._write({"hiradix_trace": 1, "block_tokens": BLOCK_TOKENS})

    def record(self, prompt_ids: Sequence[int], output_tokens: int, scope: Scope) -> None:
        """Add a request that has ended. About 1 us per block; never raises."""
        line: dict[str, object] = {
            "time_s": round(self._clock() - self._started, 3),
            "prompt_tokens": len(prompt_ids),
            "output_tokens": output_tokens,
            "block_tokens": BLOCK_TOKENS,
            "blocks": self.names(prompt_ids, scope),
        }
        if scope.hint is not None:
            line["hint"] = scope.hint
        with self._lock:
            self._write(line)

    def names(self, prompt_ids: Sequence[int], scope: Scope) -> list[str]:
        """Names of the prompt's whole blocks in its namespace."""
        tokens = np.asarray(prompt_ids, np.int64)
        space = json.dumps([scope.extra_key, scope.cache_salt]).encode()
        name, found = hashlib.blake2b(space, key=self._key, digest_size=NAME_BYTES).digest(), []
        for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            data = name + tokens[start : start + BLOCK_TOKENS].tobytes()
            name = hashlib.blake2b(data, key=self._key, digest_size=NAME_BYTES).digest()
            found.append(name.hex())
        return found

    def _write(self, line: dict[str, object]) -> None:
        text = json.dumps(line) + "\n"
        if self._file.closed:
            return
        if len(text) > self._left:
            self._stop("full")
            return
        self._left -= len(text)
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            self._stop(str(error))

    def _stop(self, why: str) -> None:
        logger.warning("--record-trace %s: %s, recording has stopped", self._path, why)
        with contextlib.suppress(OSError):  # what a full disk did not take is written once more
            self._file.close()

    def close(self) -> None:
        """End the recording; never raises."""
        with self._lock:
            try:
                self._file.close()
            except OSError as error:
                logger.warning("--record-trace %s: its last line is lost: %s", self._path, error)

    def discard(self) -> None:
        """As if it had never been made: the file is gone."""
        self.close()
        self._path.unlink(missing_ok=True)
