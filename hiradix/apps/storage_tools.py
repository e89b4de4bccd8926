"""`hiradix storage ls|stat|verify|clear|copy|bench`: look at a store, check, empty, copy or time it."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hiradix.errors import CacheError, ConfigError
from hiradix.storage import Batch, PageFingerprint, StorageContext, StoragePart, open_storage
from hiradix.storage.backends.file.config import PATH_ENV
from hiradix.storage.identities import differences, recall
from hiradix.storage.inventory import URL_FORMS, StoreAddress, StoredPage, scan, stored_fingerprint
from hiradix.storage.kit.options import parse_size
from hiradix.storage.wrappers.quota import QUOTA_KEYS

BATCH = 64
UNCUT: dict[str, Any] = {"max_size": 1 << 60, "touch_interval_s": 1e9}
LOOKING: dict[str, dict[str, Any]] = {"disk": {"verify": "always", **UNCUT}, "file": UNCUT}
"""Keys for stores that are only looked at or emptied: check all, shrink nothing, count nothing as used."""
WRITING: dict[str, dict[str, Any]] = {"file": UNCUT}
"""Keys for stores that are written to: pages that are copied do not drive out others, copied before."""
PATIENT = {"deadline_s": 60.0, "admin_timeout_s": 3600.0}

INTERRUPTED, NOT_READ = 130, 141


def main(arguments: Sequence[str]) -> int:
    """Run one tool; the process's exit status. 1: something is wrong with the store, 2: with the question.

    What a shell has for a process that is interrupted (130) or whose output nobody reads (141) is for these.
    """
    args = _parser().parse_args(list(arguments))
    try:
        with _only_errors_logged(), _without_environment():
            status: int = args.run(args)
            sys.stdout.flush()
    except CacheError as error:
        print(f"hiradix storage {args.tool}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        with contextlib.suppress(OSError):  # what is buffered still is not to be written at the exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOT_READ
    except OSError as error:
        print(f"hiradix storage {args.tool}: error: {error}", file=sys.stderr)
        return 1
    return status


@contextlib.contextmanager
def _only_errors_logged() -> Iterator[None]:
    log = logging.getLogger("hiradix")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


@contextlib.contextmanager
def _without_environment() -> Iterator[None]:
    """A URL says where a store is; what the environment says is for servers."""
    before = os.environ.pop(PATH_ENV, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[PATH_ENV] = before


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("hiradix storage", epilog=f"URL: {URL_FORMS}")
    tools = parser.add_subparsers(dest="tool", required=True)

    def tool(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        made = tools.add_parser(name, help=text, description=text)
        made.add_argument("url", help=URL_FORMS)
        made.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                          help="a key of the backend, its value JSON or text")  # fmt: skip
        made.set_defaults(run=run)
        return made

    for made in (
        tool("ls", list_pages, "fingerprint, length and name of each page"),
        tool("stat", show_sums, "pages and bytes of each fingerprint"),
        tool("verify", verify, "read every page and check it; file and disk stores drop damaged ones"),
    ):
        made.add_argument("--fingerprint", help="only the pages of this one")
    made = tool("clear", clear, "remove the pages of a fingerprint, or all")
    which = made.add_mutually_exclusive_group(required=True)
    which.add_argument("--fingerprint")
    which.add_argument("--all", action="store_true")
    made = tool("copy", copy, "copy every page into another store")
    made.add_argument("to", help="where to, a URL")
    made.add_argument("--set-to", action="append", default=[], metavar="KEY=VALUE")
    made.add_argument("--fingerprint", help="only the pages of this one")
    made = tool("bench", bench, "time put, get and exists with pages of its own, and remove them")
    made.add_argument("--page-bytes", default="256KiB")
    made.add_argument("--pages", type=int, default=256)
    return parser


def _pages(args: argparse.Namespace) -> Iterator[StoredPage]:
    if args.fingerprint:
        stored_fingerprint(args.fingerprint)
    for page in scan(StoreAddress.parse(args.url, args.set)):
        if args.fingerprint in (None, page.fingerprint):
            yield page


def _placed(args: argparse.Namespace, misplaced: list[StoredPage]) -> Iterator[StoredPage]:
    """The pages that are where servers look for them; the others are added to `misplaced`."""
    for page in _pages(args):
        if page.misplaced:
            misplaced.append(page)
        else:
            yield page


def _print_misplaced(pages: Sequence[StoredPage]) -> str:
    """Print a line per misplaced page. Returns what a summary says of them."""
    for page in pages:
        print(f"misplaced  {page.fingerprint}  {page.key}  {page.misplaced}")
    return f"; {len(pages)} are misplaced" if pages else ""


def list_pages(args: argparse.Namespace) -> int:
    """One line per page."""
    for page in _pages(args):
        place = f"  misplaced: {page.misplaced}" if page.misplaced else ""
        print(f"{page.fingerprint}  {page.num_bytes:>12}  {page.key}{place}")
    return 0


def show_sums(args: argparse.Namespace) -> int:
    """One line per fingerprint."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    misplaced: list[StoredPage] = []
    for page in _placed(args, misplaced):
        counts[page.fingerprint] += 1
        sizes[page.fingerprint] += page.num_bytes
    print(f"{'fingerprint':32}  {'pages':>10}  {'bytes':>16}")
    for name, count in counts.most_common():
        print(f"{name:32}  {count:>10}  {sizes[name]:>16}")
    print(f"{'all':32}  {sum(counts.values()):>10}  {sum(sizes.values()):>16}")
    if misplaced:
        num_bytes = sum(page.num_bytes for page in misplaced)
        print(f"{len(misplaced)} page files of {num_bytes} bytes are misplaced: nobody reads them")
    _explain_fingerprints([name for name, _ in counts.most_common()])
    return 0


