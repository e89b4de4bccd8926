"""One server under test: greedy requests, what it tells of cached tokens, and how it is flushed.

Whatever it may lack is a field of `ServerTraits`, found by asking; an answer has None where it is not told.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from hiradix.apps.bench.client import BenchError, events
from hiradix.apps.certify.prompts import Prompt
from hiradix.errors import CacheError

API_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
FLUSH_PATHS = ("/flush_cache", "/reset_prefix_cache")
TIERS = ("device", "host", "storage")
NUM_TOP = 5
ADMIN_TIMEOUT_S = 60.0
_BUSY = (429, 503)
NUM_PATIENT = 5
"""How often a server that is too busy is asked again, by itself."""
RETRY_S, MOST_RETRY_S = 1.0, 30.0
_TOLD_LESS = (400, 403, 404, 405, 422, 500, 501)


class CertifyError(CacheError):
    """Raised when nothing can be said of the server; the message says why and what to do."""


class RequestFailed(CacheError):
    """One request was not answered. status: of HTTP, 0 without one; retry_s: seconds until another try."""

    def __init__(self, message: str, status: int = 0, retry_s: float = RETRY_S) -> None:
        super().__init__(message)
        self.status = status
        self.retry_s = retry_s

    @property
    def is_busy(self) -> bool:
        """The server has said that it has too much to do, which is its right."""
        return self.status in _BUSY


@dataclass(frozen=True)
class Token:
    """One generated token by its text, and what else was likely there."""

    name: str
    logprob: float
    top: Mapping[str, float]


@dataclass(frozen=True)
class Reply:
    """One reply. cached: prompt tokens that were not computed, None if the server does not say; tiers: the same
    by tier where that is told. Times in seconds from the moment it was sent; first_s is None unless streamed."""

    prompt: Prompt
    path: str
    body: Mapping[str, Any]
    text: str
    tokens: tuple[Token, ...]
    finish: str
    prompt_tokens: int | None
    cached: int | None
    tiers: Mapping[str, int] | None
    total_s: float
    first_s: float | None = None

    @property
    def wait_s(self) -> float:
        """Seconds until the first token; until the whole answer if only that is known."""
        return self.total_s if self.first_s is None else self.first_s


@dataclass(frozen=True)
class ServerTraits:
    """The abilities of a server. kind: as its model card says; salts: it reads `cache_salt`."""

    api: str = "completions"
    kind: str = ""
    context: int | None = None
    num_top: int = NUM_TOP
    stream_usage: bool = True
    salts: bool = False
    capacity: int | None = None


@dataclass
class _Reading:
    """An answer, from one record or from the records of a stream."""

    text: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    finish: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)
    extension: Mapping[str, Any] = field(default_factory=dict)

    def take(self, record: Mapping[str, Any]) -> bool:
        """Add a record; whether it had something of the answer."""
        if record.get("error"):
            raise RequestFailed(f"the stream broke off: {str(record['error'])[:300]}")
        self.usage = record.get("usage") or self.usage
        self.extension = record.get("sglext") or self.extension
        has_some = False
        for choice in record.get("choices") or ():
            said = choice.get("message") or choice.get("delta") or choice
            text = said.get("content") or said.get("text") or ""
            tokens = _tokens(choice.get("logprobs") or {})
            self.text.append(text)
            self.tokens += tokens
            self.finish = choice.get("finish_reason") or self.finish
            has_some |= bool(text or tokens)
        return has_some

    def cached(self) -> int | None:
        """Cached prompt tokens in any of the places where servers tell them."""
        details = self.usage.get("prompt_tokens_details") or {}
        tiers = self.tiers()
        told = [details.get("cached_tokens"), self.usage.get("prompt_cache_hit_tokens")]
        told.append(sum(tiers.values()) if tiers else None)
        known = [int(number) for number in told if number is not None]
        return max(known, default=None)

    def tiers(self) -> Mapping[str, int] | None:
        """Cached prompt tokens by tier."""
        details = self.usage.get("cached_tokens_details") or self.extension.get("cached_tokens_details")
        return {tier: int(details.get(tier) or 0) for tier in TIERS} if details else None


def _tokens(logprobs: Mapping[str, Any]) -> list[Token]:
    """Tokens of either of the two forms that logprobs have."""
    if (content := logprobs.get("content")) is not None:
        return [
            Token(_name(item), float(item["logprob"]), {_name(t): float(t["logprob"]) for t in _top(item)})
            for item in content
        ]
    names, values = logprobs.get("tokens") or (), logprobs.get("token_logprobs") or ()
    tops = logprobs.get("top_logprobs") or [None] * len(names)
    rows = zip(names, values, tops, strict=True)
    return [Token(str(n), float(v), {k: float(x) for k, x in (t or {}).items()}) for n, v, t in rows]


def _top(item: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return item.get("top_logprobs") or []


def _name(item: Mapping[str, Any]) -> str:
    """A token's text; where that is not whole characters, its bytes."""
    raw = item.get("bytes")
    text = str(item["token"])
    return f"bytes:{bytes(raw).hex()}" if raw and "\ufffd" in text else text


