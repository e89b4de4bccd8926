"""The files of a model's or an adapter's weights, found as engines find them, and what is in them."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hiradix.prefix_cache.shared_digests import digests_of

CONFIG_NAME = "config.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors", ".npz")
_DECIDING = (".py", ".index.json")  # a model's own code, and which tensor is taken out of which file
_DECIDING_NAMES = ("params.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json")
_NUM_READERS = 16  # threads: a digest of one file's parts each, and what waits for a far disk
_PART_BYTES = 1 << 26
_BUFFER_BYTES = 1 << 20
_HEAD_BYTES = 1 << 20
_PIECE_BYTES = 4096
_NUM_PIECES = 1024  # of a file that does not say where its tensors are
_HEADER_BYTES = 100_000_000  # safetensors' own limit
_SHARED_BYTES = 1 << 26  # of larger files processes of a host share the reading
_WHOLE_BYTES = 1 << 28  # files of the hub's cache up to here are read, whatever their name says
_SHA256 = re.compile("[0-9a-f]{64}")
_KIND = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]*")
_SHARD = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class Origin:
    """The origin of a model's weights. revision: distinguishes them from others, the same wherever a folder
    lies.

    is_read: whether it is of the numbers themselves. Where they are in no file here (object storage, another
    process) it is of their path alone, and a change behind that path does not show.
    """

    revision: str
    is_read: bool


def origin_of(
    path: str,
    revision: str | None = None,
    cache_dir: str | None = None,
    config_name: str = CONFIG_NAME,
    is_hub: bool = True,
) -> Origin:
    """The weights that an engine takes for `path`: a folder, a file, or a name.

    revision, cache_dir: what the engine was given with it; None: the main branch, the hub's own cache.
    is_hub: whether names are Hugging Face's. A name whose snapshot is in the cache is that commit, and with
    `:quantisation` behind it those GGUF files of it; any other is known by its text. Reads the files whole,
    but for large ones that the hub has named by their contents.
    """
    place = Path(path)
    if place.is_dir():
        return _of_folder(place, config_name)
    if place.is_file():
        return Origin(_digest(sorted(_shards_of(place))), True)
    if is_hub and (quantised := _of_quantisation(path, revision, cache_dir, config_name)) is not None:
        return quantised
    found = hub_snapshot(path, revision, cache_dir) if is_hub else None
    return Origin(f"{path}@{revision or 'main'}", False) if found is None else _of_folder(found, config_name)


def _of_quantisation(
    path: str, revision: str | None, cache_dir: str | None, config_name: str
) -> Origin | None:
    """The weights of `repository:quantisation`: those GGUF files of the repository that are called so.

    None of another name, and where none of them is in the cache.
    """
    name, _, kind = path.rpartition(":")
    folder = hub_snapshot(name, revision, cache_dir) if _KIND.fullmatch(kind) else None
    if folder is None:
        return None
    called = re.compile(rf"(.*[-._])?{re.escape(kind)}(-\d{{5}}-of-\d{{5}})?", re.IGNORECASE)
    files = [file for file in sorted(folder.rglob("*.gguf")) if called.fullmatch(file.stem)]
    if not files:
        return None
    beside = [file for file in folder.iterdir() if file.suffix != ".gguf" and decides(file, config_name)]
    return Origin(f"{name}@{folder.name}:{kind}:{_digest(files + sorted(beside))}", True)


def hub_snapshot(name: str, revision: str | None = None, cache_dir: str | None = None) -> Path | None:
    """The folder in Hugging Face's cache that a repository's name stands for; None where it has none.

    revision: a branch, a tag or a commit; None: the main branch, as it was when it was fetched last.
    """
    if name.count("/") > 1 or "--" in name or ":" in name:
        return None  # no name of a repository
    repository = Path(cache_dir or _hub_cache()).expanduser() / f"models--{name.replace('/', '--')}"
    wanted = revision or "main"
    try:
        commit = (repository / "refs" / wanted).read_text().strip()
    except (OSError, ValueError):
        commit = wanted
    folder = repository / "snapshots" / commit
    return folder if folder.is_dir() else None


def repository_of(folder: Path) -> tuple[str, str] | None:
    """The repository and the commit of a snapshot in Hugging Face's cache; None of another folder."""
    parts = folder.absolute().parts
    if len(parts) < 3 or parts[-2] != "snapshots" or not parts[-3].startswith("models--"):
        return None
    return parts[-3].removeprefix("models--").replace("--", "/"), parts[-1]


