"""An SGLang server on this machine's CPU, asked over HTTP; its log is evidence too."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from hiradix.apps.demo.process import free_port
from tests.identity import Identity, first_difference
from tests.sglang.install import python
from tests.warm import FORKS, Forked, program

START_TIMEOUT_S = 400.0
ADMIN_KEY = "test-admin"
TOP_LOGPROBS = 4
PATIENT = {"deadline_s": 60.0}  # a call of storage that a busy disk holds for two seconds is a miss
# Every step, busy or idle: pages counted, no page in two places, every invariant of our tree.
CHECKS = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK": "1",
    "HIRADIX_CHECK": "1",
}
FORKS.set_forkserver_preload(["tests.sglang.warm_imports"])
_FOLDER = tempfile.gettempdir()
ON_CPU = {
    "HIRADIX_ATTACH_ALLOW": f"backend=file,path={_FOLDER};backend=disk,path={_FOLDER}",
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONDONTWRITEBYTECODE": "",  # else each process of each server compiles all of SGLang
}
ALWAYS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--disable-cuda-graph"),
    *("--skip-server-warmup", "--mem-fraction-static", "0.4", "--context-length", "2048"),
    *("--enable-cache-report", "--log-level", "info", "--host", "127.0.0.1", "--sleep-on-idle"),
)
_FAULTS = re.compile(r"Traceback|leak|Error|double free|use-after-free|exception", re.IGNORECASE)
_STORAGE = re.compile(r"storage (\w+ failed|breaker is)")  # told and survived: tests break storage on purpose


@dataclass(frozen=True)
class Answer:
    """What a server said to a prompt. details: cached tokens by tier. tops: best candidates, per token."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    cached: int
    details: dict[str, Any]
    tops: tuple[dict[int, float], ...] = ()

    def tier(self, name: str) -> int:
        return int(self.details.get(name) or 0)


