"""vLLM in a process, as the ladder asks it: `python -m tests.ladder.vllm_play SETUP`, as of tests.vllm.play."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.ladder import planted, store
from tests.ladder.climb import ABORT_STEPS, TIERS
from tests.puppet import obey
from tests.vllm.play import FIRST, Play


class LadderPlay(Play):
    """`setup` has `fault`, the file that says which fault is planted, beside what Play's has."""

    def __init__(self, setup: dict[str, Any]) -> None:
        store.register()
        planted.plant(Path(setup["fault"]))
        self.has_connector = setup["connector"] is not None
        super().__init__(setup)

    def answer(self, prompts: list[list[int]], max_tokens: int) -> Any:
        """Steps of one prompt each, so that they are the same wherever it begins. What vLLM's own prefix cache
        had is the device's, what of the connector's hits had to be read first storage's."""
        return [self._alone(prompt, max_tokens) for prompt in prompts]

    def _alone(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        before = self._figures()
        (answer,) = self.generate([prompt], max_tokens)
        hit, read = (after - own for after, own in zip(self._figures(), before, strict=True))
        read = min(hit, read)
        device = (answer.pop("cached") or 0) - hit
        return {**answer, "device": device, "host": hit - read, "storage": read}

    def _figures(self) -> tuple[int, int]:
        """Tokens that the connector has been asked for and had, and those that storage had to be read for."""
        if not self.has_connector:
            return 0, 0
        state = self.state()
        return state["hit_tokens"], state["fetch_read"] * self._scheduler.connector.scheduler.index.page_size

    def crowd(self, prompts: list[list[int]], max_tokens: int, keep: int) -> Any:
        """All at once; all but every `keep`-th are aborted. The kept answers by number."""
        kept = self.storm(prompts, max_tokens, keep, ABORT_STEPS)
        for answer in kept.values():
            answer |= dict.fromkeys(TIERS, 0) | {"device": answer.pop("cached") or 0}
        return kept

    def preempted(self) -> Any:
        return self.preemptions


def main() -> None:
    for name, value in FIRST.items():
        os.environ.setdefault(name, value)
    obey(LadderPlay(json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
