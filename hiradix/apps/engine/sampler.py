"""Picks the next token of each sequence from its logits, and the log probabilities a caller asked for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hiradix.apps.engine.api import SamplingParams, TokenLogprob
from hiradix.apps.engine.logits import LogitsProcessor
from hiradix.errors import Misuse

GREEDY_BELOW = 1e-5
"""A temperature under which the best token is all there is, and logits over it are no numbers any more."""


@dataclass(frozen=True, slots=True)
class Draw:
    """The sampling of one row; `generator` (on the logits' device) is needed when temperature > 0.

    processor: changes the row before, None for a request that asks for nothing of the kind.
    """

    params: SamplingParams
    generator: torch.Generator | None
    processor: LogitsProcessor | None = None


class SeedSource:
    """Generators for requests: by their own seed, or else from one seeded stream in arrival order."""

    def __init__(self, seed: int, device: torch.device):
        self._random = random.Random(seed)
        self._device = device

    def generator(self, params: SamplingParams) -> torch.Generator | None:
        """A fresh generator for a request that samples, None for a greedy one."""
        if params.temperature < GREEDY_BELOW:
            return None
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        return torch.Generator(self._device).manual_seed(seed)


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[TokenLogprob]:
    """One token per row of logits float32 [B, vocab]. Its logprob is that of the row as it came, before it was
    changed; nan where none was asked for."""
    if logits.shape[0] != len(draws):
        raise Misuse(f"logits of {tuple(logits.shape)} for {len(draws)} draws")
    chosen = logits.argmax(dim=-1).tolist()
    for row, draw in enumerate(draws):
        if draw.processor is None and draw.generator is None:
            continue
        own = logits[row] if draw.processor is None else draw.processor.apply(logits[row])
        if draw.generator is None:
            chosen[row] = int(own.argmax())
        else:
            chosen[row] = _draw(own, draw.params, draw.generator)
    return [_with_logprob(logits[row], token, draws[row].params.logprobs) for row, token in enumerate(chosen)]


def _draw(logits: torch.Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    """A token from the tempered distribution: of those with min_p of the likeliest's probability, the top_k
    likeliest, cut to the smallest set that has top_p of their mass."""
    probs = torch.softmax(logits / params.temperature, dim=-1)
    if params.min_p > 0.0:
        probs = probs.masked_fill(probs < params.min_p * probs.max(), 0.0)
    if 0 < params.top_k < len(probs):
        kept, tokens = probs.topk(params.top_k)
        probs = torch.zeros_like(probs).scatter_(0, tokens, kept)
    if params.min_p > 0.0 or params.top_k > 0:
        probs = probs / probs.sum()
    if params.top_p >= 1.0:
        return int(torch.multinomial(probs, 1, generator=generator))
    ordered, tokens = probs.sort(descending=True, stable=True)
    before = ordered.cumsum(0) - ordered
    dropped = before >= params.top_p
    dropped[0] = False  # a top_p that float32 takes for 0 would leave nothing to draw from
    kept = ordered.masked_fill_(dropped, 0.0)
    return int(tokens[torch.multinomial(kept, 1, generator=generator)])


SCORED_ROWS = 64
"""Rows whose log probabilities are there at one time: each has the size of the vocabulary."""


def score(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """The log probability and rank of each token under its row of logits float32 [len(token_ids), vocab]."""
    if logits.shape[0] != len(token_ids):
        raise Misuse(f"logits of {tuple(logits.shape)} for {len(token_ids)} tokens")
    found: list[TokenLogprob] = []
    for start in range(0, len(token_ids), SCORED_ROWS):
        logprobs = torch.log_softmax(logits[start : start + SCORED_ROWS], dim=-1)
        ids = torch.tensor(token_ids[start : start + SCORED_ROWS], device=logits.device)
        own = logprobs.gather(1, ids[:, None])
        ranks = (logprobs > own).sum(dim=1) + 1
        values, tokens = logprobs.topk(min(num_top, logprobs.shape[1]), dim=-1)
        rows = (ids.tolist(), own[:, 0].tolist(), tokens.tolist(), values.tolist(), ranks.tolist())
        for token, logprob, top, top_values, rank in zip(*rows, strict=True):
            found.append(TokenLogprob(token, logprob, tuple(zip(top, top_values, strict=True)), rank))
    return found


def _with_logprob(logits: torch.Tensor, token: int, num_top: int | None) -> TokenLogprob:
    if num_top is None:
        return TokenLogprob(token, float("nan"))
    logprobs = torch.log_softmax(logits, dim=-1)
    values, tokens = logprobs.topk(min(num_top, len(logprobs)))
    top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs[token]), top)
