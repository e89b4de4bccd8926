"""One request's state, as the scheduler and the prefix cache see it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hiradix.apps.engine.api import SamplingParams, Scope, TokenLogprob, Usage
from hiradix.errors import Misuse

if TYPE_CHECKING:
    from hiradix.apps.engine.logits import LogitsProcessor
    from hiradix.apps.engine.markers import MarkerSearch
    from hiradix.apps.engine.tokenizer import TextStream

_NO_SLOTS = torch.empty(0, dtype=torch.int64)


@dataclass(slots=True)
class RequestState:
    """A running request's slots in the pool of recurrent states.

    slot: its own. source: where its next pass reads. record: has the state behind `record_tokens` tokens.
    """

    slot: int
    source: int
    record: int | None = None
    record_tokens: int = 0

    def take_record(self, num_tokens: int) -> int:
        """Hand over the record of the state behind `num_tokens` tokens."""
        record, self.record = self.record, None
        if record is None or self.record_tokens != num_tokens:
            raise Misuse(f"a record of {num_tokens} tokens is wanted, {record} is of {self.record_tokens}")
        return record


class Request:
    """A request from arrival to its last token.

    Owned by the scheduler's thread. The prefix cache reads the token and slot fields and, inside its own
    calls, rewrites prefix_indices, last_node, cache_protected_len and lock. KV is written for every token
    but the last sampled one: `num_computed` counts the written ones, `num_allocated` the slots in the row
    (whole pages), of which those from `cache_protected_len` on are the request's own. Before `num_slid` its
    own pages have no window pages any more. `state`: what it has of the state pool, where there is one;
    `num_known`: tokens that it shares with others further than there are records of the state.
    """

    def __init__(self, rid: str, prompt_ids: Sequence[int], params: SamplingParams, scope: Scope):
        self.rid = rid
        self.params = params
        self.extra_key = scope.extra_key
        self.cache_salt = scope.cache_salt
        self.priority = scope.priority
        self.session_hint = scope.hint
        self.session_id = scope.session
        self.wishes = scope.wishes
        self.session_name = self.session_stop = ""  # for the eviction policy: what it was of, why it ended
        self.origin_input_ids = array("q", prompt_ids)
        self.output_ids = array("q")
        self.generator: torch.Generator | None = None
        self.text: TextStream | None = None
        self.processor: LogitsProcessor | None = None
        self.tool_call: MarkerSearch | None = None
        self.prompt_logprobs: list[TokenLogprob] = []  # of its second token on, as far as they are known
        self.max_new_tokens = params.max_new_tokens
        self.usage = Usage(prompt_tokens=len(self.origin_input_ids))
        self.num_admissions = 0
        self.num_failed_passes = 0
        self.storage_hit_length = 0
        self.lock: Any = None
        self.leave_row()

    def leave_row(self) -> None:
        """Forget everything that belongs to one admission; the pages and the lock are gone already."""
        self.req_pool_idx: int | None = None
        self.prefix_indices = _NO_SLOTS
        self.last_node: Any = None
        self.last_host_node: Any = None
        self.host_hit_length = 0
        self.cache_protected_len = 0
        self.lock = None
        self.num_computed = 0
        self.num_allocated = 0
        self.num_slid = 0
        self.state: RequestState | None = None
        self.num_known = 0

    @property
    def swa_uuid_for_lock(self) -> Any:
        """The receipt of the lock, under the name that caches with windows know it by."""
        return self.lock

    @swa_uuid_for_lock.setter
    def swa_uuid_for_lock(self, receipt: Any) -> None:
        self.lock = receipt

    @property
    def num_tokens(self) -> int:
        """Tokens known: the prompt and what was sampled."""
        return len(self.origin_input_ids) + len(self.output_ids)

    @property
    def num_uncomputed(self) -> int:
        """Known tokens whose KV is still to be written; 1 means the request is decoding (or nearly)."""
        return self.num_tokens - self.num_computed

    @property
    def num_unscored(self) -> int:
        """Tokens of the prompt whose log probabilities are asked for and not known yet."""
        if self.params.prompt_logprobs is None:
            return 0
        return len(self.origin_input_ids) - 1 - len(self.prompt_logprobs)

    @property
    def fill_ids(self) -> array[int]:
        """The round's tokens, a fresh array: all known ones while waiting, those with KV while running."""
        return self.tokens(0, self.num_tokens if self.req_pool_idx is None else self.num_computed)

    def tokens(self, start: int, end: int) -> array[int]:
        """Known tokens [start, end), a fresh array; costs what it returns."""
        num_prompt = len(self.origin_input_ids)
        if start >= num_prompt:
            return self.output_ids[start - num_prompt : end - num_prompt]
        return self.origin_input_ids[start:end] + self.output_ids[: max(0, end - num_prompt)]

    def take_record(self, num_tokens: int) -> int:
        """The record of the state behind its first `num_tokens` tokens, the caller's from here on."""
        if self.state is None:
            raise Misuse(f"request {self.rid} has no state")
        return self.state.take_record(num_tokens)

    def pop_committed_kv_cache(self) -> int:
        """Number of leading tokens whose KV is written."""
        return self.num_computed
