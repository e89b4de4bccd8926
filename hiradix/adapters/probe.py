"""Probe of an engine: everything an adapter uses of it is looked up in its sources before anything is built.

An adapter has one table of `Requirement`s. `missing` compares it with a release's sources, which are parsed
and not imported: those of the installed package, or of a wheel that is only read. What it returns are the
pieces that are missing or other, in words; none: the release can be served.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Protocol

Reads = Callable[[str], "str | None"]  # the source of a module by its dotted name; None: there is none

_RECORDS = ("dataclass", "NamedTuple", "Struct")  # classes whose fields are what their making takes


def sources_in(folder: Path) -> Reads:
    """The modules of the packages in a folder."""

    def read(module: str) -> str | None:
        path = folder.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file.read_text(encoding="utf-8-sig")
        return None

    return read


def installed_sources(package: str) -> Reads:
    """The modules of an installed package, which is not imported. Nothing where it is not installed."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module that is none of a file
        spec = None
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    readers = [sources_in(Path(place).parent) for place in places]
    return lambda module: next((text for read in readers if (text := read(module)) is not None), None)


def is_without_sources(package: str) -> bool:
    """Whether an installed package has no source to be looked into: compiled alone, or in an archive."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:
        return False
    return spec is not None and spec.loader is not None and installed_sources(package)(package) is None


@dataclass(frozen=True)
class Signature:
    """The parameters of a call. leading: by position; needed: those without a default."""

    leading: tuple[str, ...]
    names: frozenset[str]  # by keyword
    needed: frozenset[str]
    takes_any: bool = False  # **keywords
    takes_more: bool = False  # *positions

    def refuses(self, num_positions: int, keywords: Iterable[str]) -> str | None:
        """The reason why such a call would fail, as a phrase; None if it would not."""
        given = {*self.leading[:num_positions], *keywords}
        if num_positions > len(self.leading) and not self.takes_more:
            return f"takes {len(self.leading)} parameters by position, not {num_positions}"
        if not self.takes_any and (unknown := sorted(set(keywords) - self.names)):
            return f"takes no {_list(unknown)}"
        if lacking := sorted(self.needed - given):
            return f"needs {_list(lacking)}"
        return None


class ReleaseSources:
    """A release's sources, each parsed once."""

    def __init__(self, read: Reads) -> None:
        self._read = read
        self.tree = cache(self._tree)
        self.top = cache(self._top)
        self.members = cache(self._members)

    def _tree(self, module: str) -> ast.Module | None:
        text = self._read(module)
        return None if text is None else ast.parse(text)

    def _top(self, module: str) -> dict[str, ast.AST]:
        """The definitions and imports at a module's top level, by name."""
        tree = self.tree(module)
        body = [] if tree is None else tree.body
        found: dict[str, ast.AST] = {name: node for node in _flat(body) for name in _bound(node)}
        tries = (node for node in _flat(body) if isinstance(node, ast.Try))
        for node in (one for each in tries for handler in each.handlers for one in _flat(handler.body)):
            for name in _bound(node):  # what stands in where an import fails
                found.setdefault(name, node)
        return found

    def find(self, where: str) -> tuple[str, ast.AST] | None:
        """Module and definition of `module:name` or `module:Class.name`, through imports and bases."""
        module, _, path = where.partition(":")
        name, _, member = path.partition(".")
        found = self._defined(module, name)
        if found is None or not member:
            return found
        for place, node in self.members(*found).get(member, ()):
            return place, node
        return None

    def _defined(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        node = self.top(module).get(name)
        if isinstance(node, ast.ImportFrom):
            source = _absolute(module, node)
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return self._defined(source, alias.name) or (source, node)
        return None if node is None else (module, node)

    def _members(self, module: str, node: ast.AST) -> dict[str, list[tuple[str, ast.AST]]]:
        """The members of a class's objects, its bases' included: the nearest definition first, then attributes
        that are set on `self`."""
        found: dict[str, list[tuple[str, ast.AST]]] = {}
        for place, one in self._line(module, node):
            for statement in _flat(one.body):
                for name in _bound(statement):
                    found.setdefault(name, []).append((place, statement))
            for inner in ast.walk(one):
                if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and _is_self(inner):
                    found.setdefault(inner.attr, []).append((place, inner))
        return found

    def _line(self, module: str, node: ast.AST) -> Iterator[tuple[str, ast.ClassDef]]:
        """A class and its bases, as far as they are found."""
        if not isinstance(node, ast.ClassDef):
            return
        yield module, node
        for base in node.bases:
            if isinstance(base, ast.Name) and (found := self._defined(module, base.id)) is not None:
                if found[1] is not node:
                    yield from self._line(*found)

    def abstract(self, module: str, node: ast.AST) -> set[str]:
        """The methods that a class asks those that derive from it for."""
        found = ((name, all_[0][1]) for name, all_ in self.members(module, node).items())
        return {name for name, one in found if _is_abstract(one)}

    def signature(self, where: str) -> Signature | None:
        """The signature of a function, of a method without `self`, or of a class's constructor; None if there
        is none."""
        found = self.find(where)
        if found is None:
            return None
        node = found[1]
        if isinstance(node, ast.ClassDef):
            made = self.members(*found).get("__init__", [(found[0], None)])[0][1]
            return _of_function(made, True) if isinstance(made, _FUNCTIONS) else self._of_fields(*found)
        is_method = "." in where.partition(":")[2]
        return _of_function(node, is_method) if isinstance(node, _FUNCTIONS) else None

    def _of_fields(self, module: str, node: ast.AST) -> Signature:
        leading: dict[str, bool] = {}
        for place, one in reversed(list(self._line(module, node))):
            del place
            for statement in one.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    if "ClassVar" not in ast.dump(statement.annotation):
                        leading[statement.target.id] = statement.value is None
        needed = frozenset(name for name, is_needed in leading.items() if is_needed)
        return Signature(tuple(leading), frozenset(leading), needed)


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Requirement(Protocol):
    """One thing that an adapter uses of its engine."""

    def missing(self, engine: ReleaseSources) -> Iterator[str]: ...

    @property
    def modules(self) -> tuple[str, ...]:
        """Whose sources are looked into first; imports lead to others."""
        ...


@dataclass(frozen=True)
class Names:
    """A module, and names at its top level."""

    module: str
    names: tuple[str, ...] = ()

    @property
    def modules(self) -> tuple[str, ...]:
        return (self.module,)

    def missing(self, engine: ReleaseSources) -> Iterator[str]:
        if engine.tree(self.module) is None:
            yield f"there is no {self.module}"
            return
        there = engine.top(self.module)
        yield from (f"{self.module} has no {name}" for name in self.names if name not in there)


@dataclass(frozen=True)
class Has:
    """The members that objects of a class must have: attributes, fields, methods. where: `module:Class`."""

    where: str
    names: tuple[str, ...]

    @property
    def modules(self) -> tuple[str, ...]:
        return (self.where.partition(":")[0],)

    def missing(self, engine: ReleaseSources) -> Iterator[str]:
        found = engine.find(self.where)
        if found is None:
            yield f"there is no {_short(self.where)}"
            return
        there = engine.members(*found)
        lacking = [name for name in self.names if name not in there]
        if lacking:
            yield f"{_short(self.where)} has no {_list(lacking)}"


@dataclass(frozen=True)
class AnyField:
    """Fields that are declared in any class of these modules, as options are that lie in several files."""

    modules: tuple[str, ...]
    names: tuple[str, ...]

    def missing(self, engine: ReleaseSources) -> Iterator[str]:
        trees = (engine.tree(module) for module in self.modules)
        nodes = (node for tree in trees if tree is not None for node in ast.walk(tree))
        there = {_name(node.target) for node in nodes if isinstance(node, ast.AnnAssign)}
        lacking = [name for name in self.names if name not in there]
        if lacking:
            yield f"there is no option {_list(lacking)}"


@dataclass(frozen=True)
class Call:
    """A call of a function or a method, or the making of an object.

    leading: the parameters that are given by position, by their names; None: so many of whatever name.
    """

    where: str
    leading: tuple[str, ...] | int = ()
    keywords: tuple[str, ...] = ()

    @property
    def modules(self) -> tuple[str, ...]:
        return (self.where.partition(":")[0],)

    def missing(self, engine: ReleaseSources) -> Iterator[str]:
        signature = engine.signature(self.where)
        if signature is None:
            yield f"there is no {_short(self.where)}"
            return
        count = self.leading if isinstance(self.leading, int) else len(self.leading)
        if why := signature.refuses(count, self.keywords):
            yield f"{_short(self.where)} {why}"
        elif not isinstance(self.leading, int) and signature.leading[:count] != self.leading:
            yield f"{_short(self.where)} takes {_list(signature.leading[:count])} first"


@dataclass(frozen=True)
class Contract:
    """A class of the engine that one of ours derives from, and what the engine may call of it.

    base: theirs. ours: our class, as `module:Class`, looked for in hiradix's own sources. calls: variables
    and attributes that the engine has such an object in, looked for in `callers`. unasked: what it asks there
    of its own classes only, or where an option is on that is refused here.
    """

    base: str
    ours: str
    calls: tuple[str, ...] = ()
    callers: tuple[str, ...] = ()
    unasked: frozenset[str] = frozenset()

    @property
    def modules(self) -> tuple[str, ...]:
        return (self.base.partition(":")[0], *self.callers)

    def missing(self, engine: ReleaseSources) -> Iterator[str]:
        theirs = engine.find(self.base)
        if theirs is None:
            yield f"there is no {_short(self.base)}"
            return
        own = ReleaseSources(installed_sources("hiradix"))
        mine = own.find(self.ours)
        if mine is None:
            raise LookupError(self.ours)
        ours, base = own.members(*mine), engine.members(*theirs)
        for name, found in base.items():
            yield from self._overridden(engine, own, name, found[0][1], name in ours)
        asked: dict[str, str] = {}
        for call in self._asked(engine):
            if call.name not in asked and (why := self._refused(engine, own, call, ours, base)):
                asked[call.name] = why
        yield from (asked[name] for name in sorted(asked))

    def _overridden(
        self, engine: ReleaseSources, own: ReleaseSources, name: str, node: ast.AST, is_ours: bool
    ) -> Iterator[str]:
        if not isinstance(node, _FUNCTIONS):
            return
        if not is_ours:
            if _is_abstract(node):
                yield f"{_short(self.base)} asks for {name}"
            return
        if name.startswith("__") or _is_property(node):
            return
        theirs, ours = _of_function(node, True), own.signature(f"{self.ours}.{name}")
        if ours is None or (ours.takes_more and ours.takes_any):  # a plain attribute here, or handed on whole
            return
        explicit = {*ours.leading, *ours.names}
        if more := sorted({*theirs.leading, *theirs.names} - explicit):
            if not (ours.takes_any and set(more) <= theirs.names - set(theirs.leading) - theirs.needed):
                yield f"{name} is given {_list(more)} too"
        if lacking := sorted(ours.needed - {*theirs.leading, *theirs.names}):
            yield f"{name} is not given {_list(lacking)}"

    def _asked(self, engine: ReleaseSources) -> Iterator[_Asked]:
        for module in self.callers:
            tree = engine.tree(module)
            for node in () if tree is None else ast.walk(tree):
                called = node.func if isinstance(node, ast.Call) else node
                if not isinstance(called, ast.Attribute) or _name(called.value) not in self.calls:
                    continue
                if isinstance(node, ast.Call):
                    yield _Asked.of(called.attr, node)
                elif isinstance(called.ctx, ast.Load):
                    yield _Asked(called.attr)

    def _refused(
        self,
        engine: ReleaseSources,
        own: ReleaseSources,
        call: _Asked,
        ours: Mapping[str, object],
        base: Mapping[str, object],
    ) -> str | None:
        if call.name in self.unasked:
            return None
        if call.name not in ours:
            return None if call.name in base else f"it asks a cache for {call.name}"
        signature = own.signature(f"{self.ours}.{call.name}")
        if signature is None or call.is_open or not call.is_call:
            return None
        why = replace(signature, takes_any=False).refuses(call.num_positions, call.keywords)
        return None if why is None else f"{call.name}, as it calls it, {why}"


@dataclass(frozen=True)
class _Asked:
    """A use that an engine's source makes of an object: it reads an attribute, or calls a method so."""

    name: str
    is_call: bool = False
    num_positions: int = 0
    keywords: tuple[str, ...] = ()
    is_open: bool = False  # with * or **: not told here

    @staticmethod
    def of(name: str, call: ast.Call) -> _Asked:
        is_open = any(isinstance(one, ast.Starred) for one in call.args)
        keywords = [one.arg for one in call.keywords]
        given = tuple(one for one in keywords if one is not None)
        return _Asked(name, True, len(call.args), given, is_open or None in keywords)


def missing(uses: Sequence[Requirement], read: Reads) -> tuple[str, ...]:
    """The pieces of a table that a release lacks or has otherwise; none: it can be served."""
    engine = ReleaseSources(read)
    return tuple(dict.fromkeys(piece for use in uses for piece in use.missing(engine)))


# -- syntax ------------------------------------------------------------------------------------


def _flat(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a body, those under `if`, `try` and `with` too, without overloads."""
    for statement in body:
        if isinstance(statement, _FUNCTIONS) and "overload" in map(_name, statement.decorator_list):
            continue
        yield statement
        for name in ("body", "orelse", "finalbody"):
            if isinstance(statement, ast.If | ast.Try | ast.With):
                yield from _flat(getattr(statement, name, ()))


def _bound(node: ast.stmt) -> list[str]:
    """The names that a statement binds."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    if isinstance(node, ast.ImportFrom | ast.Import):
        return [alias.asname or alias.name for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [
        one.id for target in targets for one in ast.walk(target or ast.Pass()) if isinstance(one, ast.Name)
    ]


def _of_function(node: ast.AST, is_method: bool) -> Signature:
    assert isinstance(node, _FUNCTIONS)
    given = node.args
    leading = [one.arg for one in (*given.posonlyargs, *given.args)]
    num_defaults = len(given.defaults)
    needed = set(leading[: len(leading) - num_defaults])
    by_name = [one.arg for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    needed |= {one.arg for one, d in zip(given.kwonlyargs, given.kw_defaults, strict=True) if d is None}
    is_static = any(_name(mark) == "staticmethod" for mark in node.decorator_list)
    if is_method and not is_static and leading:
        needed.discard(leading[0])
        del leading[0]
    names = frozenset((*leading, *by_name))
    return Signature(
        tuple(leading), names, frozenset(needed), given.kwarg is not None, given.vararg is not None
    )


def _absolute(module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parent = module.split(".")[: -node.level]
    return ".".join((*parent, *filter(None, [node.module])))


def _name(node: ast.AST) -> str:
    """The last name of `a`, `x.a`."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _is_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(_name(mark) in ("property", "cached_property") for mark in node.decorator_list)


def _is_abstract(node: ast.AST) -> bool:
    return isinstance(node, _FUNCTIONS) and any(
        _name(mark) in ("abstractmethod", "abstractproperty") for mark in node.decorator_list
    )


def _short(where: str) -> str:
    return where.partition(":")[2]


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else names[0]
