"""The fields that clients send and this server does not serve: accepted at the value that changes nothing,
else refused by name.

`docs/http-api.md` has the table.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hiradix.apps.server.errors import ApiError

COMPLETIONS, CHAT, MESSAGES, RESPONSES = "completions", "chat", "messages", "responses"
OPENAI = (COMPLETIONS, CHAT)
EVERY = (COMPLETIONS, CHAT, MESSAGES, RESPONSES)
_NO_LORA = "adapters are not served; give the model with its weights merged"
_ONE_ENGINE = "this server is one engine"
_NO_BEAMS = "beams are not searched"


@dataclass(frozen=True, slots=True)
class Field:
    """A field of some dialects. neutral: the values that change nothing, beside null; None: all of them."""

    name: str
    dialects: tuple[str, ...]
    neutral: tuple[object, ...] | None
    reason: str

    def takes(self, value: object) -> bool:
        """Whether `value` may be left out: 1 is not True here, and 1.0 is 1."""
        if value is None or self.neutral is None:
            return True
        return any(value is ok or (type(value) is not bool and value == ok) for ok in self.neutral)


_REFUSED: tuple[Field, ...] = (
    Field("best_of", OPENAI, (1,), "answers are not ranked; ask for n"),
    Field("suffix", (COMPLETIONS,), ("",), "models are not asked to fill in"),
    Field("functions", (CHAT,), ([],), "send tools"),
    Field("function_call", (CHAT,), ("none", "auto"), "send tool_choice"),
    Field("modalities", (CHAT,), (["text"],), "answers are text"),
    Field("audio", (CHAT,), ({},), "answers are text"),
    Field("prediction", (CHAT,), ({},), "answers are not predicted"),
    Field("reasoning_effort", (CHAT,), ("none",), "a model's template decides; see chat_template_kwargs"),
    Field("verbosity", (CHAT,), ("medium",), "say it in the prompt"),
    Field("web_search_options", (CHAT,), ({},), "there is no search"),
    Field("documents", (CHAT,), ([],), "put them into a message"),
    Field("chat_template", (CHAT,), ("",), "templates are the model's: a client's own would be a program"),
    Field("mm_processor_kwargs", (CHAT,), ({},), "models take text"),
    Field("use_beam_search", OPENAI, (False,), _NO_BEAMS),
    Field("length_penalty", OPENAI, (1,), _NO_BEAMS),
    Field("early_stopping", OPENAI, (False,), _NO_BEAMS),
    Field("truncate_prompt_tokens", OPENAI, (-1,), "prompts are not cut"),
    Field("allowed_token_ids", OPENAI, ([],), "use logit_bias, or a grammar"),
    Field("bad_words", OPENAI, ([],), "use logit_bias"),
    Field("typical_p", OPENAI, (1,), "sampling has top_k, top_p and min_p"),
    Field("no_stop_trim", OPENAI, (False,), "send include_stop_str_in_output"),
    Field("stop_regex", OPENAI, ([], ""), "send stop"),
    Field("logprob_token_ids", OPENAI, ([],), "logprobs are of the likeliest tokens"),
    Field("return_tokens_as_token_ids", OPENAI, (False,), "send return_token_ids"),
    Field("return_hidden_states", OPENAI, (False,), "hidden states are not kept"),
    Field("lora_path", OPENAI, ([], ""), _NO_LORA),
    Field("lora_request", OPENAI, ({},), _NO_LORA),
    Field("custom_logit_processor", OPENAI, ("",), "a client's code is not run"),
    Field("custom_params", OPENAI, ({},), "a client's code is not run"),
    Field("logits_processors", OPENAI, ([],), "a client's code is not run"),
    Field("kv_transfer_params", OPENAI, ({},), _ONE_ENGINE),
    Field("vllm_xargs", OPENAI, ({},), "there are no more arguments"),
    Field("data_parallel_rank", OPENAI, (0,), _ONE_ENGINE),
    Field("bootstrap_host", OPENAI, ("",), _ONE_ENGINE),
    Field("bootstrap_port", OPENAI, None, _ONE_ENGINE),
    Field("bootstrap_room", OPENAI, None, _ONE_ENGINE),
    Field("previous_response_id", (RESPONSES,), (), "responses are not stored; send the whole input"),
    Field("conversation", (RESPONSES,), (), "responses are not stored; send the whole input"),
    Field("store", (RESPONSES,), (False,), "responses are not stored"),
    Field("background", (RESPONSES,), (False,), "responses are not stored"),
    Field("include", (RESPONSES,), ([], ["reasoning.encrypted_content"]), "there is none of it in an answer"),
    Field("truncation", (RESPONSES,), ("disabled",), "prompts are not cut"),
    Field("reasoning", (RESPONSES,), ({}, {"effort": "none"}), "a model's template decides"),
    Field("prompt", (RESPONSES,), (), "there are no stored prompts"),
    Field("max_tool_calls", (RESPONSES,), (), "no tool is called here"),
    Field("thinking", (MESSAGES,), ({"type": "disabled"},), "a model's template decides"),
    Field("mcp_servers", (MESSAGES,), ([],), "no tool is called here"),
    Field("container", (MESSAGES,), (), "no code is run here"),
    Field("context_management", (MESSAGES,), ({}, {"edits": []}), "prompts are not edited"),
    Field("output_config", (MESSAGES,), ({},), "say it in the prompt"),
    Field("inference_geo", (MESSAGES,), ("",), _ONE_ENGINE),
)
_IGNORED: tuple[Field, ...] = (
    *(Field(name, EVERY, None, "for the operator of a service") for name in ("metadata", "service_tier")),
    *(
        Field(name, (COMPLETIONS, CHAT, RESPONSES), None, "for the operator of a service")
        for name in ("user", "safety_identifier")
    ),
    Field("store", OPENAI, None, "answers are not stored"),
    Field("spaces_between_special_tokens", OPENAI, None, "there are none between"),
    Field("separate_reasoning", (CHAT,), None, "an answer's text is whole"),
    Field("stream_reasoning", (CHAT,), None, "an answer's text is whole"),
    Field("include_reasoning", (CHAT,), None, "an answer's text is whole"),
    Field("betas", (MESSAGES,), None, "the header anthropic-beta is not read either"),
)
FIELDS = (*_REFUSED, *_IGNORED)


def drop_unsupported(values: dict[str, Any], dialect: str) -> None:
    """Take the table's fields out of a body. ApiError names the first with a value that would matter."""
    for field in FIELDS:
        if dialect not in field.dialects or field.name not in values:
            continue
        if not field.takes(values.pop(field.name)):
            raise ApiError(f"{field.name}: this value is not supported: {field.reason}", param=field.name)


def refused_names(dialect: str) -> list[str]:
    """Names of a dialect's fields that some value is refused of."""
    return [field.name for field in _REFUSED if dialect in field.dialects]


def fields_markdown() -> str:
    """The table of `docs/http-api.md`."""
    lines = ["| field | of | taken at | because |", "|---|---|---|---|"]
    for field in FIELDS:
        where = ", ".join(field.dialects) if field.dialects != EVERY else "all"
        lines.append(f"| `{field.name}` | {where} | {_shown(field)} | {field.reason} |")
    return "\n".join(lines)


def _shown(field: Field) -> str:
    if field.neutral is None:
        return "any value, ignored"
    return ", ".join(["null", *(f"`{json.dumps(value)}`" for value in field.neutral)])
