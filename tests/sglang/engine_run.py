"""An `sgl.Engine` in a process of its own, as it ends all children of the process it is in.

python -m tests.sglang.engine_run '{"model_path": ..., "prompts": [[...], ...], "rounds": 2, "flags": {...}}'

The last line of its output is the answers of each round: [tokens, cached, details], as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.sglang.install import python
from tests.sglang.server import CHECKS, ON_CPU

ALWAYS = {
    "device": "cpu", "attention_backend": "torch_native", "dtype": "float32", "disable_cuda_graph": True,
    "skip_server_warmup": True, "log_level": "warning", "context_length": 2048, "mem_fraction_static": 0.4,
    "enable_cache_report": True,
}  # fmt: skip
SAMPLING = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


def run(environment: dict[str, str], **asked: Any) -> list[list[tuple[list[int], int, dict[str, Any]]]]:
    """The rounds of answers of an Engine in another process. environment: to begin with."""
    command = [str(python()), "-m", "tests.sglang.engine_run", json.dumps(asked)]
    done = subprocess.run(
        command, env=environment | ON_CPU | CHECKS, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "leak" not in done.stderr, done.stderr[-4000:]
    rounds = json.loads(done.stdout.splitlines()[-1])
    return [[(tokens, cached, details or {}) for tokens, cached, details in answers] for answers in rounds]


def main(asked: dict[str, Any]) -> None:
    import sglang

    engine = sglang.Engine(model_path=asked["model_path"], **(ALWAYS | asked["flags"]))
    rounds = []
    for _ in range(asked["rounds"]):
        answers = []
        for prompt in asked["prompts"]:
            told = engine.generate(input_ids=prompt, sampling_params=SAMPLING)
            meta = told["meta_info"]
            answers.append([told["output_ids"], meta["cached_tokens"], meta.get("cached_tokens_details")])
        rounds.append(answers)
    engine.shutdown()
    print(json.dumps(rounds), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
