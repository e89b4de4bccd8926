"""A process that does as it is told: a line of JSON in, a line of JSON out behind `MARK`.

The test's end is `Puppet`; inside of the process `obey` runs, over an object whose methods can be asked for.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from tests.warm import Forked, program

MARK = "@@"
ROOT = Path(__file__).resolve().parents[1]
START_S, ANSWER_S = 400.0, 400.0


class Puppet:
    """A process of `module`, which is given `setup` as its one argument.

    environment: what it has in its environment, before `env`. is_warm: it is forked from a process that has
    imported what is needed (`tests.warm`), else it is a new interpreter.
    """

    module = ""
    environment: Mapping[str, str] = {}
    is_warm = False

    def __init__(self, setup: dict[str, Any], log: Path, env: Mapping[str, str] | None = None) -> None:
        self._log_path = log
        self._log = log.open("wb")
        asked, self._asked = os.pipe()
        self._answers, answers = os.pipe()
        environment = {**os.environ, **self.environment, **(env or {})}
        self.process = self._spawn(json.dumps(setup), environment, asked, answers)
        os.close(asked)
        os.close(answers)
        self._is_ready = False
        self._rest = b""

    def _spawn(
        self, setup: str, environment: dict[str, str], stdin: int, stdout: int
    ) -> subprocess.Popen[bytes] | Forked:
        log = self._log.fileno()
        if self.is_warm:
            return program(self.module, [setup], environment, stdout, log, stdin)
        command = [sys.executable, "-m", self.module, setup]
        return subprocess.Popen(command, cwd=ROOT, stdin=stdin, stdout=stdout, stderr=log, env=environment)

    def wait(self) -> Self:
        """Until it is ready."""
        if not self._is_ready:
            assert self.answer(START_S) == "ready"
            self._is_ready = True
        return self

    def ask(self, do: str, **arguments: Any) -> Any:
        """What the method `do` returns."""
        self.tell(do, **arguments)
        return self.answer()

    def tell(self, do: str, **arguments: Any) -> None:
        """Have it do something; `answer` waits for what comes of it."""
        self.wait()
        with open(self._asked, "wb", closefd=False) as pipe:
            pipe.write(json.dumps({"do": do, **arguments}).encode() + b"\n")

    def stop(self) -> None:
        """Let it end in order; one that does not is killed."""
        try:
            if self.process.poll() is None:
                self.ask("stop")
        finally:
            self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)
        if not self._log.closed:
            os.close(self._asked)
            os.close(self._answers)
            self._log.close()

    def log(self) -> str:
        return self._log_path.read_text(errors="replace")[-4000:]

    def answer(self, timeout_s: float = ANSWER_S) -> Any:
        """The next line that it says."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while True:
                line, newline, rest = self._rest.partition(b"\n")
                if newline:
                    self._rest = rest
                    if line.startswith(MARK.encode()):
                        return json.loads(line[len(MARK) :])
                    continue
                assert selector.select(timeout_s), f"no answer in {timeout_s} s:\n{self.log()}"
                data = os.read(self._answers, 1 << 20)
                assert data, f"{self.module} ended:\n{self.log()}"
                self._rest += data


def obey(master: Any) -> None:
    """Inside of the process: call the methods of `master` that are asked for, until nobody asks any more."""
    print(MARK, json.dumps("ready"), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(MARK, json.dumps(getattr(master, asked.pop("do"))(**asked)), flush=True)