class ServerUnderTest:
    """Sends requests one by one or side by side, each with a deadline. Use as an async context manager."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        api: str | None = None,
        admin_key: str | None = None,
        timeout_s: float = 120.0,
        max_tokens: int = 12,
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model or ""
        self.max_tokens = max_tokens
        self.timeout_s = timeout_s
        self.clock = clock
        self.able = ServerTraits(api=api or "completions")
        self._api_is_given = api is not None
        self._keys = [key for key in (api_key, admin_key) if key]
        self._admin = {"Authorization": f"Bearer {admin_key}"} if admin_key else None
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            limits=httpx.Limits(max_connections=64),
            transport=transport,
            trust_env=False,
        )

    async def __aenter__(self) -> ServerUnderTest:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.aclose()

    # What there is.

    async def connect(self) -> None:
        """Learn the model's name, or check the one given. CertifyError where there is no such server."""
        try:
            reply = await self._get("/v1/models")
        except httpx.HTTPError as error:
            raise CertifyError(f"{self.url}: no connection: {_said(error)}") from error
        if reply.status_code in (401, 403):
            raise CertifyError(f"{self.url}: HTTP {reply.status_code}: give the key with --api-key")
        try:
            cards = reply.json()["data"] if reply.status_code == 200 else []
            known = {str(card["id"]): card for card in cards}
        except (ValueError, KeyError, TypeError) as error:
            raise CertifyError(
                f"{self.url}/v1/models: not the list of an OpenAI-compatible server"
            ) from error
        if not self.model and not known:
            raise CertifyError(f"{self.url}/v1/models: HTTP {reply.status_code}: name the model with --model")
        if self.model and known and self.model not in known:
            raise CertifyError(f"--model {self.model}: unknown, the server has {', '.join(sorted(known))}")
        self.model = self.model or next(iter(known))
        card = known.get(self.model, {})
        context = card.get("max_model_len")
        self.able = replace(
            self.able, kind=str(card.get("owned_by") or ""), context=int(context) if context else None
        )

    async def is_up(self) -> bool:
        """Whether the model can be asked now."""
        try:
            reply = await self._get("/v1/models")
            return reply.status_code == 200 and self.model in [c["id"] for c in reply.json()["data"]]
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return False

    async def probe(self, prompt: Prompt) -> Reply:
        """The first answer, with as much told as the server tells: it leaves its abilities in `able`.

        A server that refuses a form of the request is asked in a plainer one. CertifyError if none is taken.
        """
        plain = [replace(self.able, num_top=n) for n in (NUM_TOP, 1, 0)]
        forms = plain if self._api_is_given else plain + [replace(form, api="chat") for form in plain]
        refused: RequestFailed | None = None
        for form in forms:
            self.able = form
            try:
                reply = await self.ask_patiently(prompt)
            except RequestFailed as error:
                if error.status in (401, 403):
                    raise CertifyError(f"{self.url}: {error}: give the key with --api-key") from error
                if error.status not in _TOLD_LESS:
                    raise CertifyError(f"{self.url}: {error}") from error
                refused = error if refused is None or form.num_top == 0 else refused
                continue
            has_logprobs = any(token.top for token in reply.tokens)
            if not has_logprobs or not all(math.isfinite(token.logprob) for token in reply.tokens):
                self.able = replace(self.able, num_top=0)
            await self._probe_rest(prompt)
            return reply
        raise CertifyError(f"{self.url}: no form of request is answered: {refused}")

    async def _probe_rest(self, prompt: Prompt) -> None:
        """A salt of no kind that a salt can be is refused by who reads salts and taken by who does not."""
        status = await self._status_of(self._body(prompt) | {"cache_salt": {"not": "a salt"}})
        taken = await self._status_of(self._body(prompt, salt="certify-probe"))
        status_of_stream = await self._status_of(self._body(prompt, stream=True))
        self.able = replace(
            self.able,
            salts=status in (400, 422) and taken == 200,
            stream_usage=status_of_stream == 200,
            capacity=await self._capacity(),
        )

    async def _status_of(self, body: Mapping[str, Any]) -> int:
        """CertifyError where it is too busy to say: that is no word on what it reads."""
        for _ in range(NUM_PATIENT + 1):
            try:
                async with asyncio.timeout(self.timeout_s):
                    reply = await self._http.post(self._path, json=body)
            except (httpx.HTTPError, TimeoutError):
                return 0
            if reply.status_code not in _BUSY:
                return reply.status_code
            await asyncio.sleep(_retry_s(reply))
        raise CertifyError(f"{self.url}: HTTP {reply.status_code}: it is too busy to be judged")

    async def _capacity(self) -> int | None:
        """Tokens that the device holds, from what known servers say of themselves."""
        text = await self._text("/metrics")
        if found := re.search(
            r'^vllm:cache_config_info\{(?=.*block_size="(\d+)")(?=.*num_gpu_blocks="(\d+)")', text, re.M
        ):
            return int(found[1]) * int(found[2])
        for path in ("/server_info", "/get_server_info"):
            if found := re.search(r'"max_total_(?:num_)?tokens":\s*(\d+)', await self._text(path)):
                return int(found[1])
        return None

    async def _text(self, path: str) -> str:
        try:
            reply = await self._get(path)
        except httpx.HTTPError:
            return ""
        return reply.text if reply.status_code == 200 else ""

    async def _get(self, path: str) -> httpx.Response:
        return await self._http.get(f"{self.url}{path}", timeout=10.0)

    # Requests.

    @property
    def _path(self) -> str:
        return f"{self.url}{API_PATHS[self.able.api]}"

    def _body(
        self, prompt: Prompt, *, salt: str | None = None, stream: bool = False, max_tokens: int | None = None
    ) -> dict[str, Any]:
        """The request as it is sent."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": max_tokens or self.max_tokens,
            "temperature": 0,
        }
        if self.able.api == "chat":
            roles = ("user", "assistant")
            body["messages"] = [{"role": roles[i % 2], "content": t} for i, t in enumerate(prompt.turns)]
            if self.able.num_top:
                body |= {"logprobs": True, "top_logprobs": self.able.num_top}
        else:
            body["prompt"] = prompt.text
            if self.able.num_top:
                body["logprobs"] = self.able.num_top
        if self.able.kind == "sglang":
            body["return_cached_tokens_details"] = True
        if salt is not None:
            body["cache_salt"] = salt
        if stream:
            body["stream"] = True
            if self.able.stream_usage:
                body["stream_options"] = {"include_usage": True}
        return body

    async def ask(
        self, prompt: Prompt, *, salt: str | None = None, stream: bool = False, max_tokens: int | None = None
    ) -> Reply:
        """The greedy answer. RequestFailed if there is none within the deadline."""
        body = self._body(prompt, salt=salt, stream=stream, max_tokens=max_tokens)
        reading, began, first = _Reading(), self.clock(), None
        try:
            async with (
                asyncio.timeout(self.timeout_s),
                self._http.stream("POST", self._path, json=body) as reply,
            ):
                if reply.status_code != 200:
                    said = (await reply.aread()).decode("utf-8", "replace")
                    said = f"HTTP {reply.status_code}: {self._without_keys(said)[:300]}"
                    raise RequestFailed(said, reply.status_code, _retry_s(reply))
                if not stream:
                    reading.take(json.loads(await reply.aread()))
                else:
                    async for record in events(reply):
                        if reading.take(record) and first is None:
                            first = self.clock() - began
        except TimeoutError as error:
            raise RequestFailed(f"no answer within {self.timeout_s:g} s") from error
        except httpx.HTTPError as error:
            raise RequestFailed(_said(error)) from error
        except BenchError as error:
            raise RequestFailed(str(error)) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RequestFailed(f"not an answer of the OpenAI API: {error!r}") from error
        if not reading.finish:
            raise RequestFailed("the answer has no finish_reason: it broke off")
        number = reading.usage.get("prompt_tokens")
        return Reply(
            prompt, self._path, body, "".join(reading.text), tuple(reading.tokens), reading.finish,
            None if number is None else int(number), reading.cached(), reading.tiers(),
            self.clock() - began, first,
        )  # fmt: skip

    async def ask_patiently(self, prompt: Prompt, **how: Any) -> Reply:
        """Ask, and ask again a few times if the server says that it is too busy, when it says."""
        for _ in range(NUM_PATIENT):
            try:
                return await self.ask(prompt, **how)
            except RequestFailed as error:
                if not error.is_busy:
                    raise
                await asyncio.sleep(error.retry_s)
        return await self.ask(prompt, **how)

    def _without_keys(self, said: str) -> str:
        """A server's text without the key that was sent to it, which it may repeat."""
        for key in self._keys:
            said = said.replace(key, "***")
        return said

    async def leave_early(self, prompt: Prompt, after_s: float) -> None:
        """Ask for a stream and hang up at its first event, or after that time if none came."""
        body = self._body(prompt, stream=True, max_tokens=4 * self.max_tokens)
        try:
            async with asyncio.timeout(after_s), self._http.stream("POST", self._path, json=body) as reply:
                async for _ in reply.aiter_lines():
                    return
        except (TimeoutError, httpx.HTTPError):
            return

    # Beside requests.

    async def hits(self) -> dict[str, int] | None:
        """Cached tokens of all requests so far by tier, as a known server's metrics count them."""
        return cached_tokens(await self._text("/metrics"))

    async def flush(self, path: str | None) -> str:
        """Empty the cache; the path that did it, "" where none is known to. CertifyError if `path` fails."""
        said = ""
        for candidate in (path,) if path else FLUSH_PATHS:
            target = candidate if "://" in candidate else f"{self.url}{candidate}"
            for _ in range(5):  # an engine that is not idle yet says 400
                try:
                    reply = await self._http.post(target, headers=self._admin, timeout=ADMIN_TIMEOUT_S)
                except httpx.HTTPError as error:
                    said = _said(error)
                    break
                if reply.is_success:
                    return candidate
                said = f"HTTP {reply.status_code}: {self._without_keys(reply.text)[:200]}"
                if reply.status_code in (401, 403, 404, 405):
                    break
                await asyncio.sleep(0.5)
        if path:
            raise CertifyError(f"--flush {path}: {said}")
        return ""


def cached_tokens(metrics: str) -> dict[str, int] | None:
    """Tokens by tier from a text of metrics; None where no known server wrote it."""
    names = {
        "vllm:prefix_cache_hits_total": "device",
        "vllm:external_prefix_cache_hits_total": "host",
        "sglang:cached_tokens_total": "",
    }
    found: dict[str, int] = {}
    for name, labels, value in re.findall(r"^([\w:]+)(\{.*\})? ([0-9.e+]+)$", metrics, re.M):
        if name not in names:
            continue
        source = re.search(r'cache_source="(\w+)', labels)
        tier = names[name] or (source[1] if source else "device")
        if tier != "total":
            found[tier] = found.get(tier, 0) + int(float(value))
    return found if found or any(name in metrics for name in names) else None


def _retry_s(reply: httpx.Response) -> float:
    """Seconds until another try, as the answer says, where that is a number."""
    try:
        told = float(reply.headers.get("retry-after", RETRY_S))
    except ValueError:  # a date
        return RETRY_S
    return min(max(told, 0.0), MOST_RETRY_S) if math.isfinite(told) else RETRY_S


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__
