"""The fields of completions and chat completions about sampling, the answer's form and its stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from hiradix.apps.engine import grammar as forms
from hiradix.apps.engine.api import RequestError, SamplingParams, Scope
from hiradix.apps.server.api_request import AnswerForm, AskedWish
from hiradix.apps.server.errors import ApiError
from hiradix.apps.server.generation import api_error
from hiradix.apps.server.schema import NOBODYS, AddressedBody, Name, Owner, StopText, StrictBody
from hiradix.apps.server.wishes import Wished, of_field, of_prompt_cache, session_of_key

MAX_TOKENS = 1 << 31
MakeGrammar = Callable[[], str]
Rid = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\w.:-]+$")]


class StreamOptions(StrictBody):
    """include_usage: one more chunk with the usage before [DONE]; continuous_usage_stats: in every chunk."""

    include_usage: bool | None = False
    include_obfuscation: Literal[False] | None = False
    continuous_usage_stats: bool | None = False


class JsonSchemaForm(StrictBody):
    """`response_format.json_schema`; `schema` without one is any object."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(StrictBody):
    """The form of an answer: text, a JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaForm | None = None

    def make_grammar(self) -> MakeGrammar | None:
        """Compiles the grammar; None for text. Raises ApiError."""
        if self.type == "text":
            return None
        schema = self.schema_of()
        return partial(forms.of_json_schema, schema)

    def schema_of(self) -> Any:
        """The JSON schema of an answer that is JSON."""
        if self.type == "json_object":
            return {"type": "object"}
        if self.json_schema is None:
            name = "response_format.json_schema"
            raise ApiError(f"{name}: is needed for this type", param=name)
        schema = self.json_schema.schema_
        return {"type": "object"} if schema is None else schema


class StructuredOutputs(StrictBody):
    """vLLM's field for the answer's form."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=1000)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class GenerationBody(AddressedBody):
    """Fields that completions and chat completions share, of OpenAI, and of vLLM and SGLang beside it."""

    max_tokens: Annotated[int, Field(ge=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    min_new_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] | None
    ) = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=64)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    rid: Rid | None = None
    request_id: Rid | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1, max_length=1000)] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    session_id: Name | None = None
    end_of_session: bool = False
    keep_alive: bool = False
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    hiradix: Wished = None

    def sampling(self, limit: int | None, logprobs: int | None, **more: Any) -> SamplingParams:
        """The engine's parameters; temperature and top_p default to 1 as in the OpenAI API. Raises ApiError."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        least = self.min_tokens or self.min_new_tokens or 0
        if least > (MAX_TOKENS if limit is None else limit):
            raise ApiError("min_tokens: more than the answer may have", param="min_tokens")
        try:
            return SamplingParams(
                max_new_tokens=max(1, least) if limit is None else max(1, limit),
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=1.0 if self.top_p is None else self.top_p,
                top_k=max(0, self.top_k or 0),
                min_p=self.min_p or 0.0,
                presence_penalty=self.presence_penalty or 0.0,
                frequency_penalty=self.frequency_penalty or 0.0,
                repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
                logit_bias=self._biases(),
                min_new_tokens=least,
                stop=stop,
                stop_token_ids=tuple(self.stop_token_ids or ()),
                include_stop_str_in_output=bool(self.include_stop_str_in_output),
                ignore_eos=bool(self.ignore_eos),
                skip_special_tokens=more.pop("skip_special_tokens", self.skip_special_tokens is not False),
                seed=self.seed,
                logprobs=logprobs,
                prompt_logprobs=more.pop("prompt_logprobs", self.prompt_logprobs),
                **more,
            )
        except RequestError as error:
            raise api_error(error, "body") from error

    def _biases(self) -> tuple[tuple[int, float], ...]:
        given = self.logit_bias or {}
        wrong = [key for key in given if not (key.isascii() and key.isdigit() and len(key) < 10)]
        if wrong:
            raise ApiError(f"logit_bias: {wrong[0][:64]!a} is no token id", param="logit_bias")
        return tuple((int(key), bias) for key, bias in given.items() if bias)

    def scope(self, owner: Owner = NOBODYS, session: str = "") -> Scope:
        """Whose cache the request may share, and of which session it is: `session`, if the body says nothing,
        else by `prompt_cache_key`."""
        if self.end_of_session and self.keep_alive:
            raise ApiError("end_of_session: excludes keep_alive", param="end_of_session")
        hint = "end_of_session" if self.end_of_session else "keep_alive" if self.keep_alive else None
        session = self.session_id or session or session_of_key(self.prompt_cache_key)
        return Scope(*self.namespace(owner), self.priority, hint, session)

    def wishes(self, session: str) -> list[AskedWish]:
        """The wishes of the body's fields; `session`: as the header names it. ApiError."""
        is_named = bool(self.session_id or session)
        of_openai = of_prompt_cache(self.prompt_cache_key, self.prompt_cache_retention, is_named)
        return [*of_openai, *of_field(self.hiradix)]

    @property
    def own_id(self) -> str | None:
        """The client's name for the request."""
        return self.request_id or self.rid

    @property
    def include_usage(self) -> bool:
        """True when the stream's last chunk shall carry the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def usage_in_each(self) -> bool:
        """True when each chunk of the stream shall carry it."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def form(self) -> AnswerForm | None:
        """The answer's form, None for any text. ApiError for several of them."""
        made = self._forms()
        if len(made) > 1:
            first, second = list(made)[:2]
            raise ApiError(f"{first}: excludes {second}", param=first)
        return next((AnswerForm(field, make) for field, make in made.items()), None)

    def json_schema_of_answer(self) -> Any:
        """The schema of an answer that is JSON by `response_format`, None where it is not."""
        form = self.response_format
        return None if form is None or form.type == "text" else form.schema_of()

    def _forms(self) -> dict[str, MakeGrammar]:
        made: dict[str, MakeGrammar] = {}
        form = None if self.response_format is None else self.response_format.make_grammar()
        if form is not None:
            made["response_format"] = form
        for name in ("guided_json", "json_schema"):
            if (schema := getattr(self, name)) is not None:
                made[name] = partial(forms.of_json_text, schema)
        for name in ("guided_regex", "regex"):
            if (pattern := getattr(self, name)) is not None:
                made[name] = partial(forms.of_regex, pattern)
        for name in ("guided_grammar", "ebnf"):
            if (text := getattr(self, name)) is not None:
                made[name] = partial(forms.of_grammar, text)
        if self.guided_choice is not None:
            made["guided_choice"] = partial(forms.of_choice, self.guided_choice)
        if self.structured_outputs is not None:
            made |= _structured(self.structured_outputs)
        return made


def _structured(asked: StructuredOutputs) -> dict[str, MakeGrammar]:
    made: dict[str, MakeGrammar] = {}
    if asked.json_ is not None:
        made["structured_outputs.json"] = partial(forms.of_json_text, asked.json_)
    if asked.regex is not None:
        made["structured_outputs.regex"] = partial(forms.of_regex, asked.regex)
    if asked.choice is not None:
        made["structured_outputs.choice"] = partial(forms.of_choice, asked.choice)
    if asked.grammar is not None:
        made["structured_outputs.grammar"] = partial(forms.of_grammar, asked.grammar)
    if asked.json_object:
        made["structured_outputs.json_object"] = partial(forms.of_json_schema, {"type": "object"})
    return made
