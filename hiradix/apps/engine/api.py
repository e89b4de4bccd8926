"""The reference engine's requests and answers: frozen records, no torch, no threads."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, SupportsIndex

from hiradix.config import HiCacheConfig
from hiradix.errors import CacheError, ConfigError
from hiradix.explain import Explanation
from hiradix.intents.limits import IntentLimits
from hiradix.policy.admission import admission_policies
from hiradix.policy.uses import HINTS
from hiradix.settings import MAX_COUNT, REQUIRED, Type, fields_of, setting
from hiradix.tree.key import ADAPTER


class RequestError(CacheError, ValueError):
    """A request that can never be served as it is (too long, empty, bad parameter); nothing was queued."""


class EngineBusy(CacheError):
    """The waiting queue is at its cap; the caller may try again later."""


class EngineStopped(CacheError):
    """The engine thread has ended, was closed, or failed; no further request can be served."""


FINISH_STOP = "stop"
FINISH_TOOL = "tool_calls"
FINISH_LENGTH = "length"
FINISH_ABORT = "abort"
FINISH_ERROR = "error"


MAX_BIASES = 1024
MAX_THREADS = 1024  # with too many the thread library ends the process
CHECK_VARIABLE = "HIRADIX_CHECK"
DTYPES = ("float32", "bfloat16", "float16")


def _require(ok: bool, name: str, value: object, want: str) -> None:
    if not ok:
        raise RequestError(f"{name}={value!r}: must be {want}")


def is_text(value: object) -> bool:
    """Whether UTF-8 has it: JSON can carry half a surrogate pair."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters by which one request picks its tokens and ends; a bad value raises RequestError naming
    the field.

    `temperature` 0, or next to 0, is greedy. `seed` None draws from the engine's own stream; an integer makes
    the request repeatable whatever runs beside it. `logprobs` None returns none, N returns the chosen token's
    and the N most likely tokens' log probabilities of the distribution as the model gives it; `prompt_logprobs`
    the same of the prompt, which is then computed whole, whatever is cached. `stop` strings need a tokenizer.

    Logits are changed in this order: `logit_bias` is added, the repetition penalty divides (or multiplies) those
    of tokens of prompt and answer, the frequency and presence penalties are taken from those of the answer; then
    the temperature, `min_p`, `top_k` (0: all) and `top_p`. Before `min_new_tokens` nothing but the length ends
    an answer. `grammar`: what the answer must match, as `Grammars` reads it. `tool_markers`: an answer that ends
    by itself and has one of these texts has called a tool; "" is in every answer.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_new_tokens: int = 0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    grammar: str | None = None
    tool_markers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "at least 1")
        _require(0.0 <= self.temperature <= 100.0, "temperature", self.temperature, "in [0, 100]")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "in (0, 1]")
        _require(len(self.stop) <= 16 and all(self.stop), "stop", self.stop, "at most 16 non-empty strings")
        _require(len(self.stop_token_ids) <= 64, "stop_token_ids", self.stop_token_ids, "at most 64 ids")
        _require(self.logprobs is None or 0 <= self.logprobs <= 50, "logprobs", self.logprobs, "in 0..50")
        of_prompt = self.prompt_logprobs
        _require(of_prompt is None or 0 <= of_prompt <= 50, "prompt_logprobs", of_prompt, "in 0..50")
        _require(0 <= self.top_k < 2**31, "top_k", self.top_k, "0 or more")
        _require(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "in [0, 1]")
        repetition = self.repetition_penalty
        _require(0.01 <= repetition <= 100.0, "repetition_penalty", repetition, "in [0.01, 100]")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(-2.0 <= value <= 2.0, name, value, "in [-2, 2]")
        is_bias = len(self.logit_bias) <= MAX_BIASES and all(
            -100 <= bias <= 100 for _, bias in self.logit_bias
        )
        _require(is_bias, "logit_bias", self.logit_bias[:8], f"at most {MAX_BIASES} numbers in [-100, 100]")
        least = self.min_new_tokens
        _require(0 <= least <= self.max_new_tokens, "min_tokens", least, f"in 0..{self.max_new_tokens}")
        _require(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", self.seed, "a 64-bit integer")


@dataclass(frozen=True, slots=True)
class PromptWish:
    """A wish of a request about its own prompt: carried out once the prompt is computed, a forget at its end.

    asked_by: the request's field that asks for it. body: as `hiradix.intents.http.intent_of` reads one, without
    a selector; without tiers a hold is in the host, or where there is none on the device. num_tokens: how many
    leading tokens it is about; None: all. or_hold_s: of a bring to storage, seconds to hold instead where there
    is no storage. answer: what becomes of it, where no cache is asked: the body does not count then.
    """

    asked_by: str
    body: Mapping[str, Any] = field(default_factory=dict)
    num_tokens: int | None = None
    or_hold_s: float = 0.0
    answer: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose cache a request may share (namespace: adapter and tenant) and how much its pages matter.

    hint: what the client knows of its conversation, `end_of_session` or `keep_alive`. session: its name for
    the session, within `cache_salt`; "": it is told by the prompt's beginning. wishes: what else it asks of the
    cache. RequestError names a field that is none of what it may be, or that is kept for adapters of other
    engines, which may share a store.
    """

    extra_key: str | None = None
    cache_salt: str | None = None
    priority: int = 0
    hint: str | None = None
    session: str = ""
    wishes: tuple[PromptWish, ...] = ()

    def __post_init__(self) -> None:
        for name in ("extra_key", "cache_salt"):
            value = getattr(self, name)
            _require(value is None or is_text(value), name, value, "a text without half characters")
        is_adapter = self.extra_key is not None and self.extra_key.startswith(ADAPTER)
        _require(not is_adapter, "extra_key", self.extra_key, "none of an adapter's")
        is_number = isinstance(self.priority, SupportsIndex) and -(2**31) <= index(self.priority) < 2**31
        _require(is_number, "priority", self.priority, "a 32-bit integer")
        _require(self.hint in (None, *HINTS), "hint", self.hint, f"one of {', '.join(HINTS)}")
        _require(is_text(self.session), "session", self.session, "a text without half characters")


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The input of a chat template: messages as dicts, tools as JSON schemas, variables of its own.

    opens_answer: the assistant's turn is opened behind the last message; continues_last: that message is the
    assistant's and left open, which excludes it. RequestError names the field.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    opens_answer: bool = True
    continues_last: bool = False
    add_special_tokens: bool = False

    def __post_init__(self) -> None:
        taken = sorted(_TEMPLATE_NAMES & self.template_kwargs.keys())
        _require(not taken, "chat_template_kwargs", taken, "names that no other field has")
        if self.continues_last:
            excluded = "false: continue_final_message leaves the last message open"
            _require(not self.opens_answer, "add_generation_prompt", True, excluded)
            role = self.messages[-1].get("role")
            _require(role == "assistant", "continue_final_message", role, "after a message of the assistant")

    @property
    def num_chars(self) -> int:
        """About how long it is, for whoever decides where it is tokenised."""
        return sum(len(str(message.get("content"))) for message in self.messages)

    def variables(self) -> dict[str, Any]:
        """The template's variables beside the messages."""
        tools = {"tools": list(self.tools)} if self.tools else {}
        return {**self.template_kwargs, **tools, "add_generation_prompt": self.opens_answer}


_TEMPLATE_NAMES = {"messages", "tools", "add_generation_prompt", "continue_final_message"}


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log probability, and the most likely (token id, log probability), best first.

    rank: its place among all tokens, the likeliest is 1; 0 where nobody asked.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request; the cached counts are those of its first admission, by source tier.

    wishes: with its last Output, what has become of each of its wishes so far.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_device: int = 0
    cached_host: int = 0
    cached_storage: int = 0
    explanation: Explanation | None = None
    wishes: tuple[Mapping[str, Any], ...] = ()

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV was reused from any tier."""
        return self.cached_device + self.cached_host + self.cached_storage


@dataclass(frozen=True, slots=True)
class Output:
    """The output of one step for one request; a request's last one carries `finish_reason`.

    `token_ids` are new since the previous Output (empty at most in the last). `text` is the new text, held
    back while it may be the beginning of a stop string or of a character, and cut before a stop string; it
    is "" when the model directory has no tokenizer. `finish_reason` is stop, tool_calls, length, abort or error;
    for error, `error` says why. `prompt_logprobs`: of the prompt's tokens but the first, in a request's first
    Output where they were asked for. `matched_stop`: the stop string that ended it.
    """

    rid: str
    token_ids: tuple[int, ...]
    usage: Usage
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    matched_stop: str | None = None


def _count(name: str, default: int | None, text: str, **more: Any) -> Any:
    bounds = {"minimum": 1, "maximum": MAX_COUNT}  # slots are 32 bits wide
    return setting(name, Type.INTEGER, default, text, **{**bounds, **more})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an Engine is built from; a bad value raises ConfigError naming the field.

    `context_length` None takes the model's; `chunked_prefill_size` None prefills whole prompts;
    `swa_full_tokens_ratio` None keeps all layers in one pool; `max_mamba_cache_size` None is four for each of
    `max_running_requests`; `num_threads` None means 1 on CPU. `check` runs the invariant and conservation
    checks after every step; unless it is given, HIRADIX_CHECK=1 in the environment does.
    """

    model_path: str = setting(
        "model_path",
        Type.FOLDER,
        REQUIRED,
        "Local directory of a transformers checkpoint (config, weights, tokenizer).",
        aliases=("model",),
        metavar="DIR",
    )
    dtype: str = setting("dtype", Type.TEXT, "float32", "Type of weights and KV pages.", choices=DTYPES)
    device: str = setting(
        "device", Type.TEXT, "cpu", "Torch device of the model and the device pool.", metavar="DEVICE"
    )
    max_total_tokens: int = _count("max_total_tokens", 16384, "Size of the device pool in tokens.")
    max_running_requests: int = _count("max_running_requests", 16, "Most requests in one batch.")
    max_waiting_requests: int = _count(
        "max_queued_requests", 512, "Most requests that wait; further ones get 503."
    )
    chunked_prefill_size: int | None = _count(
        "chunked_prefill_size",
        512,
        "Most tokens one prefill pass computes; -1 prefills whole prompts.",
        none_at=-1,
    )
    schedule_policy: str = setting(
        "schedule_policy",
        Type.TEXT,
        "fcfs",
        "Order of service: first come, first served; lpm, the least time to the first token first, without a "
        "bound; cached, sessions enter while the cache holds them, the least time first but for who would be "
        "late.",
        choices=tuple(admission_policies()),
    )
    swa_full_tokens_ratio: float | None = setting(
        "swa_full_tokens_ratio",
        Type.NUMBER,
        None,
        "A pool of its own for layers with a sliding window: its tokens per token of the device pool, in (0, "
        "1].",
        default_text="one pool",
    )
    max_mamba_cache_size: int | None = _count(
        "max_mamba_cache_size",
        None,
        "Recurrent states on the device, of running requests and cached ones, in models that keep such.",
        default_text="4 per running request",
    )
    context_length: int | None = _count(  # a token of a prompt and one of its answer
        "context_length",
        None,
        "Most tokens of a prompt and its answer. Chooses a long rope's factors.",
        minimum=2,
        default_text="the model's",
    )
    num_threads: int | None = _count(
        "num_threads", None, "CPU threads of the model.", maximum=MAX_THREADS, default_text="1"
    )
    cache: HiCacheConfig = field(default_factory=HiCacheConfig)
    intents: IntentLimits = IntentLimits()
    check: bool = setting(
        "check_invariants",
        Type.BOOL,
        lambda: os.environ.get(CHECK_VARIABLE) == "1",
        "Assert the tree's invariants and page conservation after every step (slow; for tests).",
        default_text="off",
        env=CHECK_VARIABLE,
    )
    model_name: str | None = None
    seed: int = setting(
        "random_seed", Type.INTEGER, 0, "Seed of sampled requests that bring none.", minimum=-(2**63)
    )

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype!r}: must be float32, bfloat16 or float16")
        if self.schedule_policy not in admission_policies():
            known = ", ".join(admission_policies())
            raise ConfigError(f"schedule_policy={self.schedule_policy!r}: must be one of {known}")
        ratio = self.swa_full_tokens_ratio
        if ratio is not None and not 0 < ratio <= 1:
            raise ConfigError(f"swa_full_tokens_ratio={ratio!r}: must be in (0, 1]")
        for name, one in fields_of(EngineConfig):
            value = getattr(self, name)
            if one.maximum is None or value is None:
                continue
            if value < one.minimum:
                raise ConfigError(f"{name}={value!r}: must be at least {one.minimum}")
            if value > one.maximum:
                raise ConfigError(f"{name}={value!r}: must be at most {one.maximum}")


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """A snapshot of the engine's size and load, in tokens and requests."""

    model_name: str
    model_path: str
    dtype: str
    device: str
    page_size: int
    context_length: int
    vocab_size: int
    kv_bytes_per_token: int
    max_total_tokens: int
    available_tokens: int
    evictable_tokens: int
    protected_tokens: int
    num_running: int
    num_waiting: int
    num_retractions: int
    num_steps: int
    storage_attached: bool
    schedule_policy: str = "fcfs"
    num_sessions_in: int = 0  # whose footprints the order of service counts against the cache
    num_late: int = 0  # first tokens behind the bound of the order of service
