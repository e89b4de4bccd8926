"""An engine with scripted answers behind the `Service` protocol, and the application over it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from fastapi import FastAPI

from hiradix.apps.engine.api import (
    FINISH_ABORT,
    ChatPrompt,
    EngineInfo,
    Output,
    RequestError,
    Scope,
    TokenLogprob,
    Usage,
)
from hiradix.apps.server.app import AppSettings, create_app
from hiradix.apps.server.auth import Keys
from hiradix.apps.server.service import (
    AdminResult,
    AttachRequest,
    CacheReport,
    Generation,
    Snapshot,
    TransferReport,
)
from hiradix.config import HiCacheConfig
from hiradix.intents.http import IntentReply
from hiradix.storage.attach.rules import AttachRules

MODEL = "tiny"
INFO = EngineInfo(
    model_name=MODEL,
    model_path="/models/tiny",
    dtype="float32",
    device="cpu",
    page_size=64,
    context_length=100,
    vocab_size=256,
    kv_bytes_per_token=8,
    max_total_tokens=1000,
    available_tokens=600,
    evictable_tokens=300,
    protected_tokens=50,
    num_running=2,
    num_waiting=3,
    num_retractions=4,
    num_steps=5,
    storage_attached=False,
)
TRANSFERS = {"load": TransferReport(2, 1, 512, 0.5), "write": TransferReport(num_bytes=1024)}


class CharTokenizer:
    """One token a character."""

    chat_template = ""

    def encode(
        self, text: str, context_length: int | None = None, *, add_special_tokens: bool = True
    ) -> list[int]:
        return [ord(c) for c in text]

    def decode_all(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def apply_chat(self, conversation: ChatPrompt, context_length: int | None = None) -> list[int]:
        messages = conversation.messages
        if messages[0]["role"] == "assistant":
            raise RequestError("messages: the chat template refused them: starts with assistant")
        tools = "".join(f"[{tool['function']['name']}]" for tool in conversation.tools)
        return self.encode(tools + "".join(f"<{m['role']}>{m['content']}" for m in messages))

    def token_text(self, token_id: int) -> str:
        return "\ufffd" if token_id >= 0x80 else chr(token_id)


def piece(text: str, finish: str | None = None, *, num_done: int = 1) -> Output:
    """An output of `text`, one token a character, each with itself and 'z' as alternatives."""
    logprobs = tuple(TokenLogprob(ord(c), -0.5, ((ord(c), -0.5), (ord("z"), -2.0))) for c in text)
    usage = Usage(50, num_done, cached_device=10, cached_host=20, cached_storage=5)
    return Output("", tuple(map(ord, text)), usage, text, logprobs, finish)


ANSWER = (piece("Hel"), piece("lo"), piece("!", "stop", num_done=6))


class ScriptedService:
    """Answers every request with `script`; with `hold` set, waits after the first piece until aborted."""

    def __init__(self, script: Sequence[Output | Exception] = ANSWER, *, hold: bool = False):
        self.tokenizer: CharTokenizer | None = CharTokenizer()
        self.context_length = 100
        self.healthy = True
        self.script = tuple(script)
        self.hold = hold
        self.requests: list[Generation] = []
        self.grammars: list[str] = []
        self.aborted: list[str] = []
        self.calls: list[object] = []
        self.outcome = AdminResult(True, "done.")
        self.state = Snapshot(INFO, CacheReport(host_used=7, unfulfilled={"deadline": 3}), TRANSFERS)
        self.asked = asyncio.Event()
        self.stopped = asyncio.Event()

    async def generate(self, generation: Generation) -> AsyncIterator[Output]:
        self.requests.append(generation)
        self.asked.set()
        for output in self.script:
            if isinstance(output, Exception):
                raise output
            yield replace(output, rid=generation.rid)
            if self.hold:
                await self.stopped.wait()
                yield replace(output, token_ids=(), text="", logprobs=(), finish_reason=FINISH_ABORT)
                return

    def check_grammar(self, grammar: str) -> None:
        self.grammars.append(grammar)

    def knows_grammar(self, grammar: str) -> bool:
        return False

    def special_token(self, text: str) -> int | None:
        return None

    def abort(self, rid: str) -> None:
        self.aborted.append(rid)
        self.stopped.set()

    async def answer_intent(self, method: str, path: str, body: str, asked_by: str) -> IntentReply:
        return IntentReply(200, {"asked_by": asked_by})

    async def hint(self, prompt_ids: Sequence[int], scope: Scope) -> int:
        self.calls.append((list(prompt_ids), scope))
        return len(prompt_ids)

    async def snapshot(self) -> Snapshot:
        return self.state

    async def flush(self, timeout_s: float) -> AdminResult:
        self.calls.append(("flush", timeout_s))
        return self.outcome

    async def attach(self, request: AttachRequest) -> AdminResult:
        self.calls.append(request)
        return self.outcome

    async def detach(self, wait_s: float | None = None) -> AdminResult:
        self.calls.append("detach")
        return self.outcome

    async def clear_storage(self) -> AdminResult:
        self.calls.append("clear")
        return self.outcome


def application(
    service: ScriptedService,
    *,
    api_key: str | None = None,
    admin_key: str | None = None,
    attach: AttachRules | None = None,
    **cache: object,
) -> FastAPI:
    """The HTTP application over `service`; `cache` are fields of the cache configuration."""
    config = HiCacheConfig(enable_hierarchical_cache=True, **cache)  # type: ignore[arg-type]
    settings = AppSettings(MODEL, config, Keys(api_key, admin_key), attach=attach or AttachRules())
    return create_app(service, settings)
