"""POST /v1/completions: texts and token lists, one or many, with OpenAI's form of log probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field

from hiradix.apps.engine.api import TokenLogprob, Usage
from hiradix.apps.server.api_request import ApiRequest, Piece, WholeAnswer
from hiradix.apps.server.errors import ApiError
from hiradix.apps.server.render import (
    Envelope,
    Json,
    Renderer,
    event,
    prompt_logprobs_json,
    token_name,
    usage_json,
)
from hiradix.apps.server.sampling import GenerationBody
from hiradix.apps.server.schema import DEFAULT_COMPLETION_TOKENS, Owner
from hiradix.apps.server.service import Generation

KIND = "text_completion"


class CompletionBody(GenerationBody):
    """`prompt` is a text, a list of token ids, or a list of either."""

    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts, a single one as a list of one. ApiError if one is neither text nor token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and all(isinstance(item, str | list) for item in prompt):
            found = [item if isinstance(item, str) else _ids(item) for item in prompt]
        else:
            found = [_ids(prompt)]
        return found

    def echoed(self, decode: Callable[[Sequence[int]], str]) -> Echo | None:
        """The prompts to show before the answers; None without `echo`."""
        if not self.echo:
            return None
        sent = [prompt if isinstance(prompt, str) else None for prompt in self.prompts()]
        return Echo([one for one in sent for _ in range(self.n or 1)], decode)

    def asked(self, owner: Owner, session: str) -> ApiRequest:
        """The request to the engine. ApiError names the field."""
        limit = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        if limit == 0 and not self.echo:
            raise ApiError("max_tokens: 0 needs echo: true", param="max_tokens")
        of_prompt = self.prompt_logprobs
        if self.echo and self.logprobs is not None and of_prompt is None:
            of_prompt = self.logprobs
        return ApiRequest(
            prompts=self.prompts(),
            field="prompt",
            params=self.sampling(limit, self.logprobs, prompt_logprobs=of_prompt),
            limit=limit,
            scope=self.scope(owner, session),
            num_answers=self.n or 1,
            form=self.form(),
            wishes=self.wishes(session),
            add_special_tokens=self.add_special_tokens is not False,
            rid=self.own_id,
            is_streamed=bool(self.stream),
        )


def _ids(prompt: list[Any]) -> list[int]:
    if prompt and all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
        return prompt
    raise ApiError(
        "prompt: must be a text or a non-empty list of token ids, or a list of these", param="prompt"
    )


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompts of all answers as texts: as they were sent, or decoded where they were token ids."""

    sent: Sequence[str | None]
    decode: Callable[[Sequence[int]], str]

    def text(self, index: int, token_ids: Sequence[int]) -> str:
        """The prompt of answer number `index`."""
        sent = self.sent[index]
        return self.decode(token_ids) if sent is None else sent


class CompletionRenderer(Renderer):
    """text_completion, whole and in chunks.

    echo: prompts, where they are shown before their answers; has_answer: false for the prompt alone.
    """

    def __init__(
        self,
        envelope: Envelope,
        echo: Echo | None,
        has_answer: bool,
        generations: Sequence[Generation],
    ):
        self._envelope = envelope
        self._echo = echo
        self._has_answer = has_answer
        self._prompt_ids = [generation.prompt_ids for generation in generations]
        self._offsets: dict[int, int] = {}
        self._shown: set[int] = set()

    def whole(self, answers: Sequence[WholeAnswer], usage: Usage) -> Json:
        """The body of an answer that is sent whole."""
        choices = []
        for one in answers:
            choice = self._choice(
                one.index, one.text, one.logprobs, one.token_ids, one.finish_reason, one.prompt_logprobs
            )
            if self._envelope.with_prompt_logprobs:
                choice["prompt_logprobs"] = prompt_logprobs_json(
                    one.prompt_logprobs, self._envelope.token_text
                )
            choices.append(choice)
        return self._envelope.wrap(KIND, choices, usage_json(self._counted(usage)))

    def events(self, piece: Piece) -> list[bytes]:
        """The events of one piece of an answer; none if it has no new text and nothing else was asked for."""
        output, text = piece.output, "".join(getattr(delta, "text", "") for delta in piece.deltas)
        is_first = piece.index not in self._shown
        is_shown = text or piece.finish_reason or self._envelope.is_shown(output)
        if not (is_shown or (is_first and self._echo)):
            return []
        choice = self._choice(
            piece.index, text, output.logprobs, output.token_ids, piece.finish_reason, output.prompt_logprobs
        )
        if is_first and self._envelope.with_prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs_json(
                output.prompt_logprobs, self._envelope.token_text
            )
        self._shown.add(piece.index)
        usage = usage_json(output.usage) if self._envelope.with_usage_in_each else None
        return [event(self._envelope.wrap(KIND, [choice], usage))]

    def closing(self, usage: Usage) -> list[bytes]:
        """Usage, if asked for, and [DONE]."""
        return self._envelope.closing(KIND, self._counted(usage))

    def _counted(self, usage: Usage) -> Usage:
        return usage if self._has_answer else replace(usage, completion_tokens=0)

    def _choice(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob], token_ids: Sequence[int],
        finish_reason: str | None, of_prompt: Sequence[TokenLogprob],
    ) -> Json:  # fmt: skip
        if not self._has_answer:  # a token was computed, as the prompt's logits are
            text, logprobs, token_ids = "", (), ()
        is_first = index not in self._shown
        echoed = self._echo is not None and is_first
        if self._echo is not None and is_first:
            text = self._echo.text(index, self._prompt_ids[index]) + text
        shown = None
        if self._envelope.with_logprobs:
            first = self._prompt_ids[index][0] if echoed else None
            shown = self._logprobs(index, first, [*(of_prompt if echoed else ()), *logprobs])
        found = {"index": index, "text": text, "logprobs": shown, "finish_reason": finish_reason}
        if self._envelope.with_token_ids:
            found["token_ids"] = list(token_ids)
        return found

    def _logprobs(self, index: int, first: int | None, items: Sequence[TokenLogprob]) -> Json:
        """first: the prompt's first token where it is shown, which has no probability."""
        text_of = self._envelope.token_text
        ids = [*([] if first is None else [first]), *(item.token_id for item in items)]
        offset, offsets = self._offsets.get(index, 0), []
        for token in ids:
            offsets.append(offset)
            offset += len(text_of(token))
        self._offsets[index] = offset
        top: list[Json | None] = [{token_name(text_of, t)[0]: v for t, v in item.top} for item in items]
        values: list[float | None] = [item.logprob for item in items]
        if first is not None:
            top, values = [None, *top], [None, *values]
        names = [token_name(text_of, token)[0] for token in ids]
        return {"tokens": names, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}