@dataclass
class Server:
    """flags: SGLang's, beside `ALWAYS`. Ends with its process group.

    module: what is run. is_warm: its processes are forked from one that has imported SGLang, else it is a new
    interpreter.
    """

    module = "sglang.launch_server"
    is_warm = False

    model: Path
    folder: Path
    flags: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | Forked | None = field(default=None, init=False)
    _started: int = field(default=0, init=False)  # length of the log when it was ready

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def launch(self) -> Server:
        """Begin to start; `wait` ends it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        model = ("--model-path", str(self.model), "--served-model-name", "tiny", "--port", str(self.port))
        self._prepare({})
        own = {"HIRADIX_ATTACHABLE": f"@{self._prepared}"}
        environment = os.environ | ON_CPU | CHECKS | own | self.environment
        with (self.folder / "log").open("ab") as log:
            self.process = self._spawn([*model, *ALWAYS, *self.flags], environment, log.fileno())
        return self

    def _spawn(
        self, arguments: list[str], environment: dict[str, str], log: int
    ) -> subprocess.Popen[bytes] | Forked:
        if self.is_warm:
            return program(self.module, arguments, environment, log, log)
        command = [str(python()), "-m", self.module, *arguments]
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def wait(self) -> Server:
        """Until it serves, and the request it sends to itself is over, which may come before it listens. One
        that does not is ended."""
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def _wait(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (self._answers() and "freeze_gc" in self.log()):  # its last request to itself
            assert self.is_alive, f"SGLang ended:\n{self.log()[-4000:]}"
            assert time.monotonic() < deadline, f"SGLang does not answer:\n{self.log()[-4000:]}"
            time.sleep(0.2)
        self._started = len(self.log())

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/v1/models", timeout=2.0).status_code == 200
        except httpx.HTTPError:
            return False

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    # -- what it says -------------------------------------------------------------------

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def faults(self) -> list[str]:
        """Lines of the log, since it serves, that tell of a fault; its own invariant checker's among them."""
        lines = self.log()[self._started :].splitlines()
        return [line[:300] for line in lines if _FAULTS.search(line) and not _STORAGE.search(line)]

    def assert_healthy(self) -> None:
        assert self.is_alive, self.log()[-4000:]
        faults = self.faults()
        assert not faults, "\n".join(faults[:40])

    def metrics(self) -> dict[str, float]:
        """Sums of Prometheus series by name."""
        found: dict[str, float] = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=30.0).text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                found[name] = found.get(name, 0.0) + float(value)
        return found

    # -- what it is asked ---------------------------------------------------------------

    def ask(self, prompt: Sequence[int], num_tokens: int = 6, **fields: Any) -> Answer:
        """A greedy answer of exactly `num_tokens`."""
        sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
        body = {
            "input_ids": list(prompt),
            "sampling_params": sampling,
            "return_logprob": True,
            "top_logprobs_num": TOP_LOGPROBS,
        } | fields
        return _answer(prompt, self._generate(body))

    def _generate(self, body: dict[str, Any]) -> Any:
        reply = httpx.post(f"{self.url}/generate", json=body, timeout=300.0)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def ask_together(self, asked: Sequence[Sequence[int]], sampling: dict[str, Any]) -> list[Answer]:
        """Answers to prompts of one call, which all wait before the first of them runs: those of clients come
        one by one, and the first may have ended by then."""
        body = {"input_ids": [list(prompt) for prompt in asked], "sampling_params": sampling}
        return [_answer(prompt, told) for prompt, told in zip(asked, self._generate(body), strict=True)]

    def read(self, prompt: Sequence[int], num_tokens: int, begun: threading.Event) -> None:
        """A greedy answer, each token sent when it is there: `begun` with the first."""
        sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
        body = {"input_ids": list(prompt), "sampling_params": sampling, "stream": True}
        with httpx.stream("POST", f"{self.url}/generate", json=body, timeout=300.0) as reply:
            assert reply.status_code == 200
            for _ in reply.iter_raw():
                begun.set()

    @contextmanager
    def paused(self, asked: Sequence[Sequence[int]], num_tokens: int) -> Iterator[None]:
        """Requests that run, and get no further in here. num_tokens: so many that none ends before that, and
        the pool holds them all; metrics say late who runs."""
        begun = [threading.Event() for _ in asked]
        with ThreadPoolExecutor(len(asked)) as pool:
            running = [pool.submit(self.read, p, num_tokens, event) for p, event in zip(asked, begun)]
            until(lambda: all(event.is_set() for event in begun) or any(one.done() for one in running))
            try:
                assert self.admin("POST", "/pause_generation", mode="in_place").status_code == 200
                assert not any(one.done() for one in running), "it ended before it could be paused"
                yield
            finally:
                self.admin("POST", "/continue_generation", torch_empty_cache=False)
            for one in running:
                one.result()

    def ask_all(self, prompts: Iterable[Sequence[int]], concurrency: int, **fields: Any) -> list[Answer]:
        """Answers in the order of the prompts."""
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda prompt: self.ask(prompt, **fields), prompts))

    def admin(self, method: str, path: str, key: str | None = ADMIN_KEY, **body: Any) -> httpx.Response:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.request(method, self.url + path, headers=headers, json=body or None, timeout=150.0)

    def flush(self) -> None:
        """Empty device and host, as soon as nothing is under way."""
        reply = self.admin("POST", "/flush_cache?timeout=120")
        assert reply.status_code == 200, reply.text

    @property
    def _prepared(self) -> Path:
        return self.folder / "attachable.json"

    def _prepare(self, stores: dict[str, Any]) -> None:
        """Write the file of stores that may be attached by name."""
        self._prepared.write_text(json.dumps(stores))

    def ask_to_attach(self, backend: str, extra: str | None = None, **fields: Any) -> httpx.Response:
        """Prepare a store as the server's operator does, and ask for it over HTTP."""
        self._prepare({"prepared": {"backend": backend, **PATIENT, **json.loads(extra or "{}")}})
        return self.admin("PUT", "/hicache/storage-backend", hicache_storage_backend="prepared", **fields)

    def attach(self, backend: str, extra: str | None = None, **fields: Any) -> None:
        """Attach a storage backend, as soon as nothing is under way."""

        def attached() -> bool:
            reply = self.ask_to_attach(backend, extra, **fields)
            assert reply.status_code == 200 or "not idle" in reply.text, reply.text
            return reply.status_code == 200

        until(attached)

    def detach(self) -> None:
        """Detach it, as soon as what is under way has ended: then it has all that was given to it."""

        def detached() -> bool:
            reply = self.admin("DELETE", "/hicache/storage-backend")
            assert reply.status_code == 200 or "not idle" in reply.text, reply.text
            return reply.status_code == 200

        until(detached)


