"""An `sgl.Engine` in a process of its own, as it ends all children of the process it is in.

python -m tests.sglang.engine_run '{"model_path": ..., "prompts": [[...], ...], "rounds": 2, "flags": {...}}'

With "at_once": 10 ten prompts are sent together. With "files": [folder, count] it ends when so many are there.

The last line of its output is the answers of each round: [tokens, cached, details], as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.sglang.install import python
from tests.sglang.server import CHECKS, ON_CPU
from tests.warm import Forked, program

MODULE = "tests.sglang.engine_run"

ALWAYS = {
    "device": "cpu", "attention_backend": "torch_native", "dtype": "float32", "disable_cuda_graph": True,
    "skip_server_warmup": True, "log_level": "warning", "context_length": 2048, "mem_fraction_static": 0.4,
    "enable_cache_report": True,
}  # fmt: skip
SAMPLING = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


def run(
    folder: Path, packages: Path | None = None, **asked: Any
) -> list[list[tuple[list[int], int, dict[str, Any]]]]:
    """The rounds of answers of an Engine in another process, which writes into `folder`.

    packages: a folder that comes before all others on its path; without one it is forked from warm imports.
    """
    environment = dict(os.environ) | ON_CPU | CHECKS
    arguments = [json.dumps(asked)]
    with (folder / "out").open("wb") as out, (folder / "log").open("wb") as log:
        process: subprocess.Popen[bytes] | Forked
        if packages is None:
            process = program(MODULE, arguments, environment, out.fileno(), log.fileno())
        else:
            environment |= {"PYTHONPATH": str(packages), "TRITON_INTERPRET": "1"}
            command = [str(python()), "-m", MODULE, *arguments]
            process = subprocess.Popen(command, env=environment, stdout=out, stderr=log)
    try:
        status = process.wait(400)
    finally:
        process.kill()
    text = (folder / "log").read_text(errors="replace")
    assert status == 0 and "leak" not in text, text[-4000:]
    rounds = json.loads((folder / "out").read_text().splitlines()[-1])
    return [[(tokens, cached, details or {}) for tokens, cached, details in answers] for answers in rounds]


def main(asked: dict[str, Any]) -> None:
    import sglang

    engine = sglang.Engine(model_path=asked["model_path"], **(ALWAYS | asked["flags"]))
    rounds, prompts, at_once = [], asked["prompts"], asked.get("at_once", 1)
    for _ in range(asked["rounds"]):
        answers = []
        for first in range(0, len(prompts), at_once):
            for told in engine.generate(input_ids=prompts[first : first + at_once], sampling_params=SAMPLING):
                meta = told["meta_info"]
                answers.append([told["output_ids"], meta["cached_tokens"], meta.get("cached_tokens_details")])
        rounds.append(answers)
    if "files" in asked:
        folder, count = asked["files"]
        deadline = time.monotonic() + 120
        while sum(path.is_file() for path in Path(folder).rglob("*")) < count and time.monotonic() < deadline:
            time.sleep(0.1)
    engine.shutdown()
    print(json.dumps(rounds), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