def _hub_cache() -> str:
    """The folder of the hub's cache, found as huggingface_hub finds it."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return os.path.expandvars(os.environ[name])
    home = os.environ.get("HF_HOME")
    if not home:
        home = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return os.path.join(os.path.expandvars(home), "hub")


def _of_folder(folder: Path, config_name: str) -> Origin:
    digest, repository = weights_digest(str(folder), config_name), repository_of(folder)
    if repository is not None:
        digest = f"{'@'.join(repository)}:{digest}"
    is_read = any(file.suffix in _WEIGHTS for file in folder.iterdir())
    if not is_read and repository is None:  # they are elsewhere: this is a copy of what describes them
        digest += f"@{folder.resolve()}"
    return Origin(digest, is_read)


def _shards_of(file: Path) -> Iterable[Path]:
    """The files that are read with a GGUF file that is one of several."""
    found = _SHARD.fullmatch(file.name)
    if found is None:
        return [file]
    pattern = re.compile(rf"{re.escape(found[1])}-\d{{5}}-of-{found[2]}\.gguf")
    return [one for one in file.parent.iterdir() if pattern.fullmatch(one.name)]


def weights_digest(path: str, config_name: str) -> str:
    """32 hex digits of a folder's config file, weight files, and what else says how these are read.

    Files in other folders count where an index names them. All bytes count, so that one row that was changed
    is other weights. Costs as much as reading the files once more, once for all processes of a host
    (`shared_digests`): several at once, 64 MiB each, at most a core's SHA-256 each. Of files above 256 MiB in
    Hugging Face's cache, named there by the SHA-256 of what was fetched, the name, the size and pieces are
    read: the first MiB, and the middle of every tensor, for the case that they were written over in place.
    """
    files = {file for file in Path(path).iterdir() if decides(file, config_name)}
    return _digest(sorted(files.union(*map(_named_by, files))))


def _named_by(file: Path) -> list[Path]:
    """The files that an index takes tensors out of; none of another file."""
    if not file.name.endswith(".index.json"):
        return []
    try:
        names = set(json.loads(file.read_bytes())["weight_map"].values())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []  # whether it can be used is the engine's to say
    found = (file.parent / name for name in names if isinstance(name, str))
    return [one for one in found if os.path.isfile(one)]


def decides(file: Path, config_name: str) -> bool:
    """Whether a file of a folder says what its weights are, or how they are read."""
    name = file.name
    is_one = name == config_name or name in _DECIDING_NAMES or name.endswith((*_WEIGHTS, *_DECIDING))
    return is_one and file.is_file()


def _digest(files: Iterable[Path]) -> str:
    digest, sizes = hashlib.sha256(), {file: file.stat().st_size for file in files}
    with ThreadPoolExecutor(_NUM_READERS) as readers:

        def parts_of(file: Path, alive: Callable[[], None] = lambda: None) -> list[Future[bytes]]:
            begins = range(0, sizes[file], _PART_BYTES)
            return [readers.submit(_part_digest, file, begin, alive) for begin in begins]

        def whole(file: Path, alive: Callable[[], None]) -> bytes:
            return b"".join(part.result() for part in parts_of(file, alive))

        blobs = {file: _blob_name(file) for file, size in sizes.items() if size > _WHOLE_BYTES}
        own = {file: parts_of(file) for file, size in sizes.items() if size <= _SHARED_BYTES}
        own |= {
            file: [readers.submit(_sampled, file, sizes[file], blob)] for file, blob in blobs.items() if blob
        }
        shared = digests_of((file for file in sizes if file not in own), whole, _pieces)
        for file, size in sizes.items():
            digest.update(f"{file.name} {size}\n".encode())
            digest.update(shared[file] if file in shared else b"".join(part.result() for part in own[file]))
    return digest.hexdigest()[:32]


def _blob_name(file: Path) -> str | None:
    """The content hash by which Hugging Face's cache names a file; None for other files."""
    target = file.resolve()
    is_blob = file.is_symlink() and target.parent.name == "blobs" and _SHA256.fullmatch(target.name)
    return target.name if is_blob else None


def _part_digest(file: Path, begin: int, alive: Callable[[], None]) -> bytes:
    """alive: called for each buffer that was read."""
    digest, remaining, buffer = hashlib.sha256(), _PART_BYTES, memoryview(bytearray(_BUFFER_BYTES))
    with file.open("rb", buffering=0) as stream:
        stream.seek(begin)
        while remaining and (count := stream.readinto(buffer[: min(remaining, _BUFFER_BYTES)])):
            digest.update(buffer[:count])
            remaining -= count
            alive()
    return digest.digest()


def _sampled(file: Path, size: int, blob: str) -> bytes:
    with file.open("rb") as stream:
        return hashlib.sha256(blob.encode() + _pieces(stream)).digest()


def _pieces(stream: BinaryIO) -> bytes:
    """The first MiB of a weight file and a piece from the middle of each tensor."""
    size = os.fstat(stream.fileno()).st_size
    stream.seek(0)
    found = [stream.read(_HEAD_BYTES)]
    for middle in _middles(stream, size):
        stream.seek(max(0, middle - _PIECE_BYTES // 2))
        found.append(stream.read(_PIECE_BYTES))
    return b"".join(found)


def _middles(stream: BinaryIO, size: int) -> list[int]:
    """The places in a weight file to sample: the middle of each tensor, or evenly spaced places."""
    try:
        stream.seek(0)
        length = int.from_bytes(stream.read(8), "little")
        header: Any = json.loads(stream.read(length)) if length <= _HEADER_BYTES else None
        spans = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        found = sorted(8 + length + (int(begin) + int(end)) // 2 for begin, end in spans)
        if found and 0 <= found[0] and found[-1] < size:
            return found
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        pass
    return [size * n // _NUM_PIECES for n in range(_NUM_PIECES)]
