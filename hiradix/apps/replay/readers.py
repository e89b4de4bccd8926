"""Reads traces. The fields of the first line say which format it is.

| format | fields | blocks are |
|---|---|---|
| Mooncake, AIPerf | timestamp or delay (ms), input_length, output_length, hash_ids | its, of 512 tokens |
| Bailian (Qwen) | the same and chat_id, timestamp in s | its blocks of 16 tokens, gathered to 64 |
| recorded by the server | time_s, prompt_tokens, output_tokens, blocks, block_tokens | as recorded |
| tokens | tokens or token_ids, of the whole prompt | 64 tokens each |
| rounds (TraceLab) | session_id, input_tokens, output_tokens | assumed: a session's prompt grows |
| Azure, BurstGPT (CSV) | time, token counts, Session ID or none | assumed likewise; else nothing is shared |

Files may be compressed (.gz, .xz, .zst). A bad line is an error that names it, but for the last one of a
recording that was cut off in it.
"""

from __future__ import annotations

import codecs
import csv
import hashlib
import io
import json
import lzma
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from hiradix.apps.replay.packed import read_gzip, zstandard_for
from hiradix.apps.replay.trace import Namer, Trace, TraceRequest
from hiradix.errors import ConfigError

MAX_BYTES = 4 << 30
GATHERED, PLAIN_BLOCK, SESSION_BLOCK = 64, 64, 64
Record = Mapping[str, Any]

_SESSION = ("session_id", "Session ID", "conversation_id", "trace_id", "chat_id")
_TIME = ("time_s", "timestamp", "Timestamp", "TIMESTAMP", "time", "start_time")
_PROMPT = ("prompt_tokens", "input_tokens", "input_length", "ContextTokens", "Request tokens")
_ANSWER = ("output_tokens", "output_length", "GeneratedTokens", "Response tokens", "completion_tokens")


def read_trace(path: Path, limit: int | None = None) -> Trace:
    """The trace in `path`, its first `limit` requests. ConfigError names the file and the line."""
    data = _contents(path)
    source = hashlib.sha256(data).hexdigest()
    name = path.name.split(".")[0]
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in data[:4]:
        raise ConfigError(f"{path}: is no UTF-8 text; iconv -f UTF-16 -t UTF-8 makes it one")
    lines = io.StringIO(data.decode("utf-8-sig", "replace"))
    first = next((line for line in lines if line.strip()), "")
    if first.lstrip().startswith("["):
        raise ConfigError(f"{path}:1: is a JSON array, expected an object a line; jq -c '.[]' makes it so")
    lines.seek(0)
    records = _json_lines(path, lines) if first.lstrip().startswith("{") else _csv_lines(path, lines)
    found = list(_limited(records, limit))
    if not found:
        raise ConfigError(f"{path}: no requests")
    block_tokens, read = _reader(path, found[0][1])
    calls = []
    for number, record in found:
        try:
            calls.append(read(record))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"{path}:{number}: {type(error).__name__}: {error}") from error
    if any("delay" in record for _, record in found):
        calls.sort(key=lambda call: call.time_s)  # the file has one session after another
    return Trace(name, source, block_tokens, tuple(calls))


