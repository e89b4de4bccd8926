"""Picks the next token of each sequence from its logits, and the log probabilities a caller asked for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hiradix.apps.engine.api import SamplingParams, TokenLogprob
from hiradix.errors import Misuse

GREEDY_BELOW = 1e-5
"""A temperature under which the best token is all there is, and logits over it are no numbers any more."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row is sampled; `generator` (on the logits' device) is needed when temperature > 0."""

    params: SamplingParams
    generator: torch.Generator | None


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
    """One token per row of logits float32 [B, vocab]; its logprob is nan where none was asked for."""
    if logits.shape[0] != len(draws):
        raise Misuse(f"logits of {tuple(logits.shape)} for {len(draws)} draws")
    chosen = logits.argmax(dim=-1).tolist()
    for row, draw in enumerate(draws):
        if draw.generator is not None:
            chosen[row] = _draw(logits[row], draw.params, draw.generator)
    return [_with_logprob(logits[row], token, draws[row].params.logprobs) for row, token in enumerate(chosen)]


def _draw(logits: torch.Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    """A token from the tempered distribution, cut to the smallest set of mass >= top_p."""
    probs = torch.softmax(logits / params.temperature, dim=-1)
    if params.top_p >= 1.0:
        return int(torch.multinomial(probs, 1, generator=generator))
    ordered, tokens = probs.sort(descending=True, stable=True)
    before = ordered.cumsum(0) - ordered
    dropped = before >= params.top_p
    dropped[0] = False  # a top_p that float32 takes for 0 would leave nothing to draw from
    kept = ordered.masked_fill_(dropped, 0.0)
    return int(tokens[torch.multinomial(kept, 1, generator=generator)])


def _with_logprob(logits: torch.Tensor, token: int, num_top: int | None) -> TokenLogprob:
    if num_top is None:
        return TokenLogprob(token, float("nan"))
    logprobs = torch.log_softmax(logits, dim=-1)
    values, tokens = logprobs.topk(min(num_top, len(logprobs)))
    top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs[token]), top)
