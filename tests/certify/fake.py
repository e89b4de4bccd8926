"""A server with a tiered prefix cache that is one object: exact, or with one fault planted.

Its model answers from what stands for K and V: a value per token that holds the token and all before it. So an
answer from pages of another prompt, another place or another state is another answer, as it is with a model.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import math
import random
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

URL = "http://fake"
WORDS = [*(f" w{i}" for i in range(36)), " w\u2028", " w\x85", " w\x0c", " \u00fc\U0001f600"]
"""Some with what Unicode, though not a stream of events, ends lines at."""
COMPUTE_S = 0.001  # a token, on the fake's own clock
Row = tuple[str, bytes]  # a token and what is computed of it
Page = tuple[Row, ...]


@dataclass(frozen=True)
class Traits:
    """What kind of server it is. noise: what is added to logits, at most; fault: what is planted."""

    page: int = 16
    device_pages: int = 400
    below: bool = True
    usage: bool = True
    tiers: bool = False
    metrics: str = ""
    logprobs: bool = True
    salts: bool = True
    flush: bool = True
    completions: bool = True
    size_known: bool = False
    noise: float = 0.0
    copies: bool = False
    context: int | None = None
    key: str = ""
    fault: str = ""


@dataclass
class Fake:
    """One server. `transport` is what a client talks to, `clock` the time that computing takes."""

    traits: Traits = Traits()
    seed: int = 0
    device: OrderedDict[Any, Page] = field(default_factory=OrderedDict)
    below: dict[Any, Page] = field(default_factory=dict)
    now: float = 0.0
    is_restarted: bool = False
    is_flushed: bool = False
    num_running: int = 0
    num_spoilt: int = 0
    counters: dict[str, int] = field(default_factory=lambda: {"device": 0, "host": 0})

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    def clock(self) -> float:
        """Seconds that computing has taken."""
        return self.now

    @property
    def transport(self) -> httpx.MockTransport:
        """The way in."""
        return httpx.MockTransport(self._handle)

    def restart(self) -> None:
        """What the device had is gone."""
        self.device.clear()
        self.is_restarted = True

    # HTTP.

    async def _handle(self, request: httpx.Request) -> httpx.Response:
        key = self.traits.key
        if key and request.headers.get("authorization") != f"Bearer {key}":
            return httpx.Response(401, json={"error": "Unauthorized"})
        match request.method, request.url.path:
            case "GET", "/v1/models":
                card = {"id": "fake", "max_model_len": self.traits.context, "owned_by": "fake"}
                return httpx.Response(200, json={"data": [card]})
            case "GET", "/metrics":
                return self._metrics()
            case "POST", "/flush_cache" if self.traits.flush:
                self.device.clear()
                self.is_flushed = True
                return httpx.Response(200)
            case "POST", "/v1/completions" if self.traits.completions:
                return await self._answer(json.loads(request.content), is_chat=False)
            case "POST", "/v1/chat/completions":
                return await self._answer(json.loads(request.content), is_chat=True)
        return httpx.Response(404)

    def _metrics(self) -> httpx.Response:
        lines = []
        if self.traits.metrics == "vllm":
            lines = [
                f'vllm:prefix_cache_hits_total{{engine="0"}} {float(self.counters["device"])}',
                f'vllm:external_prefix_cache_hits_total{{engine="0"}} {float(self.counters["host"])}',
            ]
        if self.traits.size_known:
            size = f'block_size="{self.traits.page}",num_gpu_blocks="{self.traits.device_pages}"'
            lines.append(f"vllm:cache_config_info{{{size}}} 1.0")
        return httpx.Response(200, text="\n".join(lines)) if lines else httpx.Response(404)

    async def _answer(self, body: dict[str, Any], is_chat: bool) -> httpx.Response:
        salt = body.get("cache_salt")
        if self.traits.salts and salt is not None and not isinstance(salt, str):
            return httpx.Response(400, json={"error": {"message": "cache_salt: must be text"}})
        if body.get("logprobs") and not self.traits.logprobs:
            return httpx.Response(400, json={"error": {"message": "logprobs: not supported"}})
        text = (
            "".join(f"<{m['role']}>{m['content']}" for m in body["messages"]) if is_chat else body["prompt"]
        )
        tokens = re.findall(r" ?[^ ]{1,5}| ", text)
        if self.traits.context and len(tokens) + body["max_tokens"] > self.traits.context:
            return httpx.Response(400, json={"error": {"message": "prompt: longer than the context"}})
        run = _Run(self, tokens, salt if self.traits.salts else None, body, is_chat)
        if body.get("stream"):
            return httpx.Response(200, stream=_Stream(run))
        self.num_running += 1
        try:
            await asyncio.sleep(0)
            run.prefill()
            await asyncio.sleep(0)
            run.decode()
        finally:
            self.num_running -= 1
        return httpx.Response(200, json=run.whole())

    # The cache.

    def _key(self, salt: str | None, tokens: Sequence[str], is_below: bool) -> Any:
        """Of the first tokens of a prompt under a salt."""
        leaks = self.traits.fault == "salt" or (self.traits.fault == "salt below" and is_below)
        return (None if leaks else salt, "".join(tokens))

    def matched(self, run: _Run) -> list[Row]:
        """Rows of the longest cached prefix, whole pages, leaving a token to compute; tiers are counted."""
        page, rows = self.traits.page, list[Row]()
        most = len(run.tokens) - 1
        while len(rows) + page <= most:
            found = self._page(run, len(rows) + page)
            if found is None:
                break
            rows += found
        if self.traits.fault == "page" and (more := self._parted_page(run, rows)):
            rows += more[: most - len(rows)]
        return self._spoilt(run, rows)

    def _page(self, run: _Run, end: int) -> Page | None:
        key = self._key(run.salt, run.tokens[:end], False)
        if key in self.device:
            self.device.move_to_end(key)
            run.sources["device"] += self.traits.page
            return self.device[key]
        below = self._key(run.salt, run.tokens[:end], True)
        if not self.traits.below or below not in self.below:
            return None
        run.sources["host"] += self.traits.page
        page = self.below[below]
        fault = self.traits.fault
        if (
            fault == "pressure"
            or (fault == "restart" and self.is_restarted)
            or (fault == "flush" and self.is_flushed)
        ):
            page = self._draw.choice(list(self.below.values()))
        self._put(key, page)
        return page

    def _parted_page(self, run: _Run, rows: list[Row]) -> Page | None:
        """A page that begins as the prompt goes on, though it does not end so."""
        at = len(rows)
        before = "".join(run.tokens[:at])
        for (salt, text), found in self.device.items():
            is_next = salt == run.salt and text == before + "".join(token for token, _ in found)
            if is_next and found[0][0] == run.tokens[at]:
                return found
        return None

    def _spoilt(self, run: _Run, rows: list[Row]) -> list[Row]:
        """What faults of a hit do to it."""
        tail = len(run.tokens) - len(rows)
        page = self.traits.page
        match self.traits.fault:
            case "device":
                is_spoilt = run.sources["device"] > 0 and run.sources["host"] == 0
            case "stream":
                is_spoilt = run.is_streamed
            case "tail":
                is_spoilt = tail > 24 * page
            case "overload":
                is_spoilt = self.num_running > 4
            case _:
                is_spoilt = False
        if not is_spoilt or len(rows) < 2 * page:
            return rows
        self.num_spoilt += 1
        return rows[page : 2 * page] + rows[page:]

    def insert(self, run: _Run, rows: Sequence[Row]) -> None:
        """Keep whole pages of what was computed."""
        page = self.traits.page
        if self.traits.fault == "turns" and len(rows) > len(run.tokens):
            rows = [*rows[: len(run.tokens) - 1], *rows[len(run.tokens) :], rows[-1]]
        tokens = [*run.tokens, *run.said]
        for end in range(page, len(rows) + 1, page):
            found = tuple(rows[end - page : end])
            self._put(self._key(run.salt, tokens[:end], False), found)
            if self.traits.below:
                self.below.setdefault(self._key(run.salt, tokens[:end], True), found)

    def _put(self, key: Any, page: Page) -> None:
        self.device.setdefault(key, page)
        self.device.move_to_end(key)
        while len(self.device) > self.traits.device_pages:
            self.device.popitem(last=False)


@functools.lru_cache(maxsize=4096)
def _exact_logits(seen: bytes) -> dict[str, float]:
    draw = random.Random(seen)
    return {name: -math.log(-math.log(draw.random())) * 2 for name in WORDS}


class _Run:
    """One request."""

    def __init__(self, fake: Fake, tokens: list[str], salt: str | None, body: dict[str, Any], is_chat: bool):
        self.fake, self.tokens, self.salt, self.body, self.is_chat = fake, tokens, salt, body, is_chat
        self.is_streamed = bool(body.get("stream"))
        self.sources = {"device": 0, "host": 0}
        self.rows: list[Row] = []
        self.said: list[str] = []
        self.chosen: list[tuple[str, float, dict[str, float]]] = []
        self.num_cached = 0

    def prefill(self) -> None:
        """Take what is cached, compute the rest."""
        self.rows = self.fake.matched(self)
        self.num_cached = len(self.rows)
        for tier, number in self.sources.items():
            self.fake.counters[tier] += number
        for token in self.tokens[self.num_cached :]:
            self._compute(token)
        self.fake.now += COMPUTE_S * (len(self.tokens) - self.num_cached)
        self.fake.insert(self, self.rows)

    def _compute(self, token: str) -> None:
        before = self.rows[-1][1] if self.rows else b""
        self.rows.append((token, hashlib.blake2b(before + token.encode(), digest_size=8).digest()))

    def decode(self) -> None:
        """Greedy tokens up to the limit."""
        for at in range(self.body["max_tokens"]):
            logits = self._logits(at)
            total = math.log(sum(map(math.exp, logits.values())))
            top = sorted(((v - total, name) for name, v in logits.items()), reverse=True)[:5]
            name = top[0][1]
            self.chosen.append((name, top[0][0], {n: v for v, n in top}))
            self._compute(name)
            self.said.append(name)
        self.fake.insert(self, self.rows)

    def _logits(self, at: int) -> dict[str, float]:
        traits, noise = self.fake.traits, self.fake._draw
        seen = hashlib.blake2b(b"".join(value for _, value in self.rows), digest_size=8).digest()
        logits = dict(_exact_logits(seen))
        if traits.copies and (fact := self._fact()) and at < len(fact):
            logits[fact[at]] = 60.0
        is_hit = self.num_cached > 0
        beyond = 0.0
        if is_hit and traits.fault == "noise beyond":
            beyond = 1.0
        if is_hit and traits.fault == "noise within":
            beyond = traits.noise
        most = traits.noise + beyond
        return {name: v + noise.uniform(-most, most) for name, v in logits.items()} if most else logits

    def _fact(self) -> list[str]:
        """The number that was asked for, digit by digit, where the rows have it."""
        text = "".join(token for token, _ in self.rows[: len(self.tokens)])
        asked = re.findall(r"The number of (the \w+ \w+) is$", text.removesuffix("<assistant>"))
        found = re.search(rf"The number of {asked[0]} is (\d+) ", text) if asked else None
        return list(found[1]) if found else []

    # How it is told.

    def usage(self) -> dict[str, Any]:
        usage: dict[str, Any] = {"prompt_tokens": len(self.tokens), "completion_tokens": len(self.said)}
        told = self.num_cached
        if self.fake.traits.fault == "claim":
            told = max(told, len(self.tokens) // 2)
        if self.fake.traits.usage:
            usage["prompt_tokens_details"] = {"cached_tokens": told}
        if self.fake.traits.tiers:
            usage["cached_tokens_details"] = {**self.sources, "storage": 0}
        return usage

    def _logprobs(self, chosen: Sequence[tuple[str, float, dict[str, float]]]) -> dict[str, Any] | None:
        if not self.body.get("logprobs"):
            return None
        if not self.is_chat:
            return {
                "tokens": [name for name, _, _ in chosen],
                "token_logprobs": [value for _, value, _ in chosen],
                "top_logprobs": [top for _, _, top in chosen],
            }
        content = [
            {"token": n, "logprob": v, "bytes": list(n.encode()),
             "top_logprobs": [{"token": t, "logprob": x, "bytes": list(t.encode())} for t, x in top.items()]}
            for n, v, top in chosen
        ]  # fmt: skip
        return {"content": content}

    def _choice(self, chosen: Sequence[Any], finish: str | None, name: str) -> dict[str, Any]:
        text = "".join(n for n, _, _ in chosen)
        said = {name: {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        return {"index": 0, **said, "logprobs": self._logprobs(chosen), "finish_reason": finish}

    def whole(self) -> dict[str, Any]:
        return {"choices": [self._choice(self.chosen, "length", "message")], "usage": self.usage()}

    def chunks(self) -> list[dict[str, Any]]:
        last = len(self.chosen) - 1
        out = [
            {"choices": [self._choice([one], "length" if i == last else None, "delta")]}
            for i, one in enumerate(self.chosen)
        ]
        if (self.body.get("stream_options") or {}).get("include_usage"):
            out.append({"choices": [], "usage": self.usage()})
        return out


class _Stream(httpx.AsyncByteStream):
    """The events of one answer; a client that leaves ends the work on it."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._is_done = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        run, fake = self._run, self._run.fake
        fake.num_running += 1
        try:
            await asyncio.sleep(0)
            run.prefill()
            yield b": begun\n\n"
            await asyncio.sleep(0)
            run.decode()
            self._is_done = True
            for chunk in run.chunks():
                yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode()
            yield b"data: [DONE]\n\n"
        finally:
            fake.num_running -= 1

    async def aclose(self) -> None:
        run, fake = self._run, self._run.fake
        if not self._is_done and fake.traits.fault == "abort" and run.rows:
            page = fake.traits.page
            for end in range(2 * page, len(run.tokens), page):  # what the engine had not computed yet
                key = fake._key(run.salt, run.tokens[:end], False)
                if key in fake.device:
                    fake.device[key] = tuple((token, b"\0" * 8) for token, _ in fake.device[key])