class WarmServer(Server):
    """A Server whose processes are forked from one that has imported SGLang."""

    is_warm = True


def until(done: Callable[[], bool], timeout_s: float = 120.0) -> None:
    """Ask again and again; fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, f"not so after {timeout_s} s"
        time.sleep(0.05)


def _answer(prompt: Sequence[int], told: dict[str, Any]) -> Answer:
    meta = told["meta_info"]
    tops = tuple(
        {token: logprob for logprob, token, _ in best} for best in meta.get("output_top_logprobs") or ()
    )
    details = meta.get("cached_tokens_details") or {}
    return Answer(tuple(prompt), tuple(told["output_ids"]), meta["cached_tokens"], details, tops)


class Reference:
    """Answers of a server without any prefix cache, each asked for once."""

    def __init__(self, server: Server):
        self.server = server
        self._known: dict[tuple[Any, ...], Answer] = {}

    def answer(self, prompt: Sequence[int], num_tokens: int = 6) -> Answer:
        key = (tuple(prompt), num_tokens)
        if key not in self._known:
            self._known[key] = self.server.ask(prompt, num_tokens)
        return self._known[key]

    def prepare(self, prompts: Sequence[Sequence[int]], num_tokens: int = 6) -> None:
        """Ask for many at once."""
        missing = [p for p in dict.fromkeys(map(tuple, prompts)) if (p, num_tokens) not in self._known]
        for answer in self.server.ask_all(missing, 8, num_tokens=num_tokens):
            self._known[answer.prompt, num_tokens] = answer

    def judged(self, answers: Iterable[Answer]) -> Identity:
        """Every answer beside this server's, under the identity rule."""
        identity = Identity()
        for number, got in enumerate(answers):
            own = self.answer(got.prompt, len(got.tokens))
            at = first_difference(own.tokens, got.tokens)
            tie = None
            if at is not None and at < min(len(own.tokens), len(got.tokens)):
                best = own.tops[at]
                tie = best[own.tokens[at]] - best.get(got.tokens[at], float("-inf"))
            identity.add(f"answer {number}", own.tokens, got.tokens, tie)
        return identity

    def assert_same(self, answers: Iterable[Answer]) -> None:
        self.judged(answers).assert_holds()


class Apart(Reference):
    """Answers of the same server, each in a namespace of its own, where nothing is cached."""

    def prepare(self, prompts: Sequence[Sequence[int]], num_tokens: int = 6) -> None:
        for number, prompt in enumerate(prompts):
            answer = self.server.ask(prompt, num_tokens, extra_key=f"apart-{number}")
            assert answer.cached == 0
            self._known[tuple(prompt), num_tokens] = answer


def assert_right_at_once(server: Server, asked: Sequence[Sequence[int]]) -> None:
    """Asked all at once of an empty cache: much is found in it, and each answer is the one given alone."""
    reference = Apart(server)
    reference.prepare(asked)
    server.flush()
    answers = server.ask_all(asked, len(asked))
    assert sum(a.cached for a in answers) > 0.2 * sum(map(len, asked))
    reference.assert_same(answers)
