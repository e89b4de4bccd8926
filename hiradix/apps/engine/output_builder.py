"""Turns logits into answers: sampling, text, stop conditions, and the Output records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from hiradix.apps.engine.api import FINISH_LENGTH, FINISH_STOP, Output, TokenLogprob
from hiradix.apps.engine.request import Request
from hiradix.apps.engine.sampler import Draw, SeedSource, sample
from hiradix.apps.engine.tokenizer import TextStream, Tokenizer


class OutputBuilder:
    """Grows every request's answer by one token at a time."""

    def __init__(
        self, end_token_ids: frozenset[int], tokenizer: Tokenizer | None, seed: int, device: torch.device
    ):
        self._end_token_ids = end_token_ids
        self._tokenizer = tokenizer
        self._seeds = SeedSource(seed, device)

    def begin(self, request: Request) -> None:
        """Prepare a new request's random numbers and text."""
        request.generator = self._seeds.generator(request.params)
        if self._tokenizer is not None:
            request.text = TextStream(self._tokenizer, request.params.stop)

    def extend(self, requests: Sequence[Request], logits: torch.Tensor) -> list[Output]:
        """Sample one token for each request from logits float32 [len(requests), vocab] and add it."""
        draws = [Draw(request.params, request.generator) for request in requests]
        return [self._extend(r, token) for r, token in zip(requests, sample(logits, draws), strict=True)]

    def end(self, request: Request, reason: str, error: str | None = None) -> Output:
        """The last Output of a request that ends without a new token."""
        text = request.text.finish() if request.text is not None else ""
        return Output(request.rid, (), request.usage, text=text, finish_reason=reason, error=error)

    def _extend(self, request: Request, drawn: TokenLogprob) -> Output:
        token, params = drawn.token_id, request.params
        request.output_ids.append(token)
        request.usage = replace(request.usage, completion_tokens=len(request.output_ids))
        is_end = token in params.stop_token_ids or (not params.ignore_eos and token in self._end_token_ids)
        text, reason = "", None
        if request.text is not None and not is_end:
            text = request.text.push(token)
        if is_end or (request.text is not None and request.text.stopped):
            reason = FINISH_STOP
        elif len(request.output_ids) >= request.max_new_tokens:
            reason = FINISH_LENGTH
        if reason is not None and request.text is not None:
            text += request.text.finish()
            if request.text.stopped:
                reason = FINISH_STOP
        logprobs = () if params.logprobs is None else (drawn,)
        return Output(request.rid, (token,), request.usage, text, logprobs, reason)
