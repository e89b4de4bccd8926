"""Reads text files of records: unpacks them, splits them into lines, and checks each field.

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
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hiradix.apps.traces.packed import read_gzip, zstandard_for
from hiradix.errors import ConfigError

MAX_BYTES = 4 << 30
Record = Mapping[str, Any]
Read = TypeVar("Read")


class Records(NamedTuple):
    """The records of one text file. source: sha256 of its unpacked text. lines: numbers, records. heading: what
    a recording says of itself, as far as it was read."""

    path: Path
    source: str
    first: Record
    lines: Iterator[tuple[int, Record]]
    heading: Record

    @property
    def name(self) -> str:
        return self.path.name.split(".")[0]

    def read(self, read: Callable[[Record], Read]) -> Iterator[Read]:
        """The result of `read` for each record. ConfigError names the file and the line that it refuses."""
        for number, record in self.lines:
            try:
                yield read(record)
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise ConfigError(f"{self.path}:{number}: {type(error).__name__}: {error}") from error


def open_records(path: Path) -> Records:
    """JSON lines, one JSON object, or CSV. ConfigError names the file, and a bad line once it is come to."""
    data = _contents(path)
    source = hashlib.sha256(data).hexdigest()
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in data[:4]:
        raise ConfigError(f"{path}: is no UTF-8 text; iconv -f UTF-16 -t UTF-8 makes it one")
    lines = io.StringIO(data.decode("utf-8-sig", "replace"))
    head = next((line for line in lines if line.strip()), "")
    if head.lstrip().startswith("["):
        raise ConfigError(f"{path}:1: is a JSON array, expected an object a line; jq -c '.[]' makes it so")
    lines.seek(0)
    heading: dict[str, Any] = {}
    if head.strip() == "{":
        records = _one_object(path, lines)
    else:
        records = (
            _json_lines(path, lines, heading) if head.lstrip().startswith("{") else _csv_lines(path, lines)
        )
    first = next(records, None)
    if first is None:
        raise ConfigError(f"{path}: no requests")
    return Records(path, source, first[1], chain([first], records), heading)


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
    """The file's records; of a recording that was cut off, the complete ones."""
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


def _json_lines(path: Path, lines: io.StringIO, heading: dict[str, Any]) -> Iterator[tuple[int, Record]]:
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
            heading |= record
        else:
            yield number, record


def _one_object(path: Path, lines: io.StringIO) -> Iterator[tuple[int, Record]]:
    """One record over many lines, indented."""
    try:
        record = json.load(lines)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}:1: not one JSON object, nor one a line: {error}") from error
    yield 1, record


def _csv_lines(path: Path, lines: io.StringIO) -> Iterator[tuple[int, Record]]:
    reader = csv.DictReader(lines)  # which skips blank lines
    try:
        yield from enumerate(reader, 2)
    except csv.Error as error:
        raise ConfigError(f"{path}:{reader.line_num + 1}: {error}") from error


# -- fields ---------------------------------------------------------------------------------


def field_of(record: Record, names: tuple[str, ...]) -> Any:
    return next((record[name] for name in names if record.get(name) not in (None, "")), None)


def count_of(record: Record, *names: str) -> int:
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


def time_of(record: Record, *names: str) -> float:
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


def time_at(record: Record, name: str) -> float:
    """The seconds in a field that must be there, as `time_of` reads them. KeyError without it."""
    if record.get(name) in (None, ""):
        raise KeyError(name)
    return time_of(record, name)


def ids_of(record: Record, name: str) -> list[int]:
    ids = record[name]
    if not isinstance(ids, list) or not all(type(x) is int and -(1 << 63) <= x < 1 << 64 for x in ids):
        raise ValueError(f"{name} is no list of whole numbers of 64 bits")
    return [x - (1 << 64) if x >= 1 << 63 else x for x in ids]  # the same 64 bits, signed
