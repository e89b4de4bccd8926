"""Bodies of the OpenAI endpoints: strict types, unknown and unsupported fields refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request

from hiradix.apps.engine.api import SamplingParams, Scope
from hiradix.apps.server.json_text import parse
from hiradix.tree.key import ADAPTER

MAX_ERRORS = 1000
MAX_NAME_CHARS = 64  # what is shown of a field or a model that nobody knows
MAX_STOP_CHARS = 4096  # what is kept of a request to its end is short but for its tokens
DEFAULT_COMPLETION_TOKENS = 16

# Fields of the OpenAI API that are accepted only where they change nothing.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "tools": (None, []),
    "tool_choice": (None, "none"),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "function_call": (None, "none"),
    "parallel_tool_calls": (None, True, False),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
}
IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")


class ApiError(Exception):
    """A refusal in the OpenAI form; `param` names the field at fault."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code

    def body(self) -> dict[str, Any]:
        """The JSON body clients of the OpenAI API expect."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Strict):
    """`include_usage`: one more chunk with the usage before [DONE]. Nothing is padded."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


_StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


def _whole_characters(text: str) -> str:
    """`text`, unless it has half a surrogate pair, which JSON can carry and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"half a character at {error.start} of the text") from error
    return text


MAX_SESSION_CHARS = 256
_Name = Annotated[str, Field(max_length=MAX_SESSION_CHARS), AfterValidator(_whole_characters)]
TENANT_SALT = "tenant:"
"""How the salts of tenants begin, who are known by their keys: no client may name one."""


@dataclass(frozen=True)
class Owner:
    """Whose a request is. tenant: as its key says. needs_salt: one that says nothing of it is refused."""

    tenant: str | None = None
    needs_salt: bool = False


class _Addressed(_Strict):
    """Which model, and whose cache."""

    model: str | None = None
    cache_salt: _Name | None = None
    extra_key: _Name | None = None

    def namespace(self, owner: Owner) -> tuple[str | None, str | None]:
        """extra_key and cache_salt for the engine. A tenant's requests have his salt, and a salt of their
        own is a part of extra_key then: quotas are by tenant. Raises ApiError."""
        salt = self.cache_salt
        if self.extra_key is not None and self.extra_key.startswith(ADAPTER):
            raise ApiError("extra_key: must not name an adapter's pages", param="extra_key")
        if salt is not None and salt.startswith(TENANT_SALT):
            raise ApiError(f"cache_salt: must not begin with {TENANT_SALT!r}", param="cache_salt")
        if owner.tenant is None:
            if owner.needs_salt and not salt:
                raise ApiError("cache_salt: this server asks for one of each request", param="cache_salt")
            return self.extra_key, salt
        extra_key = json.dumps([self.extra_key, salt]) if salt else self.extra_key
        return extra_key, TENANT_SALT + owner.tenant


class GenerationBody(_Addressed):
    """Fields that completions and chat completions share."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: _StopText | Annotated[list[_StopText], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=64)] | None = None
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    session_id: _Name | None = None
    end_of_session: bool = False
    keep_alive: bool = False

    def sampling(self, max_new_tokens: int, logprobs: int | None) -> SamplingParams:
        """The engine's parameters; temperature and top_p default to 1 as in the OpenAI API."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            seed=self.seed,
            logprobs=logprobs,
        )

    def scope(self, owner: Owner = Owner(), session: str = "") -> Scope:
        """Whose cache the request may share, and of which session it is: `session`, if the body says nothing."""
        if self.end_of_session and self.keep_alive:
            raise ApiError("end_of_session: excludes keep_alive", param="end_of_session")
        hint = "end_of_session" if self.end_of_session else "keep_alive" if self.keep_alive else None
        return Scope(*self.namespace(owner), self.priority, hint, self.session_id or session)

    @property
    def include_usage(self) -> bool:
        """True when the stream's last chunk shall carry the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(GenerationBody):
    """POST /v1/completions: `prompt` is one text or one list of token ids."""

    prompt: str | list[Any]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def one_prompt(self) -> str | list[int]:
        """The prompt; a batch of one is unwrapped, a larger one refused."""
        prompt = self.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return prompt
        if prompt and all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
            return prompt
        batch = len(prompt) > 1 and all(isinstance(item, str | list) for item in prompt)
        reason = "send one prompt per request" if batch else "must be a text or a non-empty list of token ids"
        raise ApiError(f"prompt: {reason}", param="prompt")


class TextPart(_Strict):
    """A piece of a message's content; only text is supported."""

    type: Literal["text"]
    text: str


