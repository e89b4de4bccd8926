"""Agents that wait for their answers: turns of recorded sessions, with the time each thinks in between."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hiradix.apps.traces.sessions import BLOCK, AgentRequest, AgentSession, SessionBlocks, SessionFile
from hiradix.apps.traces.trace import Blocks
from hiradix.errors import ConfigError

LEAST_TURNS = 10  # of its own: a shorter session is left out
LONGEST_THINK_S = 300.0
_STARTS_SEED = 1


class Turn(NamedTuple):
    """One request. think_s: between its answer's end and the next request. stop: why the answer ended."""

    blocks: Blocks
    output_tokens: int
    think_s: float
    stop: str


class Agent(NamedTuple):
    """start_s: when its first request comes. Each further one follows the answer to the one before."""

    name: str
    start_s: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Crowd:
    """The agents of a closed loop: `agents` sessions drawn by `seed`, of each up to `turns` requests in a
    row.

    They start within the first `spread_s`, evenly. Sub-agents are left out. shares_heads: see `Fleet`.
    """

    agents: int
    turns: int = 40
    spread_s: float = 600.0
    seed: int = 0
    shares_heads: bool = True

    def __post_init__(self) -> None:
        for flag, value in (("--sessions", self.agents), ("--turns", self.turns)):
            if value < 1:
                raise ConfigError(f"{flag} must be >= 1, got {value}")
        if not 0 <= self.spread_s < float("inf"):
            raise ConfigError(f"--spread must be >= 0, got {self.spread_s:g}")

    def drawn(self, file: SessionFile) -> list[Agent]:
        """The agents. ConfigError where the file has too few long sessions."""
        rng, starts = random.Random(self.seed), random.Random(_STARTS_SEED)
        names, order = SessionBlocks(self.shares_heads), list(file.sessions)
        rng.shuffle(order)
        found: list[Agent] = []
        for session in order:
            if len(found) == self.agents:
                break
            own = session.turns
            if len(own) >= LEAST_TURNS:
                first = rng.randrange(0, max(1, len(own) - self.turns))
                turns = tuple(_turns(session, own[first : first + self.turns], names))
                found.append(Agent(session.name, starts.random() * self.spread_s, turns))
        if len(found) < self.agents:
            raise ConfigError(
                f"--sessions {self.agents}: {file.name} has {len(found)} of {LEAST_TURNS} turns"
            )
        return found


def _turns(session: AgentSession, requests: tuple[AgentRequest, ...], names: SessionBlocks) -> Iterator[Turn]:
    for request, following in zip(requests, (*requests[1:], None)):
        think_s = 0.0
        if following is not None:
            think_s = min(LONGEST_THINK_S, max(0.0, following.time_s - request.time_s - request.api_s))
        blocks = np.array(names.of(session, session.head_tokens, request), np.int64)
        yield Turn(blocks, request.output_tokens, think_s, request.stop)


def fitting(file: SessionFile, tokens: int) -> SessionFile:
    """The sessions that an agent can be drawn from: long ones, whose every prompt and answer is within
    `tokens`.
    """
    taken = [
        session
        for session in file.sessions
        if len(session.turns) >= LEAST_TURNS
        and all(_held_tokens(session, request) <= tokens for request in session.turns)
    ]
    return file._replace(sessions=tuple(taken))


def _held_tokens(session: AgentSession, request: AgentRequest) -> int:
    """The tokens a request holds, in whole blocks, as the closed loop holds them."""
    prompt = len(request.ids) * session.block_tokens // BLOCK
    return (prompt + request.output_tokens // BLOCK + 1) * BLOCK


def repeated(file: SessionFile, agents: int) -> SessionFile:
    """At least as many sessions as `agents`: the same ones over and over, each time with contents of their
    own but for their heads. As it is where ids are those of all sessions, or where there is none.
    """
    count = len(file.sessions)
    if not count or not all(session.is_local for session in file.sessions):
        return file
    rounds = -(-agents // count)
    copies = [s._replace(name=f"{s.name}#{k}") if k else s for k in range(rounds) for s in file.sessions]
    return file._replace(sessions=tuple(copies))


def working_set_tokens(agents: list[Agent]) -> int:
    """The tokens of the longest prompt of each agent, added up."""
    return sum(max(len(turn.blocks) for turn in agent.turns) * BLOCK for agent in agents)