def _explain_fingerprints(names: Sequence[str]) -> None:
    """Print what the fingerprints stand for, and in which fields the others differ from the first."""
    known = {name: fields for name in names if (fields := recall(name)) is not None}
    first: Mapping[str, Any] | None = None
    if names:
        print()
    for name, fields in known.items():
        if first is None:
            first = fields
            print(f"{name}  " + " ".join(f"{field}={value}" for field, value in sorted(fields.items())))
            continue
        if (others := _same_model(name, known)) is not None:
            print(f"{name}  {fields.get('component') or 'full attention'} of the model of {others}")
            continue
        changed = differences(first, fields)
        why = ", ".join(f"{field} {there!r}, not {here!r}" for field, (here, there) in changed.items())
        print(f"{name}  {why}")
    if unknown := len(names) - len(known):
        print(f"{unknown} fingerprints were made on other hosts: what they stand for is not known here")


def _same_model(name: str, known: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The fingerprint before `name` that stands for another component of the same model; the most alike."""
    found: dict[str, int] = {}
    for other, fields in known.items():
        if other == name:
            break
        changed = set(differences(fields, known[name]))
        if "component" in changed and changed <= {"component", "shape", "dtype", "layout"}:
            found[other] = len(changed)
    return min(found, key=found.__getitem__, default=None)


def verify(args: argparse.Namespace) -> int:
    """Reads every page and counts whole and damaged ones; status 1 when there are damaged or misplaced ones."""
    address = StoreAddress.parse(args.url, args.set)
    good = bad = gone = 0
    misplaced: list[StoredPage] = []
    with _Stores(address) as stores:
        for batch in _batches(_placed(args, misplaced)):
            found, damaged = stores.read(batch)
            for page in damaged:
                print(f"damaged  {page.fingerprint}  {page.key}")
            good, bad = good + len(found), bad + len(damaged)
            gone += len(batch) - len(found) - len(damaged)
    print(f"{good} pages are whole, {bad} are not{_print_misplaced(misplaced)}{_vanished(gone)}")
    return 1 if bad or misplaced else 0


def clear(args: argparse.Namespace) -> int:
    """Removes pages; says how many were there, and which misplaced ones it leaves."""
    address = StoreAddress.parse(args.url, args.set)
    misplaced: list[StoredPage] = []
    pages = Counter(page.fingerprint for page in _placed(args, misplaced))
    pages.update(page.fingerprint for page in misplaced)
    for fingerprint in pages:
        with _Stores(StoreAddress(address.backend, _uncompressed(address.config))) as stores:
            if not stores.of(StoredPage(fingerprint, "", 1)).clear():
                print(f"could not clear {fingerprint}", file=sys.stderr)
                return 1
    kept = [page for page in _pages(args) if page in misplaced] if misplaced else []
    pages.subtract(page.fingerprint for page in kept)
    for fingerprint, count in pages.items():
        print(f"removed {count} pages of {fingerprint}")
    for page in kept:
        print(f"left {page.misplaced}: it is misplaced")
    if not pages:
        print("there were none")
    return 1 if kept else 0


def copy(args: argparse.Namespace) -> int:
    """Copies page by page, checked on the way; status 1 when a page could not be read or written."""
    source, target = StoreAddress.parse(args.url, args.set), StoreAddress.parse(args.to, args.set_to)
    for key in (key for key in QUOTA_KEYS if key in target.config):
        raise ConfigError(f"--set-to {key}: no store says whose its pages are, so copies have no quota")
    copied = unread = unwritten = gone = 0
    misplaced: list[StoredPage] = []
    with _Stores(source) as sources, _Stores(target, is_target=True) as targets:
        for batch in _batches(_placed(args, misplaced)):
            found, damaged = sources.read(batch)
            stored = targets.of(batch[0]).put(Batch.of(tuple(found), is_chain=False), list(found.values()))
            copied, unread = copied + sum(stored), unread + len(damaged)
            unwritten, gone = unwritten + stored.count(False), gone + len(batch) - len(found) - len(damaged)
    lost = f"{unread} could not be read, {unwritten} could not be written"
    print(f"copied {copied} pages; {lost}{_print_misplaced(misplaced)}{_vanished(gone)}")
    return 1 if unread or unwritten or misplaced else 0


def bench(args: argparse.Namespace) -> int:
    """Prints GB/s of put and get, and milliseconds of exists for 128 keys, beside a copy in memory."""
    address = StoreAddress.parse(args.url, args.set)
    num_bytes, count = parse_size("--page-bytes", args.page_bytes), args.pages
    if count < 1 or num_bytes < 1:
        raise ConfigError("--pages and --page-bytes must be at least 1")
    try:
        source = np.frombuffer(np.random.default_rng(1).bytes(num_bytes * count), np.uint8).copy()
        target = np.zeros_like(source)
    except (MemoryError, OverflowError, ValueError) as error:
        raise ConfigError(f"--pages {count} of --page-bytes {num_bytes} do not fit into memory") from error
    keys = [os.urandom(32).hex() for _ in range(count)]
    rows: list[tuple[str, float]] = [("memory copy", _timed(lambda: np.copyto(target, source))[0])]
    fingerprint = PageFingerprint("hiradix storage bench", revision=os.urandom(8).hex())
    settings = {**PATIENT, **WRITING.get(address.backend, {}), **address.config}
    context = StorageContext(fingerprint, settings, num_bytes)
    store = open_storage(address.backend, context)
    try:
        seconds, stored = _timed(lambda: _in_batches(store.put, keys, _cut(source, num_bytes)))
        rows.append(("put", seconds))
        target[:] = 0
        seconds, found = _timed(lambda: _in_batches(store.get, keys, _cut(target, num_bytes)))
        rows.append(("get", seconds))
        exists_s, _ = _timed(lambda: store.exists(keys[:128]))
    finally:
        store.clear()
        store.close()
    if not (all(stored) and all(found)) or not np.array_equal(source, target):
        print(f"{stored.count(False)} pages were not stored, {found.count(False)} not read", file=sys.stderr)
        return 1
    for name, seconds in rows:
        print(f"{name:12} {source.nbytes / seconds / 1e9:8.2f} GB/s")
    print(f"{'exists':12} {1e3 * exists_s:8.2f} ms for {min(128, count)} pages of {num_bytes} bytes")
    return 0


class _Stores:
    """Guarded stores of one address, one for each fingerprint and length, closed together.

    is_target: pages are put into it.
    """

    def __init__(self, address: StoreAddress, is_target: bool = False):
        if address.config.get("compression") not in (None, "none"):
            raise ConfigError("compressed pages do not show their length: only ls, stat and bench work")
        self._address = address
        own = (WRITING if is_target else LOOKING).get(address.backend, {})
        self._keys = {**PATIENT, **own, **address.config, "quantise": "none"}  # as they are stored
        self._open: dict[tuple[str, int], StoragePart] = {}

    def of(self, page: StoredPage) -> StoragePart:
        """The store that holds pages like this one."""
        kind = (page.fingerprint, page.num_bytes)
        if kind not in self._open:
            context = StorageContext(stored_fingerprint(page.fingerprint), self._keys, max(1, page.num_bytes))
            self._open[kind] = open_storage(self._address.backend, context)
        return self._open[kind]

    def read(self, batch: Sequence[StoredPage]) -> tuple[dict[str, list[memoryview]], list[StoredPage]]:
        """Read pages of one fingerprint and length: the whole ones, by key, and those that are damaged or of
        which the store says nothing. Pages in neither went after they were listed, as a server evicted them."""
        store, buffers = self.of(batch[0]), _buffers(batch)
        dropped = _figures(store, "backend_read_damaged", "backend_read_foreign")
        ok = store.get([page.key for page in batch], buffers)
        whole = {page.key: buffer for page, buffer, good in zip(batch, buffers, ok) if good}
        lost = [page for page, good in zip(batch, ok) if not good]
        if _figures(store, "backend_read_damaged", "backend_read_foreign") > dropped:
            return whole, lost  # files and slots that are damaged are gone, too, by now
        return whole, [page for page in lost if not _is_absent(store, page.key)]

    def __enter__(self) -> _Stores:
        return self

    def __exit__(self, *_: Any) -> None:
        for store in self._open.values():
            store.close()


def _figures(store: StoragePart, *names: str) -> float:
    stats = store.stats()
    return sum(stats.get(name, 0.0) for name in names)


def _is_absent(store: StoragePart, key: str) -> bool:
    """Whether the store has answered that it has no such page; no answer is none."""
    before = _figures(store, "exists_missed_absent")
    store.exists([key])
    return _figures(store, "exists_missed_absent") > before


def _vanished(num_pages: int) -> str:
    return f"; {num_pages} went meanwhile" if num_pages else ""


def _uncompressed(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if not key.startswith("compression")}


def _batches(pages: Iterable[StoredPage]) -> Iterator[list[StoredPage]]:
    """Pages of one fingerprint and length together; lists of at most BATCH of them wait in memory. Servers
    list some pages twice: none is twice in one."""
    waiting: dict[tuple[str, int], dict[StoredPage, None]] = {}
    for page in pages:
        batch = waiting.setdefault((page.fingerprint, page.num_bytes), {})
        batch[page] = None
        if len(batch) == BATCH:
            yield list(waiting.pop((page.fingerprint, page.num_bytes)))
    yield from map(list, waiting.values())


def _buffers(batch: Sequence[StoredPage]) -> list[list[memoryview]]:
    return [[memoryview(bytearray(max(0, page.num_bytes)))] for page in batch]


def _cut(memory: Any, num_bytes: int) -> list[list[memoryview]]:
    return [[memoryview(memory[start : start + num_bytes])] for start in range(0, len(memory), num_bytes)]


def _in_batches(
    call: Callable[[Sequence[str], Sequence[Any]], list[bool]], keys: Sequence[str], pages: Sequence[Any]
) -> list[bool]:
    pieces = [call(keys[i : i + 128], pages[i : i + 128]) for i in range(0, len(keys), 128)]
    return list(itertools.chain.from_iterable(pieces))


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    value = work()
    return max(time.perf_counter() - start, 1e-9), value
