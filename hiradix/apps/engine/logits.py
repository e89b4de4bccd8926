"""Changes one request's logits before a token is drawn: bias, penalties, a grammar, no end too early.

Each rank of a model that is cut over processes has the same logits and the same tokens, and so changes alike.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from hiradix.apps.engine.api import SamplingParams

if TYPE_CHECKING:
    from hiradix.apps.engine.grammar import Matcher


class LogitsProcessor:
    """The logits processor of one request, told of each of its tokens; lives as long as the request,
    retracted or not.

    end_token_ids: what ends its answer, forbidden before `min_new_tokens`. Penalties cost two numbers a token of
    the vocabulary, kept from the first answer on.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        end_token_ids: Collection[int],
        matcher: Matcher | None,
    ):
        self._params = params
        self._prompt_ids = prompt_ids
        self._ends = sorted(end_token_ids) if params.min_new_tokens else []
        self._matcher = matcher
        self._num_drawn = 0
        self._biases: tuple[torch.Tensor, torch.Tensor] | None = None  # token ids, and what is added to each
        self._penalties: _Penalties | None = None

    @property
    def failure(self) -> str | None:
        """The reason why the answer's grammar can be followed no further; None while it can."""
        return None if self._matcher is None else self._matcher.failure

    @property
    def is_complete(self) -> bool:
        """Whether the answer is all that its grammar allows."""
        return self._matcher is not None and self._matcher.is_complete

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """float32 [vocab], changed; `logits` stays as it is."""
        logits = logits.clone()
        if self._params.logit_bias:
            if self._biases is None:
                tokens, biases = zip(*self._params.logit_bias, strict=True)
                self._biases = torch.tensor(tokens, device=logits.device), logits.new_tensor(biases)
            logits.index_add_(0, *self._biases)
        if _has_penalties(self._params):
            if self._penalties is None:
                self._penalties = _Penalties(self._params, self._prompt_ids, logits)
            self._penalties.apply(logits)
        if self._matcher is not None:
            self._matcher.mask(logits)
        if self._num_drawn < self._params.min_new_tokens:
            self._forbid_ends(logits)
        return logits

    def _forbid_ends(self, logits: torch.Tensor) -> None:
        kept = logits[self._ends]
        logits[self._ends] = -torch.inf
        if self._matcher is not None and bool(logits.isneginf().all()):
            logits[self._ends] = kept  # the grammar has come to its end

    def accept(self, token_id: int) -> None:
        """A token was drawn."""
        self._num_drawn += 1
        if self._penalties is not None:
            self._penalties.count(token_id)
        if self._matcher is not None:
            self._matcher.accept(token_id)


class _Penalties:
    """The tokens that one request has had, and how often each occurs in its answer."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], logits: torch.Tensor):
        self._params = params
        self._seen = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
        self._seen[torch.tensor(list(prompt_ids), device=logits.device)] = True
        self._counts = torch.zeros(len(logits), device=logits.device)

    def count(self, token_id: int) -> None:
        self._seen[token_id] = True
        self._counts[token_id] += 1

    def apply(self, logits: torch.Tensor) -> None:
        """In place: a token that is there is less likely by a factor, by a number, or by one for each time."""
        params = self._params
        if params.repetition_penalty != 1.0:
            factor = params.repetition_penalty
            less = torch.where(logits > 0, logits / factor, logits * factor)
            logits.copy_(torch.where(self._seen, less, logits))
        logits -= params.frequency_penalty * self._counts
        logits -= params.presence_penalty * (self._counts > 0)


def _has_penalties(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty) or params.repetition_penalty != 1.0


def changes_logits(params: SamplingParams) -> bool:
    """Whether a request needs a `LogitsProcessor`."""
    return _has_penalties(params) or bool(params.logit_bias or params.min_new_tokens or params.grammar)
