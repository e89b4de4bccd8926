"""GHD's class tables: per class and age, how often data is used again, and what keeping it is worth.

Ages are counted in tokens of traffic, so a table knows no clock: half the load is half the speed and the
same decisions. Arithmetic is IEEE add, multiply, divide in a fixed order: equal inputs give equal tables.
"""

from __future__ import annotations

import secrets
import zlib
from pathlib import Path
from typing import Any, Final, TypeAlias
from zipfile import BadZipFile

import numpy as np

from hiradix.errors import ConfigError
from hiradix.policy.class_ranks import BUCKETS, EDGE_LIST, ClassRanks
from hiradix.policy.gittins import hazard_of, index_of
from hiradix.policy.gittins_numpy import Floats, Ints

ClassKey: TypeAlias = tuple[int, ...]

MAX_CLASSES: Final = 512
ROOT: Final = 0  # the families: indices of the first three classes
SHARED: Final = 1
CONVERSATION: Final = 2
NEAR_CURVES: Final = (
    128  # classes with such a second number borrow think times from their parent, not their family
)
FAMILIES: tuple[ClassKey, ...] = ((), (SHARED,), (CONVERSATION,))

_VERSION = 1
_MOST_VOTES = 1e15  # of a class and age in a file; thousands are seen
# RuntimeError: an archive whose flags say that it is encrypted, or made by a later version.
_UNREADABLE = (OSError, ValueError, EOFError, KeyError, RuntimeError, MemoryError, BadZipFile, zlib.error)


EDGES = np.array(EDGE_LIST, np.int64)
_WIDTHS = np.diff(EDGES).astype(np.float64)


