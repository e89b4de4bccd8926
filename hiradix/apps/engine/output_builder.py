"""Turns logits into answers: sampling, text, stop conditions, and the Output records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from hiradix.apps.engine.api import (
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_STOP,
    FINISH_TOOL,
    Output,
    TokenLogprob,
)
from hiradix.apps.engine.grammar import Grammars
from hiradix.apps.engine.logits import LogitsProcessor, changes_logits
from hiradix.apps.engine.markers import MarkerSearch
from hiradix.apps.engine.request import Request
from hiradix.apps.engine.sampler import Draw, SeedSource, sample, score
from hiradix.apps.engine.tokenizer import TextStream, Tokenizer


class OutputBuilder:
    """Grows every request's answer by one token at a time. Of ranks, all have the same logits and do the same.

    grammars: None where there is no tokenizer.
    """

    def __init__(
        self,
        end_token_ids: frozenset[int],
        tokenizer: Tokenizer | None,
        grammars: Grammars | None,
        seed: int,
        device: torch.device,
    ):
        self._end_token_ids = end_token_ids
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._seeds = SeedSource(seed, device)

    def begin(self, request: Request) -> None:
        """Prepare a new request's random numbers, text and changes of logits. RequestError for a bad grammar."""
        params = request.params
        if changes_logits(params):
            matcher = None
            if params.grammar is not None and self._grammars is not None:
                matcher = self._grammars.matcher(params.grammar)
            ends = {*params.stop_token_ids, *(() if params.ignore_eos else self._end_token_ids)}
            request.processor = LogitsProcessor(params, request.origin_input_ids, ends, matcher)
        request.generator = self._seeds.generator(params)
        if params.tool_markers:
            request.tool_call = MarkerSearch(params.tool_markers)
        if self._tokenizer is not None:
            request.text = TextStream(
                self._tokenizer,
                params.stop,
                includes_stop=params.include_stop_str_in_output,
                shows_special=not params.skip_special_tokens,
            )

    def score_prompt(self, request: Request, logits: torch.Tensor, num_computed: int) -> None:
        """Book the log probabilities of a prompt's next tokens. The last rows of `logits` float32 [rows, vocab]
        are of the request's tokens up to `num_computed`, of all that have not been booked."""
        prompt, known = request.origin_input_ids, len(request.prompt_logprobs)
        targets = prompt[known + 1 : num_computed + 1].tolist()
        if not targets:
            return
        first = logits.shape[0] - (num_computed - known)
        num_top = request.params.prompt_logprobs or 0
        request.prompt_logprobs += score(logits[first : first + len(targets)], targets, num_top)

    def extend(self, requests: Sequence[Request], logits: torch.Tensor) -> list[Output]:
        """Sample one token for each request from logits float32 [len(requests), vocab] and add it."""
        draws = [Draw(r.params, r.generator, r.processor) for r in requests]
        return [self._extend(r, token) for r, token in zip(requests, sample(logits, draws), strict=True)]

    def end(self, request: Request, reason: str, error: str | None = None) -> Output:
        """The last Output of a request that ends without a new token."""
        text = request.text.finish() if request.text is not None else ""
        return Output(request.rid, (), request.usage, text=text, finish_reason=reason, error=error)

    def _extend(self, request: Request, drawn: TokenLogprob) -> Output:
        token, params = drawn.token_id, request.params
        is_complete = False
        if request.processor is not None:
            request.processor.accept(token)
            if (failure := request.processor.failure) is not None:
                return self.end(request, FINISH_ERROR, failure)
            is_complete = request.processor.is_complete
        request.output_ids.append(token)
        request.usage = replace(request.usage, completion_tokens=len(request.output_ids))
        may_stop = len(request.output_ids) > params.min_new_tokens
        is_end = token in params.stop_token_ids or (not params.ignore_eos and token in self._end_token_ids)
        is_end = is_end and may_stop
        text, reason = "", None
        if request.text is not None and (not is_end or params.include_stop_str_in_output):
            text = request.text.push(token, may_stop=may_stop)
        if is_end or is_complete or (request.text is not None and request.text.stopped):
            reason = FINISH_STOP
        elif len(request.output_ids) >= request.max_new_tokens:
            reason = FINISH_LENGTH
        if reason is not None and request.text is not None:
            text += request.text.finish()
            if request.text.stopped:
                reason = FINISH_STOP
        if request.tool_call is not None:
            request.tool_call.push(text)
            if reason == FINISH_STOP and request.tool_call.found:
                reason = FINISH_TOOL
        logprobs = () if params.logprobs is None else (drawn,)
        of_prompt = tuple(request.prompt_logprobs) if len(request.output_ids) == 1 else ()
        matched = request.text.matched if request.text is not None else None
        return Output(
            request.rid, (token,), request.usage, text, logprobs, reason,
            prompt_logprobs=of_prompt, matched_stop=matched,
        )  # fmt: skip
