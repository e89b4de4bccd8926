"""The engine as the HTTP handlers see it: records and one protocol, which tests' scripted engine implements
too."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hiradix.apps.engine.api import ChatPrompt, EngineInfo, Output, SamplingParams, Scope
from hiradix.intents.http import IntentBody, IntentReply

NO_HOST_TIER = "Hierarchical cache is not enabled."


@dataclass(frozen=True, slots=True)
class Generation:
    """One request for the engine; `rid` is unique while the request lives."""

    rid: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    scope: Scope = Scope()


@dataclass(frozen=True, slots=True)
class AttachRequest:
    """Body of PUT /hicache/storage-backend: a backend's name, settings as text, policies to change.

    wait_s: seconds the backend may take to open; None also asks for an idle engine, as upstream does.
    """

    backend: str
    extra_config_text: str | None = field(default=None, repr=False)
    prefetch_policy: str | None = None
    write_policy: str | None = None
    wait_s: float | None = None


@dataclass(frozen=True, slots=True)
class AdminResult:
    """Whether an administrative operation was done, and the sentence to tell the administrator."""

    ok: bool
    message: str


@dataclass(frozen=True, slots=True)
class CacheReport:
    """The cache's own counters, in tokens where not said otherwise; those after `num_waiting_for_room` only
    grow.

    `unfulfilled` counts tokens found in storage that did not arrive, by reason. `num_in_flight` is transfers.
    `waiting_...`, `num_waiting_for_room`: see `CacheStats`.
    """

    device_total: int = 0
    device_available: int = 0
    device_evictable: int = 0
    device_protected: int = 0
    host_total: int = 0
    host_used: int = 0
    waiting_reserved: int = 0
    waiting_cap: int = 0
    num_waiting_for_room: int = 0
    evicted_device: int = 0
    evicted_host: int = 0
    written: int = 0
    write_dropped: int = 0
    loaded: int = 0
    load_too_slow: int = 0
    backed_up: int = 0
    backup_failed: int = 0
    prefetched: int = 0
    refetched: int = 0
    unfulfilled: Mapping[str, int] = field(default_factory=dict)
    num_in_flight: int = 0


@dataclass(frozen=True, slots=True)
class TransferReport:
    """One kind of transfer since the start: jobs ended and failed, bytes moved, seconds the worker worked."""

    num_jobs: int = 0
    num_failed: int = 0
    num_bytes: int = 0
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One reading of engine and cache for /metrics and /server_info, taken between two engine steps.

    `storage` holds the attached backend's own counters; `storage_backend` is None while none is attached.
    `kv_events` is where events are published, if they are, and `kv_events_figures` how many.
    `transfers` is by kind (write: device to host, load: back, store and read: to and from storage, query).
    `window`: tokens of sliding-window pools, `state`: records of recurrent states, empty for models without;
    `intents`: figures of wishes, such as leases; `cache` speaks of full attention.
    """

    engine: EngineInfo
    cache: CacheReport = CacheReport()
    transfers: Mapping[str, TransferReport] = field(default_factory=dict)
    cache_type: str = "HiRadixCache"
    storage_backend: str | None = None
    storage: Mapping[str, Any] = field(default_factory=dict)
    kv_events: Mapping[str, Any] | None = None
    kv_events_figures: Mapping[str, int] | None = None
    window: Mapping[str, int] = field(default_factory=dict)
    state: Mapping[str, int] = field(default_factory=dict)
    intents: Mapping[str, int] = field(default_factory=dict)


class TokenizerLike(Protocol):
    """Text to tokens and back; safe to call from any thread."""

    @property
    def chat_template(self) -> str:
        """The text of the chat template, "" where there is none."""

    def encode(
        self, text: str, context_length: int | None = None, *, add_special_tokens: bool = True
    ) -> list[int]:
        """Token ids of a plain prompt; RequestError where it is seen, before, not to fit the context."""

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """The text of some tokens, special ones shown."""

    def apply_chat(self, conversation: ChatPrompt, context_length: int | None = None) -> list[int]:
        """Token ids of a conversation; RequestError if it cannot be rendered or fit."""

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself; U+FFFD where it holds part of a character."""


class Service(Protocol):
    """An engine seen from the HTTP side. Coroutines run on the server's event loop; `abort` never blocks.

    `generate` raises RequestError for a request that can never run, EngineBusy when the queue is full and
    EngineStopped when the engine is gone, all before its first output.
    """

    @property
    def tokenizer(self) -> TokenizerLike | None:
        """None for a model directory without a tokenizer: such a server takes and gives token ids only."""

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt and its answer."""

    @property
    def healthy(self) -> bool:
        """True while the engine can take requests."""

    def generate(self, generation: Generation) -> AsyncIterator[Output]:
        """The request's outputs as they come; the last one has a finish_reason."""

    def check_grammar(self, grammar: str) -> None:
        """Compile the grammar of an answer; RequestError where it is none. Blocks: from a thread of its own."""

    def knows_grammar(self, grammar: str) -> bool:
        """Whether `check_grammar` would find it compiled. Never blocks."""

    def special_token(self, text: str) -> int | None:
        """The id of the special token that is written so, None where that is plain text."""

    def abort(self, rid: str) -> None:
        """Stop the request soon, if it still runs; its iterator then ends with finish_reason abort."""

    async def hint(self, prompt_ids: Sequence[int], scope: Scope) -> int:
        """Tell the eviction policy `scope.hint` of a conversation; its cached tokens."""

    async def answer_intent(self, method: str, path: str, body: IntentBody, asked_by: str) -> IntentReply:
        """Answer a request to a path of `hiradix.intents.http`; TimeoutError if the engine has no turn for
        it."""
        ...

    async def snapshot(self) -> Snapshot:
        """The current figures; TimeoutError when the engine does not answer in time."""

    async def flush(self, timeout_s: float) -> AdminResult:
        """Empty device and host tiers once idle, waiting at most `timeout_s`."""

    async def attach(self, request: AttachRequest) -> AdminResult:
        """Attach a storage backend, or change the policies of the same one. Requests go on meanwhile."""

    async def detach(self, wait_s: float | None = None) -> AdminResult:
        """Detach the storage backend; nothing attached is a success. Requests go on meanwhile.

        wait_s: seconds that its running jobs may take to end; None asks for an idle engine.
        """

    async def clear_storage(self) -> AdminResult:
        """Delete every page in the attached storage."""