class MessageBody(_Strict):
    """One chat message, with the empty fields that official clients put into an answer they send back."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[None], Field(max_length=0)] | None = None
    annotations: Annotated[list[None], Field(max_length=0)] | None = None

    def plain(self) -> dict[str, str]:
        """The message as the chat template takes it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class SessionBody(_Addressed):
    """POST /v1/end_of_session and /v1/keep_alive: the conversation as it was sent last."""

    messages: Annotated[list[MessageBody], Field(min_length=1, max_length=10_000)] | None = None
    prompt: str | list[int] | None = None
    session_id: _Name | None = None

    def scope(self, hint: str, owner: Owner = Owner(), session: str = "") -> Scope:
        """Whose conversation it is, and what is said of it."""
        if (self.messages is None) == (self.prompt is None):
            raise ApiError("messages: send either messages or prompt", param="messages")
        return Scope(*self.namespace(owner), hint=hint, session=self.session_id or session)


SESSION_HEADER = "x-session-id"


def session_of(request: Request) -> str:
    """The session that a request's header names, "" where it has none. ApiError where it is too long."""
    name = request.headers.get(SESSION_HEADER, "")
    if len(name) > MAX_SESSION_CHARS:
        raise ApiError(f"{SESSION_HEADER}: longer than {MAX_SESSION_CHARS} characters", param=SESSION_HEADER)
    return name


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[MessageBody], Field(min_length=1, max_length=10_000)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def num_logprobs(self) -> int | None:
        """Alternatives to report per token, None where no log probabilities are wanted."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError("top_logprobs: needs logprobs: true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def token_limit(self) -> int | None:
        """The answer's length limit under either of its two names."""
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise ApiError("max_tokens: excludes max_completion_tokens", param="max_tokens")
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


_Body = TypeVar("_Body", bound=BaseModel)


def parse_json(data: bytes) -> Any:
    """A JSON body's value; ApiError if it is none."""
    try:
        return parse(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not valid JSON: {error}") from error


def _drop_neutral(values: dict[str, Any]) -> None:
    for name in IGNORED:
        values.pop(name, None)
    for name in NEUTRAL.keys() & values.keys():
        value = values.pop(name)
        if not any(type(value) is not bool and value == ok or value is ok for ok in NEUTRAL[name]):
            raise ApiError(f"{name}: this value is not supported, leave the field out", param=name)


def first_error(error: ValidationError) -> tuple[str, str]:
    """The field at fault and the sentence about it, of the error nearest to what the caller wrote."""
    entries = error.errors(include_url=False, include_context=False, include_input=False)
    entry = max(entries, key=lambda item: (_RANK.get(item["type"], 0), len(item["loc"])))
    field = _field(entry)
    if entry["type"] == "extra_forbidden":
        return field, f"{field}: unknown field"
    what: str = entry["msg"]
    if entry["type"] in _KINDS:  # none of the kinds that it may be
        kinds = [item["msg"] for item in entries if item["type"] in _KINDS and _field(item) == field]
        what = ", or ".join([kinds[0], *(kind.removeprefix("Input should be ") for kind in kinds[1:])])
    return field, f"{field}: {what}"


_KINDS = ("string_type", "list_type")
# What of a value is wrong says more than that it might have been of another kind.
_RANK = {"literal_error": 2, "extra_forbidden": 1, **dict.fromkeys(_KINDS, -1)}


def _field(entry: Any) -> str:
    """Where it is, without the names of the kinds that a value may be; an unknown name as it was sent."""
    is_new = entry["type"] == "extra_forbidden"
    known, new = (entry["loc"][:-1], entry["loc"][-1:]) if is_new else (entry["loc"], ())
    names = [str(part) for part in known if isinstance(part, int) or part.isidentifier() and part != "str"]
    names += [part.encode("ascii", "backslashreplace").decode()[:MAX_NAME_CHARS] for part in new]
    return ".".join(names) if names else "body"


def parse_body(data: bytes, model: type[_Body]) -> _Body:
    """A request's body as a checked record; ApiError naming the first field at fault."""
    values = parse_json(data)
    if not isinstance(values, dict):
        raise ApiError("the body must be a JSON object")
    if len(values) > MAX_ERRORS:  # an error each, over half a second for half a million
        raise ApiError(f"the body has {len(values)} fields")
    _drop_neutral(values)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        if (num_errors := error.error_count()) > MAX_ERRORS:  # to list them would take seconds
            raise ApiError(f"the body has {num_errors} values that are wrong") from error
        field, message = first_error(error)
        raise ApiError(message, param=field) from error
