"""Sessions of agents: each one's requests in order, with what its prompts share, and many merged.

Two forms of one thing, an object for each session: that of the public collection kv-cache-tester, where a
request has all `hash_ids` of its prompt, and a shorter one, where it has `keep` (so many ids of the request
before it, in the same list) and `new` (those behind). Ids are local to the session unless `hash_id_scope`
says "global". A request of `type` "subagent" holds a list of its own, which starts at its `t`; the times in it
count from there, or, in later publications of the collection, from the session's start.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hiradix.apps.traces.records import Record, Records, count_of, ids_of, open_records, time_at, time_of
from hiradix.apps.traces.trace import Trace, TraceRequest
from hiradix.errors import ConfigError

BLOCK = 512  # tokens: those of a session are gathered to it
SAMPLE = Path(__file__).with_name("data") / "agents.jsonl.xz"  # installed with the package
LONGEST_S = 6 * 3600.0  # what a list of requests asks later than this, after a night, is left out of a fleet


class AgentRequest(NamedTuple):
    """One request. time_s: since its list began. ids: of the prompt's blocks. stop: why the answer ended.

    api_s: seconds the answer took when it was recorded, 0 where that is unknown.
    """

    time_s: float
    prompt_tokens: int
    output_tokens: int
    model: str
    ids: tuple[int, ...]
    stop: str
    api_s: float


class SubAgent(NamedTuple):
    """Requests with a prefix of their own. time_s: since its parent's list began, when its own begins."""

    time_s: float
    head_tokens: int
    requests: tuple[AgentRequest, ...]


class AgentSession(NamedTuple):
    """An agent's requests in order. head_tokens: of tools and system prompt, which others may share.

    is_local: equal ids of another session are not the same blocks.
    """

    name: str
    block_tokens: int
    head_tokens: int
    requests: tuple[AgentRequest | SubAgent, ...]
    is_local: bool = True

    @property
    def turns(self) -> tuple[AgentRequest, ...]:
        """The session's own requests that have a prompt, without those of its sub-agents."""
        return tuple(r for r in self.requests if isinstance(r, AgentRequest) and r.ids)


class SessionFile(NamedTuple):
    """All sessions of a file. source: sha256 of its unpacked text."""

    name: str
    source: str
    sessions: tuple[AgentSession, ...]


# -- reading --------------------------------------------------------------------------------


def is_sessions(record: Record) -> bool:
    """Whether this is a session, not a request."""
    return isinstance(record.get("requests"), list)


def read_sessions(file: Records) -> SessionFile:
    """ConfigError names the file, the line and the field that is wrong, and an id that two sessions have."""
    known: set[str] = set()
    return SessionFile(file.name, file.source, tuple(file.read(lambda record: _session(record, known))))


def read_folder(path: Path) -> SessionFile:
    """All sessions of a folder's .json and .jsonl files (they may be compressed), by name of file: as the
    collection comes. ConfigError names the file that has none.
    """
    known: set[str] = set()
    sessions, digest = list[AgentSession](), hashlib.sha256()
    for each in sorted(path.iterdir()):
        if each.is_file() and {".json", ".jsonl"} & set(each.suffixes):
            records = open_records(each)
            if not is_sessions(records.first):
                raise ConfigError(f"{each}: no session: an object with requests; in a folder all are")
            sessions += records.read(lambda record: _session(record, known))
            digest.update(records.source.encode())
    if not sessions:
        raise ConfigError(f"{path}: a folder without sessions, in files .json or .jsonl")
    return SessionFile(path.name, digest.hexdigest(), tuple(sessions))


def _session(record: Record, known: set[str]) -> AgentSession:
    """known: ids of the sessions before it; its own comes to them."""
    size = count_of(record, "block_size")
    if size < 1 or BLOCK % size:
        raise ValueError(f"block_size is {size}, no divisor of {BLOCK}")
    scope = record.get("hash_id_scope", "local")
    if scope not in ("local", "global"):
        raise ValueError(f"hash_id_scope is {scope!r}, neither local nor global")
    name, requests = str(record["id"]), _requests(record, "requests", may_nest=True)
    if name in known:
        raise ValueError(f"id is {name:.64}, as that of a session before")
    known.add(name)
    return AgentSession(name, size, _head(record), tuple(requests), scope == "local")


def _head(record: Record) -> int:
    return sum(
        count_of(record, name) for name in ("tool_tokens", "system_tokens") if record.get(name) is not None
    )


def _requests(record: Record, where: str, may_nest: bool) -> Iterator[AgentRequest | SubAgent]:
    listed = record["requests"]
    if not isinstance(listed, list):
        raise ValueError(f"{where} is no list")
    before: list[int] = []
    for number, request in enumerate(listed):
        place = f"{where}[{number}]"
        if not isinstance(request, dict):
            raise ValueError(f"{place} is no object")
        try:
            if request.get("type") == "subagent":
                if not may_nest:
                    raise ValueError("type is subagent inside a sub-agent")
                below = [r for r in _requests(request, "requests", False) if isinstance(r, AgentRequest)]
                start_s = _start(request)
                if below and below[0].time_s >= start_s:  # since the session's start
                    below = [r._replace(time_s=max(0.0, r.time_s - start_s)) for r in below]
                yield SubAgent(start_s, _head(request), tuple(below))
            else:
                before = _prompt(request, before)
                yield _request(request, before)
        except (KeyError, ValueError) as error:
            raise ValueError(f"{place}: {_said(error)}") from error


def _said(error: Exception) -> str:
    return f"no {error.args[0]}" if isinstance(error, KeyError) else str(error)


