"""One SGLang engine that plays conversations: `python worker.py ENGINE_JSON TRACE_JSON`, in SGLang's venv.

Reads a line for each round and answers with a line of JSON behind a mark; other lines are SGLang's log.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

MARK = "@turns "


def trace(plan: dict[str, int]) -> list[list[int]]:
    """The prompts of a round in order: groups of conversations, each group's turns in rotation."""
    rng = random.Random(plan["seed"])
    prompts = []
    for _ in range(plan["groups"]):
        talks: list[list[int]] = [[] for _ in range(plan["together"])]
        for _ in range(plan["turns"]):
            for talk in talks:
                talk += [
                    rng.randrange(3, plan["vocabulary"]) for _ in range(rng.randint(*plan["new_tokens"]))
                ]
                prompts.append(list(talk))
    return prompts


def play(engine: Any, prompts: list[list[int]]) -> dict[str, Any]:
    """One round on an empty cache."""
    params = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    first_s, cached, tiers, outputs = [], 0, {"device": 0, "host": 0}, []
    for prompt in prompts:
        start_s, waited = time.perf_counter(), None
        for part in engine.generate(input_ids=prompt, sampling_params=params, stream=True):
            if waited is None:
                waited = time.perf_counter() - start_s
                first_s.append(waited)
            last = part
        cached += last["meta_info"]["cached_tokens"]
        for tier, count in (last["meta_info"].get("cached_tokens_details") or {}).items():
            if tier in tiers:
                tiers[tier] += count or 0
        outputs.append(last["output_ids"])
    return {"first_s": first_s, "cached": cached, "tiers": tiers, "outputs": outputs}


def main() -> None:
    import sglang

    meter = Path(os.environ["TURN_METER"])
    engine = sglang.Engine(**json.loads(sys.argv[1]))
    prompts = trace(json.loads(sys.argv[2]))
    play(engine, prompts[:4])
    engine.flush_cache()
    print(MARK + json.dumps({"tokens": sum(map(len, prompts)), "turns": len(prompts)}), flush=True)
    for _ in sys.stdin:
        result = play(engine, prompts)
        time.sleep(0.2)  # what is under way ends; an engine that is busy does not flush
        meter.unlink(missing_ok=True)
        for _ in range(100):
            if getattr(engine.flush_cache(), "success", True) and meter.exists():
                break
            time.sleep(0.1)
        result["meter"] = json.loads(meter.read_text())
        print(MARK + json.dumps(result), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