class ClassTables:
    """Votes per (class, bucket), and the index they give. One row of 64 per class, at most 512 classes.

    used: votes of data used again at that age. exposed: votes of data that could have been.
    started: votes of data that has lived through that age, used or not.
    index: best expected hits per token of residence from that age on (Gittins); small leaves first.
    """

    def __init__(self) -> None:
        self.keys: list[ClassKey] = []
        self._ids: dict[ClassKey, int] = {}
        self._parents: list[int] = []
        self._curves: list[int] = []  # whose think times a class borrows
        self._levels: list[int] = []  # below the families, which have 0
        shape = (MAX_CLASSES, BUCKETS)
        self.used: Floats = np.zeros(shape)
        self.exposed: Floats = np.zeros(shape)
        self.started: Floats = np.zeros(shape)
        self._index: Floats = np.zeros(shape)
        self._least: Floats = np.zeros(shape)
        self._falls: Ints = np.zeros(shape, np.int64)
        self._counted: Floats | None = None  # what the index is to follow from, used or not
        self._new: list[tuple[int, int]] = []  # classes since, and their parents, whose rows will be theirs
        self.version = 0  # of the index
        self._ranks: dict[int, ClassRanks] = {}
        for key in FAMILIES:
            self._add(key)
        self.recompute()

    def __len__(self) -> int:
        return len(self.keys)

    def class_of(self, key: ClassKey) -> int:
        """The class's number; a new one starts with its parent's index. Past 512 it is the parent."""
        found = self._ids.get(key)
        if found is not None:
            return found
        parent = self.class_of(key[:-1])
        if len(self.keys) == MAX_CLASSES:
            return parent
        number = len(self.keys)
        self._add(key)
        self._new.append((number, parent))
        return number

    def _add(self, key: ClassKey) -> None:
        number = self._ids[key] = len(self.keys)
        is_family = key in FAMILIES
        parent = 0 if is_family else self._ids[key[:-1]]
        self.keys.append(key)
        self._parents.append(parent)
        if is_family:
            self._curves.append(number)
        else:
            self._curves.append(parent if key[1] >= NEAR_CURVES else self._curves[parent])
        self._levels.append(0 if is_family else len(key) - 1)

    def decay(self, factor: float) -> None:
        for table in (self.used, self.exposed, self.started):
            table[: len(self)] *= factor

    @property
    def index(self) -> Floats:
        """Shape [512, 64]. Work is done when it is asked for after `recompute`: about 1 ms at 160 classes."""
        if self._counted is not None:
            votes, self._counted = self._counted, None
            n = len(votes)
            self._index[:n], self._least[:n], self._falls[:n] = index_of(self._hazard(votes), _WIDTHS)
        if self._new:
            for number, parent in self._new:
                for table in (self._index, self._least, self._falls):
                    table[number] = table[parent]
            self._new.clear()
        return self._index

    def ranks(self, class_id: int) -> ClassRanks:
        """The class's row of `index`, until the next `recompute`."""
        found = self._ranks.get(class_id)
        if found is None:
            rows = self.index[class_id], self._least[class_id], self._falls[class_id]
            found = self._ranks[class_id] = ClassRanks(*(row.tolist() for row in rows))
        return found

    def _hazard(self, votes: Floats) -> Floats:
        n = len(votes)
        about = (self._parents[:n], self._curves[:n], self._levels[:n])
        return hazard_of(votes, *(np.array(column, np.int64) for column in about))

    def rows(self) -> tuple[Floats, Floats, Ints]:
        """`index`, up to each age the least of it, and the next age with a lesser one (64: there is none), of
        all classes: [512, 64] each. Theirs until `index` is asked for after the next `recompute`."""
        return self.index, self._least, self._falls

    def recompute(self) -> None:
        """Have `index` follow from what has been counted up to here. A copy of the votes."""
        self._ranks.clear()
        self._new.clear()
        n = len(self)
        self._counted = np.stack([self.used[:n], self.exposed[:n], self.started[:n]], 1)
        self.version += 1

    # -- warm start -------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write the tables to `path` (npz), whole or not at all, whoever else does. Raises OSError."""
        keys = np.full((len(self), 6), -1, np.int64)
        for row, key in enumerate(self.keys):
            keys[row, : len(key)] = key
        votes = {name: getattr(self, name)[: len(self)] for name in ("used", "exposed", "started")}
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f"{path.name}.{secrets.token_hex(8)}.new")  # ranks may share the directory
        try:
            with scratch.open("xb") as file:
                np.savez_compressed(file, version=np.int64(_VERSION), edges=EDGES, keys=keys, **votes)
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)

    def load(self, path: Path) -> None:
        """Start from what `save` wrote. ConfigError names what is wrong, with nothing changed."""
        try:
            with np.load(path, allow_pickle=False) as file:
                held = {name: file[name] for name in file.files}
        except _UNREADABLE as error:
            raise ConfigError(f"ghd tables {path}: cannot be read: {error}") from error
        keys = _checked(path, held)
        fresh = ClassTables()
        for row, key in enumerate(keys):
            number = fresh.class_of(key)
            for name in ("used", "exposed", "started"):
                getattr(fresh, name)[number] = held[name][row]
        self.__dict__.update(fresh.__dict__)
        self.recompute()


def _checked(path: Path, held: dict[str, Any]) -> list[ClassKey]:
    """The class keys of a file's arrays, all of which are checked."""

    def require(good: object, what: str) -> None:
        if not good:
            raise ConfigError(f"ghd tables {path}: {what}")

    names = ("version", "edges", "keys", "used", "exposed", "started")
    require(sorted(held) == sorted(names), f"has {sorted(held)}, expected {sorted(names)}")
    require(held["version"].shape == () and int(held["version"]) == _VERSION, f"is not version {_VERSION}")
    require(np.array_equal(held["edges"], EDGES), "has other age buckets")
    keys = held["keys"]
    require(keys.dtype == np.int64 and keys.ndim == 2, "keys are no table of whole numbers")
    require(keys.shape[1] == 6 and len(keys) <= MAX_CLASSES, f"has keys of shape {keys.shape}")
    for name in names[3:]:
        votes = held[name]
        good = votes.dtype == np.float64 and votes.shape == (len(keys), BUCKETS)
        require(good and ((votes >= 0) & (votes <= _MOST_VOTES)).all(), f"{name} are no votes")
    found = [tuple(x for x in row if x >= 0) for row in keys.tolist()]
    require(found[: len(FAMILIES)] == list(FAMILIES), "does not begin with the families")
    require(len(set(found)) == len(found), "names a class twice")
    for i, key in enumerate(found[len(FAMILIES) :], len(FAMILIES)):
        require(len(key) > 1 and key[:-1] in found[:i], f"class {key} has no parent before it")
    return found