def _prompt(request: Record, before: list[int]) -> list[int]:
    """The ids of a request's prompt, in either form."""
    if "hash_ids" in request:
        return ids_of(request, "hash_ids")
    keep = count_of(request, "keep")
    if keep > len(before):
        raise ValueError(f"keep is {keep}, and the request before has {len(before)} ids")
    return before[:keep] + ids_of(request, "new")


def _request(request: Record, ids: list[int]) -> AgentRequest:
    stop = request.get("stop") or ""
    if not isinstance(stop, str):
        raise ValueError(f"stop is no text: {str(stop):.64}")
    return AgentRequest(
        _start(request), count_of(request, "in"), count_of(request, "out"), str(request["model"]),
        tuple(ids), stop, _seconds(request, "api_time"),
    )  # fmt: skip


def _start(request: Record) -> float:
    time_at(request, "t")
    return _seconds(request, "t")


def _seconds(request: Record, name: str) -> float:
    seconds = time_of(request, name)
    if seconds < 0:
        raise ValueError(f"{name} is {seconds:g}, below 0")
    return seconds


# -- a fleet --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fleet:
    """The rule by which sessions become one trace. sessions: how many of the file, drawn by `seed`; None: all
    of them.

    mean_gap_s: between the starts of two, exponential. shares_heads: sessions with equal model and equally
    many tokens of tools and system prompt begin with the same blocks.
    """

    sessions: int | None = None
    mean_gap_s: float = 60.0
    seed: int = 0
    shares_heads: bool = True

    def __post_init__(self) -> None:
        if self.sessions is not None and self.sessions < 1:
            raise ConfigError(f"--sessions must be >= 1, got {self.sessions}")
        if not 0 < self.mean_gap_s < float("inf"):
            raise ConfigError(f"--mean-gap must be > 0, got {self.mean_gap_s:g}")

    def starts(self, file: SessionFile) -> Iterator[tuple[float, AgentSession]]:
        """The file's sessions that take part, each with the second at which it starts, in that order.

        ConfigError where there are too few.
        """
        count = len(file.sessions) if self.sessions is None else self.sessions
        if count > len(file.sessions):
            raise ConfigError(f"--sessions {count}: {file.name} has {len(file.sessions)}")
        rng, drawn, start_s = random.Random(self.seed), list(file.sessions), 0.0
        rng.shuffle(drawn)
        for session in drawn[:count]:
            start_s += rng.expovariate(1 / self.mean_gap_s)
            yield start_s, session


EVERY_SESSION = Fleet()


class _FleetRequest(NamedTuple):
    """One request of a fleet. time_s: since its session began. head_tokens: of the list it is in, which
    goes by the name `session`."""

    time_s: float
    head_tokens: int
    request: AgentRequest
    session: str


def _asked(session: AgentSession) -> Iterator[_FleetRequest]:
    """All that a session sends, list by list."""
    for number, entry in enumerate(session.requests):
        if isinstance(entry, AgentRequest):
            yield _FleetRequest(entry.time_s, session.head_tokens, entry, session.name)
        else:
            name = f"{session.name}/{number}"
            for r in entry.requests:
                yield _FleetRequest(entry.time_s + r.time_s, entry.head_tokens, r, name)


class SessionBlocks:
    """Names the blocks of many sessions: equal names iff equal contents from the start."""

    def __init__(self, shares_heads: bool) -> None:
        self._shares_heads = shares_heads
        self._names: dict[tuple[Hashable, ...], int] = {}

    def of(self, session: AgentSession, head_tokens: int, request: AgentRequest) -> list[int]:
        """Names of a request's whole blocks."""
        per, at, found = BLOCK // session.block_tokens, -1, []
        shared = head_tokens // session.block_tokens if self._shares_heads and session.is_local else 0
        whose = (session.name, request.model) if session.is_local else (None, request.model)
        for k in range(0, len(request.ids) - per + 1, per):
            if k + per <= shared:
                key: tuple[Hashable, ...] = ("head", request.model, head_tokens, at, k)
            else:
                key = (*whose, at, request.ids[k : k + per])
            at = self._names.setdefault(key, len(self._names))
            found.append(at)
        return found


def merged(file: SessionFile, fleet: Fleet, limit: int | None = None) -> Trace:
    """A fleet of a file's sessions as one trace, open loop: each request at its time, whenever the one before
    was answered. Prompts are counted in whole blocks.
    """
    names, calls = SessionBlocks(fleet.shares_heads), list[TraceRequest]()
    for start_s, session in fleet.starts(file):
        calls += _calls(session, start_s, names)
    calls.sort(key=lambda call: call.time_s)
    if not calls:
        raise ConfigError(f"{file.name}: no requests")
    count = fleet.sessions or len(file.sessions)
    title = f"{file.name}, {count} sessions, one per {fleet.mean_gap_s:g} s, seed {fleet.seed}"
    shared = ", shared heads" if fleet.shares_heads else ""
    return Trace(title + shared, file.source, BLOCK, tuple(calls[:limit]))


def _calls(session: AgentSession, start_s: float, names: SessionBlocks) -> Sequence[TraceRequest]:
    calls = []
    for asked in _asked(session):
        request = asked.request
        if request.ids and request.time_s <= LONGEST_S:
            blocks = np.array(names.of(session, asked.head_tokens, request), np.int64)
            tokens = max(len(blocks) * BLOCK, 1)
            time_s, answer = start_s + asked.time_s, request.output_tokens
            calls.append(
                TraceRequest(time_s, tokens, answer, blocks, session=asked.session, stop=request.stop)
            )
    return calls
