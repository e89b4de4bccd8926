"""vLLM 0.32 with its blocks hashed off the timed thread, as its engine does it: where requests come in.

Its input thread makes the requests, and so hashes; the scheduler's thread, which is what is timed here, finds
the hashes there.
"""

from __future__ import annotations

from typing import Any

from timed import now
from vllm_0_32 import Blocks


class Hashed(Blocks):
    """Requests are made before the clock runs."""

    def timed_turn(self, ids: Any) -> tuple[int, float]:
        """Look up, allocate, free."""
        prompt = list(ids)
        request = self._request(prompt)
        begin = now()
        blocks, num_cached = self._found(request)
        allocated = self.cache.allocate_slots(request, len(prompt) - num_cached, num_cached, blocks)
        assert allocated is not None
        self.cache.free(request)
        return num_cached, now() - begin

    def timed_match(self, ids: Any) -> float:
        """Look up; the last token is always computed anew, so one more is asked for."""
        request = self._request([*ids, 7])
        begin = now()
        _, num_cached = self._found(request)
        seconds = now() - begin
        assert num_cached == len(ids), f"{num_cached} of {len(ids)}"
        return seconds


NAME = "vllm-0.32-hashed"
TREE = Hashed
