"""A multi-turn client for any OpenAI-compatible server: it streams, times the first token, keeps it all.

Conversations are played turn by turn with a bounded number in flight. Every request that was sent is kept, so
the very same prompts can be replayed against another server and compared (`hiradix.apps.bench.report`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from hiradix.errors import CacheError, Misuse

READ_TIMEOUT_S = 300.0
_T = TypeVar("_T")
_R = TypeVar("_R")


class BenchError(CacheError):
    """A server refused, broke off or answered nonsense; the message has the status and the body's start."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One prompt exactly as it is sent; `label` names the conversation and the turn."""

    label: str
    messages: tuple[Message, ...]
    max_tokens: int

    def body(self, model: str, top_logprobs: int) -> dict[str, Any]:
        """The JSON body: greedy, streamed, with usage and, where asked for, log probabilities."""
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": m.role, "content": m.content} for m in self.messages],
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if top_logprobs:
            body |= {"logprobs": True, "top_logprobs": top_logprobs}
        return body


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """One generated token: its bytes where the server gives them, else its text, and what else was likely."""

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources of one prompt's tokens. `unspecified` counts reuse whose tier the server does not tell."""

    device: int = 0
    host: int = 0
    storage: int = 0
    computed: int = 0
    unspecified: int = 0

    @property
    def reused(self) -> int:
        """Prompt tokens that were not computed."""
        return self.device + self.host + self.storage + self.unspecified


@dataclass(frozen=True, slots=True)
class Answer:
    """The reply to one request, with times in seconds from the moment it was sent."""

    request: ChatRequest
    text: str
    tokens: tuple[TokenChoice, ...]
    prompt_tokens: int
    sources: Sources
    ttft_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Conversation:
    """A system prompt, what was already said (both sides), and the user's next turns, one a visit."""

    name: str
    system: str
    user_turns: tuple[str, ...]
    history: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class Phase:
    """Conversations that each take one more turn, started in this order; `restart` comes before it."""

    title: str
    visits: tuple[str, ...]
    restart: bool = False

    def __post_init__(self) -> None:
        if len(set(self.visits)) != len(self.visits):
            raise Misuse(f"phase {self.title!r} visits a conversation twice")


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """The load on a server: requests in flight, tokens per answer, alternatives per token."""

    concurrency: int = 4
    max_tokens: int = 8
    top_logprobs: int = 5


@dataclass(slots=True)
class _Stream:
    """One streamed answer, as far as it has been read."""

    started: float
    text: list[str] = field(default_factory=list)
    tokens: list[TokenChoice] = field(default_factory=list)
    usage: Mapping[str, Any] | None = None
    first_s: float | None = None
    finished: bool = False

    def take(self, chunk: Mapping[str, Any]) -> None:
        """Add one chunk; the first that carries text or a token sets the time to first token."""
        if "error" in chunk:
            raise BenchError(f"the server broke off: {chunk['error']}")
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices", ()):
            text = (choice.get("delta") or {}).get("content") or ""
            tokens = [_token(item) for item in (choice.get("logprobs") or {}).get("content") or ()]
            if (text or tokens) and self.first_s is None:
                self.first_s = time.perf_counter() - self.started
            self.text.append(text)
            self.tokens += tokens
            self.finished |= choice.get("finish_reason") is not None

    def answer(self, request: ChatRequest) -> Answer:
        """The whole answer; BenchError when the stream ended early or without usage."""
        total_s = time.perf_counter() - self.started
        if not self.finished:
            raise BenchError(f"{request.label}: the stream ended before the answer did")
        if self.usage is None:
            raise BenchError(f"{request.label}: the server sent no usage; is stream_options supported?")
        return Answer(
            request=request,
            text="".join(self.text),
            tokens=tuple(self.tokens),
            prompt_tokens=int(self.usage["prompt_tokens"]),
            sources=sources_of(self.usage),
            ttft_s=total_s if self.first_s is None else self.first_s,
            total_s=total_s,
        )


def _name(item: Mapping[str, Any]) -> bytes:
    raw = item.get("bytes")
    return bytes(raw) if raw is not None else str(item["token"]).encode("utf-8", "surrogatepass")


def _token(item: Mapping[str, Any]) -> TokenChoice:
    top = tuple((_name(t), float(t["logprob"])) for t in item.get("top_logprobs") or ())
    return TokenChoice(_name(item), float(item["logprob"]), top)