def _contents(path: Path) -> bytes:
    opened: dict[str, Callable[..., Any]] = {".xz": lzma.open}
    if path.suffix == ".zst":
        return _zstandard(path)
    if path.suffix == ".gz":
        return _gzip(path)
    try:
        with opened.get(path.suffix, open)(path, "rb") as file:
            data: bytes = file.read(MAX_BYTES + 1)
    except (OSError, lzma.LZMAError, zlib.error, EOFError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: more than {MAX_BYTES} bytes")
    return data


def _gzip(path: Path) -> bytes:
    """What the file holds; of a recording that was cut off, what is there of it."""
    try:
        data, is_whole = read_gzip(path.read_bytes(), MAX_BYTES + 1)
    except (OSError, zlib.error) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not is_whole and not data.startswith(b'{"hiradix_trace"'):
        raise ConfigError(f"{path}: cannot be read: it ends in the middle")
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: more than {MAX_BYTES} bytes")
    return data


def _zstandard(path: Path) -> bytes:
    zstandard = zstandard_for(str(path))
    try:
        with (
            path.open("rb") as file,
            zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True) as unpacked,
        ):
            data: bytes = unpacked.read(MAX_BYTES + 1)
    except (OSError, EOFError, zstandard.ZstdError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: more than {MAX_BYTES} bytes")
    return data


def _limited(records: Iterator[tuple[int, Record]], limit: int | None) -> Iterator[tuple[int, Record]]:
    for count, record in enumerate(records):
        if limit is not None and count >= limit:
            return
        yield record


def _json_lines(path: Path, lines: io.StringIO) -> Iterator[tuple[int, Record]]:
    is_recorded = False
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            if is_recorded and not line.endswith("\n"):
                return  # by a server that was killed, or whose disk was full
            raise ConfigError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(record, dict):
            raise ConfigError(f"{path}:{number}: not an object")
        if "hiradix_trace" in record:  # the heading of a recorded file
            is_recorded = True
        else:
            yield number, record


def _csv_lines(path: Path, lines: io.StringIO) -> Iterator[tuple[int, Record]]:
    reader = csv.DictReader(lines)  # which skips blank lines
    try:
        yield from enumerate(reader, 2)
    except csv.Error as error:
        raise ConfigError(f"{path}:{reader.line_num + 1}: {error}") from error


def _reader(path: Path, first: Record) -> tuple[int, Callable[[Record], TraceRequest]]:
    """Tokens per block, and what reads one record."""
    if "hash_ids" in first and "chat_id" in first:
        return GATHERED, _gathering(GATHERED // 16)
    if "hash_ids" in first:
        return 512, _mooncake()
    if "blocks" in first:
        size = first.get("block_tokens")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"{path}: block_tokens must be a whole number >= 1, got {size!r}")
        return size, _recorded(size)
    if "tokens" in first or "token_ids" in first:
        return PLAIN_BLOCK, _plain()
    if _field(first, _PROMPT) is not None:
        return SESSION_BLOCK, _sessions()
    raise ConfigError(f"{path}: unknown format: its first record has {', '.join(sorted(map(str, first)))}")


def _field(record: Record, names: tuple[str, ...]) -> Any:
    return next((record[name] for name in names if record.get(name) not in (None, "")), None)


def _count(record: Record, *names: str) -> int:
    """The first of these fields that is there: a whole number, or a text of one. Errors name the field."""
    name = next((name for name in names if record.get(name) not in (None, "")), None)
    if name is None:
        raise KeyError(" or ".join(names))
    value = record[name]
    is_number = isinstance(value, (int, float, str)) and not isinstance(value, bool)
    try:
        count = int(value) if is_number else -1
    except (ValueError, OverflowError):  # no digits, or no finite number
        count = -1
    if not 0 <= count < 1 << 31 or (isinstance(value, float) and value != count):
        raise ValueError(f"{name} is {str(value):.64}, no whole number in 0..{(1 << 31) - 1}")
    return count


def _answer(record: Record) -> int:
    """Its tokens; 1 where nothing is said of them."""
    return 1 if _field(record, _ANSWER) is None else max(1, _count(record, *_ANSWER))


def _time(record: Record, *names: str) -> float:
    """Seconds, or what the file's unit is, of the first of these fields that is there; 0 where none is."""
    name = next((name for name in names if record.get(name) not in (None, "")), None)
    if name is None:
        return 0.0
    value = record[name]
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{name} is no time: {str(value):.64}")
    try:
        seconds = float(value)
    except (ValueError, OverflowError):
        try:
            return datetime.fromisoformat(str(value)[:26]).timestamp()
        except (ValueError, OverflowError, OSError):
            raise ValueError(f"{name} is no time: {str(value):.64}") from None
    if not math.isfinite(seconds):
        raise ValueError(f"{name} is {seconds}")
    return seconds


def _time_at(record: Record, name: str) -> float:
    """As `_time`, of a field that must be there."""
    if record.get(name) in (None, ""):
        raise KeyError(name)
    return _time(record, name)


def _ids(record: Record, name: str) -> list[int]:
    ids = record[name]
    if not isinstance(ids, list) or not all(type(x) is int and -(1 << 63) <= x < 1 << 64 for x in ids):
        raise ValueError(f"{name} is no list of whole numbers of 64 bits")
    return [x - (1 << 64) if x >= 1 << 63 else x for x in ids]  # the same 64 bits, signed


def _delay(record: Record) -> float:
    delay = _time(record, "delay")
    if delay < 0:
        raise ValueError(f"delay is {delay}")
    return delay


def _mooncake() -> Callable[[Record], TraceRequest]:
    """With `delay` (ms, AIPerf's) for `timestamp`: so long after the request before it of its session, or of
    all where it names none. Answers take no time here."""
    last: dict[str, float] = {}

    def read(record: Record) -> TraceRequest:
        tokens = _count(record, "input_length")
        blocks = np.array(_ids(record, "hash_ids")[: tokens // 512], np.int64)
        session = str(_field(record, _SESSION) or "")
        if record.get("timestamp") is not None:
            time_s = _time(record, "timestamp") / 1000
        elif record.get("delay") is not None:
            time_s = last.get(session, 0.0) + _delay(record) / 1000
        elif session and session not in last:
            time_s = 0.0  # a session's first request has neither
        else:
            raise KeyError("timestamp or delay")
        last[session] = time_s
        return TraceRequest(time_s, tokens, _count(record, "output_length"), blocks)

    return read


def _gathering(count: int) -> Callable[[Record], TraceRequest]:
    """Small blocks by the handful: as many as make a block of ours, named by the last of them."""
    namer = Namer()

    def read(record: Record) -> TraceRequest:
        tokens, ids = _count(record, "input_length"), _ids(record, "hash_ids")
        whole = [tuple(ids[i : i + count]) for i in range(0, tokens // GATHERED * count, count)]
        blocks = namer.blocks([group for group in whole if len(group) == count])
        return TraceRequest(_time_at(record, "timestamp"), tokens, _count(record, "output_length"), blocks)

    return read


def _recorded(size: int) -> Callable[[Record], TraceRequest]:
    namer = Namer()

    def read(record: Record) -> TraceRequest:
        tokens, names, own = _count(record, "prompt_tokens"), record["blocks"], record["block_tokens"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("blocks is no list of texts")
        if own != size or isinstance(own, bool) or len(names) > tokens // size:
            raise ValueError(f"{len(names)} blocks of {own} tokens, of {tokens} tokens in blocks of {size}")
        blocks = namer.blocks(names)
        hint = record.get("hint")
        return TraceRequest(
            _time_at(record, "time_s"),
            tokens,
            _count(record, "output_tokens"),
            blocks,
            None if hint is None else str(hint),
        )

    return read


def _plain() -> Callable[[Record], TraceRequest]:
    namer = Namer()

    def read(record: Record) -> TraceRequest:
        tokens = _ids(record, "tokens" if "tokens" in record else "token_ids")
        size = PLAIN_BLOCK
        contents = [tuple(tokens[i : i + size]) for i in range(0, len(tokens) // size * size, size)]
        return TraceRequest(_time(record, *_TIME), len(tokens), _answer(record), namer.blocks(list(contents)))

    return read


def _sessions() -> Callable[[Record], TraceRequest]:
    """Counts only: what a session sent before is taken for a prefix of what it sends now."""
    namer = Namer()
    serial = iter(range(1 << 62))

    def read(record: Record) -> TraceRequest:
        tokens = _count(record, *_PROMPT)
        session = _field(record, _SESSION)
        whose = ("alone", next(serial)) if session is None else ("session", str(session))
        blocks = namer.blocks([(whose, i) for i in range(tokens // SESSION_BLOCK)])
        return TraceRequest(_time(record, *_TIME), tokens, _answer(record), blocks)

    return read
