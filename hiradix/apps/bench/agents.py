"""Recorded sessions of coding agents, played over HTTP against any OpenAI-compatible server.

Closed loop: an agent's next request comes when the answer before it is whole and it has thought as long as
recorded. Prompts are token ids made of the names of their blocks, so what is shared in the recording is
shared here; they are shorter than recorded by `scale`, and so are answers. Answers are greedy, of fixed
length, and no part of later prompts: every server is sent the very same ones.

python -m hiradix.apps.bench.agents URL --sessions FILE [--agents 20 --scale 64 --turns 40 --hurry 8]
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from hiradix.apps.bench.client import BenchError, Sources, sources_of
from hiradix.apps.traces.crowd import Agent, Crowd, Turn
from hiradix.apps.traces.records import open_records
from hiradix.apps.traces.sessions import BLOCK, read_sessions
from hiradix.errors import CacheError, ConfigError

READ_TIMEOUT_S = 1800.0
FIRST_TOKEN = 10  # ids below are often special


@dataclass(frozen=True, slots=True)
class Smaller:
    """The reduction of a recording: tokens are divided by `scale`, seconds by `hurry`.

    vocabulary: token ids are below that.
    """

    scale: int = 64
    hurry: float = 8.0
    vocabulary: int = 500

    def __post_init__(self) -> None:
        if self.scale < 1 or BLOCK % self.scale:
            raise ConfigError(f"--scale must divide {BLOCK}, got {self.scale}")
        if not 0 < self.hurry < float("inf"):
            raise ConfigError(f"--hurry must be > 0, got {self.hurry:g}")
        if self.vocabulary <= FIRST_TOKEN:
            raise ConfigError(f"--vocabulary must be above {FIRST_TOKEN}, got {self.vocabulary}")

    @property
    def block_tokens(self) -> int:
        """Tokens that stand for a recorded block."""
        return BLOCK // self.scale

    def prompt(self, turn: Turn) -> list[int]:
        """Token ids of a turn's prompt: equal names of blocks are equal tokens."""
        tokens: list[int] = []
        for name in turn.blocks.tolist():
            rng = random.Random(name)
            tokens += [rng.randrange(FIRST_TOKEN, self.vocabulary) for _ in range(self.block_tokens)]
        return tokens

    def answer_tokens(self, turn: Turn) -> int:
        """Length of a turn's answer."""
        return max(1, turn.output_tokens // self.scale)

    def working_set(self, agents: Sequence[Agent]) -> int:
        """Tokens of each agent's longest prompt, together."""
        return sum(max(len(turn.blocks) for turn in agent.turns) for agent in agents) * self.block_tokens

    def longest(self, agents: Sequence[Agent]) -> int:
        """Most tokens of a prompt and its answer."""
        return max(
            len(turn.blocks) * self.block_tokens + self.answer_tokens(turn)
            for agent in agents
            for turn in agent.turns
        )


@dataclass(frozen=True, slots=True)
class Turned:
    """One answer. ttft_s and total_s: seconds since it was sent. answer: a digest of its tokens."""

    agent: str
    turn: int
    prompt_tokens: int
    sources: Sources
    ttft_s: float
    total_s: float
    answer: str


@dataclass(frozen=True, slots=True)
class AgentRun:
    """All answers of a run, in the order of their agents and turns, and how long it took."""

    turns: tuple[Turned, ...]
    took_s: float

    def figures(self) -> dict[str, float]:
        """Hits in % of the prompts' tokens, by tier; seconds to the first token."""
        waits = sorted(turn.ttft_s for turn in self.turns)
        prompts = sum(turn.prompt_tokens for turn in self.turns)
        reused = {"hits": sum(turn.sources.reused for turn in self.turns)}
        for tier in ("device", "host", "storage"):
            reused[f"hits {tier}"] = sum(getattr(turn.sources, tier) for turn in self.turns)
        return {
            "requests": len(waits),
            **{name: 100 * count / prompts for name, count in reused.items()},
            "TTFT mean": sum(waits) / len(waits),
            "TTFT p50": _quantile(waits, 0.5),
            "TTFT p95": _quantile(waits, 0.95),
            "TTFT longest": waits[-1],
            "took": self.took_s,
        }

    def answers(self) -> dict[str, str]:
        """Digests by agent and turn."""
        return {f"{turn.agent}/{turn.turn}": turn.answer for turn in self.turns}


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(slots=True)
class _Completion:
    """A streamed completion, as far as it has been read."""

    sent_s: float
    first_s: float = 0.0
    digest: Any = field(default_factory=hashlib.sha256)
    usage: Mapping[str, Any] | None = None
    is_whole: bool = False

    def take(self, chunk: Mapping[str, Any]) -> None:
        if "error" in chunk:
            raise BenchError(f"the server broke off: {chunk['error']}")
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices", ()):
            said = choice.get("token_ids") or choice.get("text") or ""
            if said and not self.first_s:
                self.first_s = time.perf_counter()
            for one in said:
                self.digest.update(f"{one} ".encode())
            self.is_whole |= choice.get("finish_reason") is not None


class AgentPlayer:
    """Plays agents against the server at `url`, each with a connection of its own.

    tells: sessions have their names, in the header X-Session-Id, and say when they end; servers that know no
    such thing ignore the first and may refuse the second, `end_of_session`, so it is left out without this.
    """

    def __init__(
        self, url: str, smaller: Smaller, *, model: str = "", api_key: str | None = None, tells: bool = True,
        on_turn: Callable[[Turned], None] = lambda turned: None,
    ) -> None:  # fmt: skip
        self.url = url.rstrip("/")
        self.smaller = smaller
        self.model = model
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._tells = tells
        self._on_turn = on_turn

    async def play(self, agents: Sequence[Agent]) -> AgentRun:
        """All turns of all agents; BenchError, and all end, where one is not answered."""
        timeout = httpx.Timeout(READ_TIMEOUT_S, connect=10.0)
        pool = httpx.Limits(max_connections=len(agents) + 2)
        prompts = {a.name: [self.smaller.prompt(turn) for turn in a.turns] for a in agents}
        async with httpx.AsyncClient(
            headers=self._headers, timeout=timeout, limits=pool, trust_env=False
        ) as http:
            model = self.model or await self._first_model(http)
            began_s = time.perf_counter()
            try:
                async with asyncio.TaskGroup() as group:
                    playing = [
                        group.create_task(self._live(http, model, agent, prompts[agent.name]))
                        for agent in agents
                    ]
            except BaseExceptionGroup as failures:
                raise failures.exceptions[0] from None
            took_s = time.perf_counter() - began_s
        return AgentRun(tuple(turned for task in playing for turned in task.result()), took_s)

    async def warm_up(self, lengths: Sequence[int]) -> None:
        """One prompt of each length after the other, repeated by nothing, to measure the server."""
        turn = Turn(np.empty(0, np.int64), 1, 0.0, "end_turn")
        timeout = httpx.Timeout(READ_TIMEOUT_S, connect=10.0)
        async with httpx.AsyncClient(headers=self._headers, timeout=timeout, trust_env=False) as http:
            model = self.model or await self._first_model(http)
            for length in lengths:
                agent = Agent(f"warm-up {length}", 0.0, (turn,))
                rng = random.Random(f"warm-up {length}")
                prompt = [rng.randrange(FIRST_TOKEN, self.smaller.vocabulary) for _ in range(length)]
                await self._ask(http, model, agent, 0, prompt)

    async def _first_model(self, http: httpx.AsyncClient) -> str:
        try:
            response = await http.get(f"{self.url}/v1/models")
            response.raise_for_status()
            return str(response.json()["data"][0]["id"])
        except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
            raise BenchError(f"{self.url}/v1/models: {error!r}") from error

    async def _live(
        self, http: httpx.AsyncClient, model: str, agent: Agent, prompts: Sequence[list[int]]
    ) -> list[Turned]:
        """One agent from its start to its last answer."""
        await asyncio.sleep(agent.start_s / self.smaller.hurry)
        turned = []
        for number, (turn, prompt) in enumerate(zip(agent.turns, prompts, strict=True)):
            turned.append(await self._ask(http, model, agent, number, prompt))
            self._on_turn(turned[-1])
            await asyncio.sleep(turn.think_s / self.smaller.hurry)
        return turned

    async def _ask(
        self, http: httpx.AsyncClient, model: str, agent: Agent, number: int, prompt: list[int]
    ) -> Turned:
        label, is_last = f"{agent.name}/{number}", number + 1 == len(agent.turns)
        body: dict[str, Any] = {
            "model": model, "prompt": prompt, "max_tokens": self.smaller.answer_tokens(agent.turns[number]),
            "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        headers = {"X-Session-Id": agent.name} if self._tells else {}
        if self._tells and is_last:
            body["end_of_session"] = True
        answer = _Completion(time.perf_counter())
        try:
            async with http.stream(
                "POST", f"{self.url}/v1/completions", json=body, headers=headers
            ) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode("utf-8", "replace")
                    raise BenchError(f"{label}: HTTP {response.status_code}: {text[:500]}")
                async for line in response.aiter_lines():
                    data = line.removeprefix("data:").strip()
                    if line.startswith("data:") and data != "[DONE]":
                        answer.take(json.loads(data))
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            raise BenchError(f"{label}: {error!r}") from error
        if not answer.is_whole or answer.usage is None or not answer.first_s:
            raise BenchError(f"{label}: the stream ended before the answer, or brought no usage")
        return Turned(
            agent.name, number, int(answer.usage["prompt_tokens"]), sources_of(answer.usage),
            answer.first_s - answer.sent_s, time.perf_counter() - answer.sent_s, answer.digest.hexdigest(),
        )  # fmt: skip


def draw_agents(path: Path, crowd: Crowd) -> list[Agent]:
    """The crowd's agents of a file of sessions; ConfigError naming what is wrong with either."""
    return crowd.drawn(read_sessions(open_records(path)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hiradix.apps.bench.agents", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("url", metavar="URL", help="an OpenAI-compatible server")
    parser.add_argument("--sessions", type=Path, required=True, metavar="FILE", help="recorded sessions")
    parser.add_argument("--agents", type=int, default=20, help="how many are drawn (default: 20)")
    parser.add_argument("--turns", type=int, default=40, help="most requests of each (default: 40)")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (default: 1)")
    parser.add_argument(
        "--spread", type=float, default=600.0, help="recorded seconds of starts (default: 600)"
    )
    parser.add_argument("--scale", type=int, default=64, help="tokens are divided by it (default: 64)")
    parser.add_argument("--hurry", type=float, default=8.0, help="seconds are divided by it (default: 8)")
    parser.add_argument("--vocabulary", type=int, default=500, help="token ids are below it (default: 500)")
    parser.add_argument("--model", default="", help="model name to ask for (default: the server's first)")
    parser.add_argument("--api-key", help="bearer key")
    parser.add_argument("--silent", action="store_true", help="say nothing of sessions")
    parser.add_argument("--out", type=Path, help="figures and every turn as JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Play once and print the figures as JSON; the exit status."""
    args = _parser().parse_args(arguments)
    try:
        crowd = Crowd(args.agents, args.turns, args.spread, args.seed, shares_heads=False)
        agents = draw_agents(args.sessions, crowd)
        smaller = Smaller(args.scale, args.hurry, args.vocabulary)
        player = AgentPlayer(args.url, smaller, model=args.model, api_key=args.api_key, tells=not args.silent)
        played = asyncio.run(player.play(agents))
    except (CacheError, OSError) as error:
        print(f"agents: error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(played.figures(), indent=1))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        turns = [asdict(turned) for turned in played.turns]
        args.out.write_text(json.dumps({"figures": played.figures(), "turns": turns}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