def sources_of(usage: Mapping[str, Any]) -> Sources:
    """Prompt tokens by source from an OpenAI usage record with or without the per-tier breakdown."""
    prompt_tokens = int(usage["prompt_tokens"])
    cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    tiers = usage.get("cached_tokens_details") or {}
    device, host, storage = (int(tiers.get(tier) or 0) for tier in ("device", "host", "storage"))
    known = device + host + storage
    return Sources(device, host, storage, prompt_tokens - max(cached, known), max(0, cached - known))


async def events(response: httpx.Response) -> AsyncIterator[Mapping[str, Any]]:
    """The JSON records of a server-sent event stream up to [DONE].

    Lines end where the bytes have an end of line: texts may have other characters that httpx ends lines at.
    """
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[len(b"data:") :].strip()
            if data == b"[DONE]":
                return
            try:
                yield json.loads(data)
            except ValueError as error:
                raise BenchError(f"not JSON in the stream: {data[:200]!r}") from error


class ChatServer:
    """One server under test. Use as an async context manager; all requests share one connection pool."""

    def __init__(
        self, url: str, limits: LoadSettings, *, api_key: str | None = None, model: str | None = None
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(READ_TIMEOUT_S, connect=10.0)
        pool = httpx.Limits(max_connections=limits.concurrency + 2)
        self.url = url.rstrip("/")
        self.limits = limits
        self.model = model or ""
        self._client = httpx.AsyncClient(headers=headers, timeout=timeout, limits=pool, trust_env=False)

    async def __aenter__(self) -> ChatServer:
        if not self.model:
            self.model = await self._first_model()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._client.aclose()

    async def _first_model(self) -> str:
        try:
            response = await self._client.get(f"{self.url}/v1/models")
            response.raise_for_status()
            return str(response.json()["data"][0]["id"])
        except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
            raise BenchError(f"{self.url}/v1/models: {error!r}") from error

    async def ask(self, request: ChatRequest) -> Answer:
        """The streamed answer to one request; BenchError names the request when the server fails it."""
        stream = _Stream(time.perf_counter())
        body = request.body(self.model, self.limits.top_logprobs)
        try:
            async with self._client.stream("POST", f"{self.url}/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode("utf-8", "replace")
                    raise BenchError(f"{request.label}: HTTP {response.status_code}: {text[:500]}")
                async for chunk in events(response):
                    stream.take(chunk)
        except httpx.HTTPError as error:
            raise BenchError(f"{request.label}: {error!r}") from error
        return stream.answer(request)


class Play:
    """Conversations in progress: `turn` sends the next user turn and remembers what the model said."""

    def __init__(self, conversations: Sequence[Conversation], max_tokens: int) -> None:
        self._messages = {c.name: [Message("system", c.system), *c.history] for c in conversations}
        self._turns = {c.name: list(c.user_turns) for c in conversations}
        self._num_sent = dict.fromkeys(self._messages, 0)
        self._max_tokens = max_tokens

    def next_request(self, name: str) -> ChatRequest:
        """The prompt of `name`'s next turn, everything said so far included."""
        turn = self._num_sent[name]
        user = Message("user", self._turns[name][turn])
        self._num_sent[name] = turn + 1
        self._messages[name].append(user)
        return ChatRequest(f"{name}#{turn + 1}", tuple(self._messages[name]), self._max_tokens)

    def record(self, name: str, answer: Answer) -> None:
        """Make the model's answer part of the conversation."""
        self._messages[name].append(Message("assistant", answer.text))


async def in_order(items: Sequence[_T], concurrency: int, work: Callable[[_T], Awaitable[_R]]) -> list[_R]:
    """Results of `work` over items, started in order, at most `concurrency` running; a failure ends all."""
    results: dict[int, _R] = {}
    queue = iter(enumerate(items))

    async def worker() -> None:
        for index, item in queue:
            results[index] = await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(items))):
                group.create_task(worker())
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [results[i] for i in range(len(items))]


async def play_phase(
    server: ChatServer, play: Play, phase: Phase, on_answer: Callable[[Answer], None]
) -> list[Answer]:
    """One more turn of every conversation the phase visits, in its order."""

    async def visit(name: str) -> Answer:
        answer = await server.ask(play.next_request(name))
        play.record(name, answer)
        on_answer(answer)
        return answer

    return await in_order(phase.visits, server.limits.concurrency, visit)


async def replay(
    server: ChatServer, requests: Sequence[ChatRequest], on_answer: Callable[[Answer], None]
) -> list[Answer]:
    """Answers to recorded prompts, sent in the same order with the same number in flight."""

    async def ask(request: ChatRequest) -> Answer:
        answer = await server.ask(request)
        on_answer(answer)
        return answer

    return await in_order(requests, server.limits.concurrency, ask)
