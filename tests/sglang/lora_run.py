"""An `sgl.Engine` with adapters, in a process of its own, that does one thing after the other.

python -m tests.sglang.lora_run '{"model_path": ..., "flags": {...}, "acts": [["ask", null], ...]}'

Acts: ask (an adapter's name, or null for none), load (name, folder), unload (name), flush (device and host),
put (a folder's files in another's place). The last line of its output is what they said: [tokens, cached,
details], as JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from tests.sglang.engine_run import ALWAYS, SAMPLING
from tests.sglang.server import CHECKS, ON_CPU
from tests.warm import Forked, program

MODULE = "tests.sglang.lora_run"
PROMPT = list(range(3, 203))


def start(log: Path, **asked: Any) -> Forked:
    """An engine that begins to do `asked`, and writes to `log` and, what it answers, beside it."""
    environment = dict(os.environ) | ON_CPU | CHECKS
    with log.open("wb") as stream, log.with_suffix(".out").open("wb") as out:
        return program(MODULE, [json.dumps(asked)], environment, out.fileno(), stream.fileno())


def answers(process: Forked, log: Path) -> list[tuple[list[int], int, dict[str, Any]]]:
    """What it said, when it has ended well."""
    try:
        status = process.wait(400)
    finally:
        process.kill()
    text = log.read_text(errors="replace")
    assert status == 0 and "leak" not in text, text[-4000:]
    said = json.loads(log.with_suffix(".out").read_text().splitlines()[-1])
    return [(tokens, cached, details or {}) for tokens, cached, details in said]


def main(asked: dict[str, Any]) -> None:
    import sglang

    engine = sglang.Engine(model_path=asked["model_path"], **(ALWAYS | asked["flags"]))
    said = []
    for act, *about in asked["acts"]:
        if act == "load":
            assert engine.load_lora_adapter(*about).success
        elif act == "unload":
            assert engine.unload_lora_adapter(*about).success
        elif act == "flush":
            while not engine.flush_cache().success:  # pages are on their way to storage
                time.sleep(0.1)
        elif act == "put":
            shutil.copytree(*about, dirs_exist_ok=True)
        else:
            told = engine.generate(input_ids=PROMPT, sampling_params=SAMPLING, lora_path=about[0])
            meta = told["meta_info"]
            said.append([told["output_ids"], meta["cached_tokens"], meta.get("cached_tokens_details")])
    engine.shutdown()
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
