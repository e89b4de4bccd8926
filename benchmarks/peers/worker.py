"""One peer in a process of its own: reads orders as lines of JSON, answers each with a line.

    python worker.py sglang_0_5_9
    {"do": "prepare", "kind": "match", "bare": false, "options": {"page": 64, ...}}    -> {}
    {"do": "measure"}                                                                  -> {"us": 74.9}
    {"do": "begin"}                                a round that is measured in parts   -> {}
    {"do": "some", "count": 50}                    CPU seconds of its next turns       -> {"seconds": 0.004}
    {"do": "close"}                                                                    -> {}

An order that fails is answered with {"error": ...}. Whatever a peer prints goes to stderr.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
from itertools import islice
from typing import Any


def answer(peer: Any, order: dict[str, Any], running: dict[str, Any]) -> dict[str, Any]:
    """Do one order. running: the case that is prepared."""
    from cases import CASES

    if order["do"] == "prepare":
        adapter, case = CASES[order["kind"]]
        make = getattr(peer, "BARE" if order["bare"] else adapter)
        running["case"] = case(make, **order["options"])
        return {}
    if order["do"] == "begin":
        running["costs"] = running["case"].costs()
        return {}
    if order["do"] == "some":
        return {"seconds": sum(islice(running["costs"], order["count"]))}
    return dict(running["case"].measure())


def serve(peer: Any, first: str, answers: Any) -> None:
    """One case, from its `prepare` to its `close`."""
    running: dict[str, Any] = {}
    line = first
    while line:
        order = json.loads(line)
        if order["do"] == "close":
            print("{}", file=answers)
            return
        try:
            reply = answer(peer, order, running)
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(reply), file=answers)
        line = sys.stdin.readline()


def main() -> None:
    """Each case in a forked child: it starts clean, and what it leaves behind ends with it."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    peer = importlib.import_module(sys.argv[1])
    importlib.import_module("cases")
    gc.collect()
    gc.freeze()
    print(json.dumps({"name": peer.NAME}), file=answers)
    while line := sys.stdin.readline():
        child = os.fork()
        if child == 0:
            serve(peer, line, answers)
            os._exit(0)
        os.waitpid(child, 0)
    os._exit(0)


if __name__ == "__main__":
    main()
