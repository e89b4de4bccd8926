"""A process with one system in it, which does what it is told: a JSON order per line, an answer per line.

python worker.py NAME
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from direct import ALL
from systems import System

_spinning = False


def spin() -> None:
    """A scheduler that never waits: pure Python, so it wants the interpreter lock all the time."""
    number = 0
    while _spinning:
        number += 1


def measured(system: System, order: dict[str, Any]) -> float:
    """Seconds of one call, with a spinning thread beside it if asked for.

    clock "thread": this thread's processor time, the kernel's for it included.
    """
    global _spinning
    clock = time.thread_time if order.get("clock") == "thread" else time.perf_counter
    call = getattr(system, order["call"])
    thread = threading.Thread(target=spin)
    if order.get("spin"):
        _spinning = True
        thread.start()
    repeat = order.get("repeat", 1)
    begin = clock()
    for _ in range(repeat):
        call()
    taken = (clock() - begin) / repeat
    if order.get("spin"):
        _spinning = False
        thread.join()
    return taken


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a peer prints goes to the log
    system: System | None = None
    for line in sys.stdin:
        order = json.loads(line)
        answer: Any = None
        try:
            if order["do"] == "open":
                if system is not None:
                    system.close()
                options = order.get("options", {})
                made = ALL[sys.argv[1]]
                system = made(Path(order["folder"]), order["num_pages"], order["page_bytes"], options)
            elif order["do"] == "choose":
                system.choose(order["scattered"], order["limit"])  # type: ignore[union-attr]
            elif order["do"] == "files":
                answer = [str(path) for path in system.files()]  # type: ignore[union-attr]
            elif order["do"] == "spans":
                answer = system.spans()  # type: ignore[union-attr]
            elif order["do"] == "huge share":
                answer = system.pool.huge_share()  # type: ignore[union-attr]
            elif order["do"] == "read where":
                system.to_read = order["spans"]  # type: ignore[union-attr]
            else:
                answer = measured(system, order)  # type: ignore[arg-type]
            reply = {"answer": answer}
        except Exception as error:  # the benchmark says which system failed, and how
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    main()
