"""Reads traces. The fields of the first line say which format it is.

| format | fields | blocks are |
|---|---|---|
| Mooncake, AIPerf | timestamp or delay (ms), input_length, output_length, hash_ids | its, of 512 tokens |
| Bailian (Qwen) | the same and chat_id, timestamp in s | its blocks of 16 tokens, gathered to 64 |
| recorded by the server | time_s, prompt_tokens, output_tokens, blocks, block_tokens | as recorded |
| tokens | tokens or token_ids, of the whole prompt | 64 tokens each |
| rounds (TraceLab) | session_id, input_tokens, output_tokens | assumed: a session's prompt grows |
| Azure, BurstGPT (CSV) | time, token counts, Session ID or none | assumed likewise; else nothing is shared |
| agents' sessions | requests, one session a line | its blocks of 64 tokens, gathered to 512 |
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np

from hiradix.apps.traces.records import Record, count_of, field_of, ids_of, open_records, time_at, time_of
from hiradix.apps.traces.sessions import EVERY_SESSION, Fleet, is_sessions, merged, read_folder, read_sessions
from hiradix.apps.traces.trace import Namer, Trace, TraceRequest
from hiradix.errors import ConfigError
from hiradix.policy.uses import known_hint

GATHERED, PLAIN_BLOCK, SESSION_BLOCK = 64, 64, 64

_SESSION = ("session_id", "Session ID", "conversation_id", "trace_id", "chat_id")
_TIME = ("time_s", "timestamp", "Timestamp", "TIMESTAMP", "time", "start_time")
_PROMPT = ("prompt_tokens", "input_tokens", "input_length", "ContextTokens", "Request tokens")
_ANSWER = ("output_tokens", "output_length", "GeneratedTokens", "Response tokens", "completion_tokens")


def read_trace(path: Path, limit: int | None = None, fleet: Fleet = EVERY_SESSION) -> Trace:
    """The trace in `path`, its first `limit` requests. ConfigError names the file and the line.

    fleet: how a file, or a folder, of agents' sessions becomes one trace; another file ignores it.
    """
    if path.is_dir():
        return merged(read_folder(path), fleet, limit)
    file = open_records(path)
    if is_sessions(file.first):
        return merged(read_sessions(file), fleet, limit)
    taken = list(islice(file.lines, limit))
    if not taken:
        raise ConfigError(f"{path}: no requests")
    block_tokens, read = _reader(path, file.first)
    calls = list(file._replace(lines=iter(taken)).read(read))
    if any("delay" in record for _, record in taken):
        calls.sort(key=lambda call: call.time_s)  # the file has one session after another
    size = file.heading.get("bytes_per_token")
    own = size if isinstance(size, int) and size > 0 else None
    return Trace(file.name, file.source, block_tokens, tuple(calls), bytes_per_token=own)


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
    if field_of(first, _PROMPT) is not None:
        return SESSION_BLOCK, _sessions()
    raise ConfigError(f"{path}: unknown format: its first record has {', '.join(sorted(map(str, first)))}")


def _answer(record: Record) -> int:
    """The number of tokens of a record's answer; 1 if it does not say."""
    return 1 if field_of(record, _ANSWER) is None else max(1, count_of(record, *_ANSWER))


def _delay(record: Record) -> float:
    delay = time_of(record, "delay")
    if delay < 0:
        raise ValueError(f"delay is {delay}")
    return delay


def _mooncake() -> Callable[[Record], TraceRequest]:
    """A reader of Mooncake's records. A `delay` (ms, AIPerf's) in place of `timestamp` counts from the
    request before it in its session, or from the last of all if it names none. Answers take no time here."""
    last: dict[str, float] = {}

    def read(record: Record) -> TraceRequest:
        tokens = count_of(record, "input_length")
        blocks = np.array(ids_of(record, "hash_ids")[: tokens // 512], np.int64)
        session = str(field_of(record, _SESSION) or "")
        if record.get("timestamp") is not None:
            time_s = time_of(record, "timestamp") / 1000
        elif record.get("delay") is not None:
            time_s = last.get(session, 0.0) + _delay(record) / 1000
        elif session and session not in last:
            time_s = 0.0  # a session's first request has neither
        else:
            raise KeyError("timestamp or delay")
        last[session] = time_s
        return TraceRequest(time_s, tokens, count_of(record, "output_length"), blocks)

    return read


def _gathering(count: int) -> Callable[[Record], TraceRequest]:
    """Small blocks by the handful: as many as make a block of ours, named by the last of them."""
    namer = Namer()

    def read(record: Record) -> TraceRequest:
        tokens, ids = count_of(record, "input_length"), ids_of(record, "hash_ids")
        whole = [tuple(ids[i : i + count]) for i in range(0, tokens // GATHERED * count, count)]
        blocks = namer.blocks([group for group in whole if len(group) == count])
        return TraceRequest(time_at(record, "timestamp"), tokens, count_of(record, "output_length"), blocks)

    return read


def _recorded(size: int) -> Callable[[Record], TraceRequest]:
    namer = Namer()

    def read(record: Record) -> TraceRequest:
        tokens, names, own = count_of(record, "prompt_tokens"), record["blocks"], record["block_tokens"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("blocks is no list of texts")
        if own != size or isinstance(own, bool) or len(names) > tokens // size:
            raise ValueError(f"{len(names)} blocks of {own} tokens, of {tokens} tokens in blocks of {size}")
        blocks = namer.blocks(names)
        hint = record.get("hint")
        return TraceRequest(
            time_at(record, "time_s"),
            tokens,
            count_of(record, "output_tokens"),
            blocks,
            None if hint is None else known_hint(hint),
        )

    return read


def _plain() -> Callable[[Record], TraceRequest]:
    namer = Namer()

    def read(record: Record) -> TraceRequest:
        tokens = ids_of(record, "tokens" if "tokens" in record else "token_ids")
        size = PLAIN_BLOCK
        contents = [tuple(tokens[i : i + size]) for i in range(0, len(tokens) // size * size, size)]
        return TraceRequest(
            time_of(record, *_TIME), len(tokens), _answer(record), namer.blocks(list(contents))
        )

    return read


def _sessions() -> Callable[[Record], TraceRequest]:
    """Counts only: what a session sent before is taken for a prefix of what it sends now."""
    namer = Namer()
    serial = iter(range(1 << 62))

    def read(record: Record) -> TraceRequest:
        tokens = count_of(record, *_PROMPT)
        session = field_of(record, _SESSION)
        whose = ("alone", next(serial)) if session is None else ("session", str(session))
        blocks = namer.blocks([(whose, i) for i in range(tokens // SESSION_BLOCK)])
        return TraceRequest(time_of(record, *_TIME), tokens, _answer(record), blocks)

    return read
