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
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

from hiradix.apps.engine.api import Scope
from hiradix.apps.traces.packed import PACKED, packer, unpacked_head
from hiradix.errors import ConfigError

logger = logging.getLogger(__name__)

BLOCK_TOKENS = 64
NAME_BYTES = 8
MAX_BYTES = 256 << 20
MAX_FILES = 1000
COMPRESSED = (".xz", ".bz2", ".zip")
"""Suffixes that a recording may not have: their compressors write no line before many more have come."""
MAX_WAITING = 256
"""Requests that wait to be written; further ones are left out."""


class _Ended(NamedTuple):
    """A request that has ended, and when."""

    time_s: float
    prompt_ids: Sequence[int]
    output_tokens: int
    scope: Scope


def _new_file(path: Path) -> tuple[Path, int]:
    """`path`, or what is beside the recordings there: name and descriptor; ConfigError."""
    for number in range(MAX_FILES):
        beside = path.with_name(f"{path.stem}.{number}{path.suffix}") if number else path
        try:
            return beside, os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            if not (isinstance(error, FileExistsError) and _is_recording(beside)):
                raise ConfigError(f"--record-trace {beside}: {error.strerror or error}") from error
    raise ConfigError(f"--record-trace {path}: {MAX_FILES} recordings are there, move some away")


def _is_recording(path: Path) -> bool:
    """Whether the file begins as ours do, as far as it goes: the first line may be torn."""
    begin = json.dumps({"hiradix_trace": 1})[:-1].encode()
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            head = file.read(4096)
        if path.suffix in PACKED:
            head = unpacked_head(path.suffix, head)
        return begin.startswith(head[: len(begin)])
    except (OSError, ConfigError):
        return False


class TraceRecorder:
    """Appends to a new file, at most `max_bytes`; then it stops and says so. Threads may share it.

    Beside an earlier recording: `trace.1.jsonl` and so on beside `trace.jsonl`, so that a server may be
    started again. What is named .gz or .zst is compressed, line by line: one that a killed server leaves is
    read up to its last line. `max_bytes` counts the text. Raises ConfigError when another file is there or
    none can be made, and for the names of other compressed ones.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.monotonic):
        self._left, self._clock = max_bytes, clock
        self._started = clock()
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()  # of who waits
        self._file_lock = threading.Lock()
        self._waiting: SimpleQueue[_Ended | None] = SimpleQueue()
        self._writer: threading.Thread | None = None
        self._is_closing = False
        self.num_lost = 0
        if path.suffix in COMPRESSED:
            raise ConfigError(f"--record-trace {path}: is text, .gz or .zst: name it without {path.suffix}")
        self._packer = packer(f"--record-trace {path}", path.suffix)
        self._path, descriptor = _new_file(path)
        if self._path != path:
            logger.warning("--record-trace %s: has a recording, this one is in %s", path, self._path)
        self._file = os.fdopen(descriptor, "wb")
        self._write({"hiradix_trace": 1, "block_tokens": BLOCK_TOKENS})

    def describe(self, bytes_per_token: int) -> None:
        """Say how many bytes of KV a token has, in a heading of its own: the engine is built after the file."""
        with self._file_lock:
            self._write({"hiradix_trace": 1, "bytes_per_token": bytes_per_token})

    def later(self, prompt_ids: Sequence[int], output_tokens: int, scope: Scope) -> None:
        """`record` on a thread of its own: nobody waits for the disk. If it hangs, requests are left out."""
        with self._lock:
            if self._waiting.qsize() >= MAX_WAITING or self._is_closing or not self._has_writer():
                self.num_lost += 1
                return
            self._waiting.put(_Ended(self._clock(), prompt_ids, output_tokens, scope))

    def _has_writer(self) -> bool:
        if self._writer is None:
            writer = threading.Thread(target=self._write_on, name="hiradix-trace", daemon=True)
            try:
                writer.start()
            except RuntimeError:  # too many threads at this moment
                return False
            self._writer = writer
        return True

    def _write_on(self) -> None:
        while (ended := self._waiting.get()) is not None:
            self._add(ended)

    def record(self, prompt_ids: Sequence[int], output_tokens: int, scope: Scope) -> None:
        """Add a request that has ended. About 1 us per block; never raises."""
        self._add(_Ended(self._clock(), prompt_ids, output_tokens, scope))

    def _add(self, ended: _Ended) -> None:
        if self._file.closed:
            return
        time_s, prompt_ids, output_tokens, scope = ended
        line: dict[str, object] = {
            "time_s": round(time_s - self._started, 3),
            "prompt_tokens": len(prompt_ids),
            "output_tokens": output_tokens,
            "block_tokens": BLOCK_TOKENS,
            "blocks": self.names(prompt_ids, scope),
        }
        if scope.hint is not None:
            line["hint"] = scope.hint
        with self._file_lock:
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
            self._file.write(self._packer.pack(text.encode("ascii")))
            self._file.flush()
        except OSError as error:
            self._stop(str(error))

    def _stop(self, why: str) -> None:
        logger.warning("--record-trace %s: %s, recording has stopped", self._path, why)
        with contextlib.suppress(OSError):  # what a full disk did not take is written once more
            self._end_file()

    def _end_file(self) -> None:
        """Close it, whole in its format. Raises OSError; it is closed all the same."""
        if self._file.closed:
            return
        try:
            self._file.write(self._packer.end())
        finally:
            self._file.close()

    def close(self, timeout_s: float = 5.0) -> None:
        """End the recording, within the deadline; never raises."""
        with self._lock:
            self._is_closing = True
            self._waiting.put(None)
        if self._writer is not None:
            self._writer.join(timeout_s)
            if self._writer.is_alive():
                logger.warning("--record-trace %s: hangs; its last lines are lost", self._path)
                return
        if self.num_lost:
            logger.warning("--record-trace %s: %d requests are left out", self._path, self.num_lost)
        with self._file_lock:
            try:
                self._end_file()
            except OSError as error:
                logger.warning("--record-trace %s: its last line is lost: %s", self._path, error)

    def discard(self) -> None:
        """Close the recording and delete its file."""
        self.close()
        self._path.unlink(missing_ok=True)
