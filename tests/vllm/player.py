"""The test's end of `play`: starts the process, asks it, and judges answers by the identity rule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.identity import FIRST_LOGPROBS
from tests.identity import judged_by_logprobs as judge
from tests.puppet import Puppet
from tests.warm import FORKS

KV_BYTES = 1 << 28  # all of it is touched, and several engines run at once
FORKS.set_forkserver_preload(["tests.vllm.warm_imports"])
Answers = list[dict[str, Any]]


class Player(Puppet):
    """A vLLM process. connector: our extra config, another connector's whole config, or None."""

    module = "tests.vllm.play"

    def __init__(
        self, model: Path, connector: dict[str, Any] | None, log: Path, env: dict[str, str] | None = None,
        **engine: Any,
    ) -> None:  # fmt: skip
        defaults = {
            "model": str(model), "dtype": "float32", "max_model_len": 2048, "enforce_eager": True,
            "max_num_seqs": 16, "block_size": 32, "enable_prefix_caching": False,
            "kv_cache_memory_bytes": KV_BYTES,
        }  # fmt: skip
        super().__init__({"engine": defaults | engine, "connector": connector}, log, env)

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int = 8, **how: Any) -> Answers:
        """how: `salt`, or `lora` with what names an adapter."""
        answers: Answers = self.ask("generate", prompts=prompts, max_tokens=max_tokens, **how)
        return answers

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.ask("state")
        return state

    def settle(self) -> None:
        """Until what was asked so far is on the host and in storage."""
        self.ask("settle")


class WarmPlayer(Player):
    """A Player whose process is forked from one that has imported vLLM."""

    is_warm = True


def assert_same(expected: Answers, got: Answers) -> None:
    """Tokens by the identity rule, and the first token's log probabilities."""
    judge(expected, got).assert_holds()
    for want, have in zip(expected, got, strict=True):
        for token, logprob in want["logprobs"][0].items():
            if token in have["logprobs"][0]:
                assert abs(have["logprobs"][0][token] - logprob) < FIRST_LOGPROBS


def cached(answers: Answers) -> int:
    return sum(answer["cached"] or 0 for answer in answers)
