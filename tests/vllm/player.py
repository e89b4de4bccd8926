"""The test's end of `play`: starts the process, asks it, and judges answers by the identity rule."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.identity import Identity, first_difference
from tests.vllm.play import MARK
from tests.warm import FORKS, Forked, program

ROOT = Path(__file__).resolve().parents[2]
START_S, ANSWER_S = 400.0, 400.0
KV_BYTES = 1 << 28  # all of it is touched, and several engines run at once
FIRST_LOGPROBS = 1e-4  # the first token's log probabilities: nothing but rounding lies between the two
FORKS.set_forkserver_preload(["tests.vllm.warm_imports"])
Answers = list[dict[str, Any]]


class Player:
    """A vLLM process. connector: our extra config, another connector's whole config, or None.

    module: what runs as the process. environment: what it has in its environment, before `env`.
    """

    module = "tests.vllm.play"
    environment: Mapping[str, str] = {}

    def __init__(
        self, model: Path, connector: dict[str, Any] | None, log: Path, env: dict[str, str] | None = None,
        **engine: Any,
    ) -> None:  # fmt: skip
        defaults = {
            "model": str(model), "dtype": "float32", "max_model_len": 2048, "enforce_eager": True,
            "max_num_seqs": 16, "block_size": 32, "enable_prefix_caching": False,
            "kv_cache_memory_bytes": KV_BYTES,
        }  # fmt: skip
        setup = {"engine": defaults | engine, "connector": connector}
        self._log_path = log
        self._log = log.open("wb")
        asked, self._asked = os.pipe()
        self._answers, answers = os.pipe()
        environment = {**os.environ, **self.environment, **(env or {})}
        self.process = self._spawn(json.dumps(setup), environment, asked, answers, self._log.fileno())
        os.close(asked)
        os.close(answers)
        self._is_ready = False
        self._rest = b""

    def _spawn(
        self, setup: str, environment: dict[str, str], stdin: int, stdout: int, stderr: int
    ) -> subprocess.Popen[bytes] | Forked:
        command = [sys.executable, "-m", self.module, setup]
        return subprocess.Popen(command, cwd=ROOT, stdin=stdin, stdout=stdout, stderr=stderr, env=environment)

    def wait(self) -> Player:
        """Until the engine is up."""
        if not self._is_ready:
            assert self._answer(START_S) == "ready"
            self._is_ready = True
        return self

    def ask(self, do: str, **arguments: Any) -> Any:
        self.wait()
        with open(self._asked, "wb", closefd=False) as pipe:
            pipe.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        return self._answer(ANSWER_S)

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

    def stop(self) -> None:
        """Shut down in order, as vLLM would."""
        if self.process.poll() is None:
            self.ask("stop")
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

    def _answer(self, timeout_s: float) -> Any:
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
                assert data, f"vLLM ended:\n{self.log()}"
                self._rest += data


class WarmPlayer(Player):
    """A Player whose process is forked from one that has imported vLLM."""

    def _spawn(
        self, setup: str, environment: dict[str, str], stdin: int, stdout: int, stderr: int
    ) -> subprocess.Popen[bytes] | Forked:
        return program(self.module, [setup], environment, stdout, stderr, stdin)


def judge(expected: Answers, got: Answers) -> Identity:
    """Each answer held against the one without a connector."""
    identity = Identity()
    for number, (want, have) in enumerate(zip(expected, got, strict=True)):
        at = first_difference(want["tokens"], have["tokens"])
        tie = None
        if at is not None and at < min(len(want["tokens"]), len(have["tokens"])):
            top = want["logprobs"][at]
            pair = [top.get(str(answer["tokens"][at])) for answer in (want, have)]
            tie = None if None in pair else abs(pair[0] - pair[1])
        identity.add(f"answer {number}", want["tokens"], have["tokens"], tie)
    return identity


def assert_same(expected: Answers, got: Answers) -> None:
    """Tokens by the identity rule, and the first token's log probabilities."""
    judge(expected, got).assert_holds()
    for want, have in zip(expected, got, strict=True):
        for token, logprob in want["logprobs"][0].items():
            if token in have["logprobs"][0]:
                assert abs(have["logprobs"][0][token] - logprob) < FIRST_LOGPROBS


def cached(answers: Answers) -> int:
    return sum(answer["cached"] or 0 for answer in answers)
