"""One vLLM process that does as it is told.

python -m tests.vllm.play '{"engine": {LLM's arguments}, "connector": {extra config} or null}'
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from tests.puppet import obey

FIRST = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING", "OMP_NUM_THREADS": "1",
}  # fmt: skip
TOP = 5
SETTLE_S = 120.0
UNGATED = {"hicache_no_regret": "off"}
"""Whether a tiny model computes faster than it loads depends on the machine; tests that ask say so."""


class Play:
    """The engine and what can be asked of it. Every answer is plain data."""

    def __init__(self, setup: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        from hiradix.storage import register_storage_backend

        register_storage_backend("naughty", "tests.vllm.naughty:Naughty")
        transfer = setup["connector"]
        if isinstance(transfer, dict) and "kv_connector" not in transfer:
            transfer = {
                "kv_connector": "HiRadixConnector", "kv_connector_module_path": "hiradix.adapters.vllm",
                "kv_role": "kv_both", "kv_connector_extra_config": UNGATED | transfer,
            }  # fmt: skip
        config = None if transfer is None else KVTransferConfig(**transfer)
        engine = {"kv_cache_memory_bytes": 1 << 30} | setup["engine"]
        self.llm = LLM(**engine, kv_transfer_config=config)
        self.preemptions = 0
        self._count_preemptions()

    @property
    def _scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]

    def _count_preemptions(self) -> None:
        if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1":
            return
        scheduler, whole = self._scheduler, self._scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.preemptions += 1
            return whole(*args, **kwargs)

        scheduler._preempt_request = counted

    def generate(
        self, prompts: list[list[int]], max_tokens: int = 8, salt: str | None = None,
        lora: dict[str, Any] | None = None, wishes: Any = None,
    ) -> Any:  # fmt: skip
        """Greedy answers: tokens, the most likely tokens' log probabilities at each, cached prompt tokens."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=TOP)
        if wishes is not None:
            params.extra_args = {"kv_transfer_params": {"hiradix": wishes}}
        extra = {} if salt is None else {"cache_salt": salt}
        asked = [{"prompt_token_ids": prompt, **extra} for prompt in prompts]
        adapter = None if lora is None else LoRARequest(**lora)
        outputs = self.llm.generate(asked, params, use_tqdm=False, lora_request=adapter)  # type: ignore[arg-type]
        return [_answer(output) for output in outputs]

    def first_tokens(self, prompts: list[list[int]]) -> Any:
        """One after the other: seconds to each prompt's first token, and how much of it was cached."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        rows = []
        for prompt in prompts:
            begin = time.perf_counter()
            (output,) = self.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
            rows.append([time.perf_counter() - begin, output.num_cached_tokens or 0])
        return rows

    def storm(self, prompts: list[list[int]], max_tokens: int, keep: int, every: int = 2) -> Any:
        """All prompts at once; all but every `keep`-th are aborted, one in so many steps. The kept answers."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=TOP)
        for number, prompt in enumerate(prompts):
            engine.add_request(f"storm{number}", {"prompt_token_ids": prompt}, params)  # type: ignore[arg-type]
        doomed = [number for number in range(len(prompts)) if number % keep]
        answers: dict[str, Any] = {}
        step = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    answers[output.request_id] = output
            step += 1
            if doomed and step % every == 0:
                engine.abort_request([f"storm{doomed.pop(step % len(doomed))}"])
        return {
            number: _answer(answers[f"storm{number}"])
            for number in range(len(prompts))
            if f"storm{number}" in answers and number % keep == 0
        }

    def crowd(
        self, requests: list[dict[str, Any]], max_tokens: int = 4, doomed: list[int] | None = None
    ) -> Any:
        """All requests at once, each a `prompt` and what a client says of it: `session`, `tenant`.

        The order in which first tokens came, by number, and the answers. doomed: those aborted after a step.
        """
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        for number, asked in enumerate(requests):
            said = {"tenant": asked["tenant"]} if "tenant" in asked else None
            params = SamplingParams(
                temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=TOP, extra_args=said
            )
            prompt = {"prompt_token_ids": asked["prompt"]}
            engine.add_request(f"crowd{number}", prompt, params, session_id=asked.get("session"))  # type: ignore[arg-type]
        order: list[int] = []
        answers: dict[str, Any] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                number = int(output.request_id.removeprefix("crowd"))
                if number not in order and output.outputs[0].token_ids:
                    order.append(number)
                if output.finished:
                    answers[str(number)] = _answer(output)
            if doomed:
                engine.abort_request([f"crowd{number}" for number in doomed])
                doomed = None
        return {"order": order, "answers": answers}

    def agents(self, agents: list[dict[str, Any]], is_named: bool = True) -> Any:
        """Each asks its turns one after the other, thinking after each answer. Per agent what came of each.

        Agents have `name`, `start_s` and `turns`; those `prompt`, `max_tokens` and `think_s`. Times are real.
        """
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        due_s = {at: agent["start_s"] for at, agent in enumerate(agents)}
        sent_s: dict[int, float] = {}
        first_s: dict[int, float] = {}
        rows: list[list[Any]] = [[] for _ in agents]
        begin_s = time.perf_counter()
        while due_s or sent_s:
            now_s = time.perf_counter() - begin_s
            for at in [at for at, when_s in due_s.items() if when_s <= now_s]:
                turn = agents[at]["turns"][len(rows[at])]
                params = SamplingParams(
                    temperature=0, max_tokens=turn["max_tokens"], ignore_eos=True, logprobs=TOP
                )
                name = agents[at]["name"] if is_named else None
                prompt = {"prompt_token_ids": turn["prompt"]}
                engine.add_request(f"agent{at}/{len(rows[at])}", prompt, params, session_id=name)  # type: ignore[arg-type]
                sent_s[at] = due_s.pop(at)
            if not sent_s:
                time.sleep(max(0.0, min(due_s.values()) - now_s))
                continue
            for output in engine.step():
                at = int(output.request_id.removeprefix("agent").partition("/")[0])
                now_s = time.perf_counter() - begin_s
                if output.outputs[0].token_ids:
                    first_s.setdefault(at, now_s)
                if output.finished:
                    row = {"ttft_s": first_s.pop(at) - sent_s.pop(at), "total_s": now_s, **_answer(output)}
                    rows[at].append(row)
                    if len(rows[at]) < len(agents[at]["turns"]):
                        due_s[at] = now_s + agents[at]["turns"][len(rows[at]) - 1]["think_s"]
        return rows

    def computes_in(self, page_s: float) -> Any:
        """Prices and due times go by this cost of a page, not by how fast this machine is."""
        scheduler = self._scheduler
        role = getattr(scheduler.connector, "scheduler", None)
        meter = scheduler._meter if role is None else role.meter
        meter.planned = lambda *_: None
        meter._gate._computed.forget()
        meter._gate.computed(1, page_s)
        return True

    def admission(self) -> Any:
        """What the scheduler class knows: nothing of requests that have ended, and its policy's name."""
        scheduler = self._scheduler
        known = scheduler._admission
        return {
            "kind": type(scheduler).__name__, "policy": known.policy.name, "capacity": known.policy.capacity,
            "waiting": len(scheduler.waiting), "followed": len(known._requests), "active": len(known._active),
            "prefilling": len(scheduler._prefilling), "priced": len(scheduler._queue_prices._found),
        }  # fmt: skip

    def state(self) -> Any:
        """The connector's figures, with its invariants checked, and how often vLLM preempted."""
        connector = self._scheduler.connector
        role = connector.scheduler
        role.check()
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from hiradix.transfer import JobKind

        worker = get_kv_transfer_group().worker
        reads = worker.role._controller.stats().kinds[JobKind.READ]
        told = {name: value for name, value in vars(role.figures).items()}
        return {
            **told, **{f"fetch_{name}": value for name, value in vars(role.prefetch_figures).items()},
            "preemptions": self.preemptions, "load_async": role.plan.load_async, "idle": role.is_idle,
            "has_storage": role.has_storage, "read_pages": reads.num_pages,
            "host_pages": role.index.num_pages,
            "storage": dict(worker.role.storage.stats()) if worker.role.storage is not None else None,
            "groups": list(role.plan.groups), "waiting": len(role.requests),
        }  # fmt: skip

    def costs(self, computed_s: float, fetched_s: float) -> Any:
        """What a page costs is known to the gate, and not measured any more."""
        from hiradix.policy.no_regret import GatedTransfer

        role = self._scheduler.connector.scheduler
        role.meter.planned = lambda *_: None
        role.no_regret.computed(1, computed_s)
        role.no_regret.fetched(1, 1, fetched_s)  # the first after a change of storage says nothing
        role.no_regret.fetched(1, 1, fetched_s)
        assert role.no_regret.rates()[GatedTransfer.FETCH.value] > 0
        return True

    def settle(self) -> Any:
        """Steps, in which the connector takes in what its workers have done, until nothing is under way.

        A prompt whose pages are on their way to the host waits half a second for them, and no longer: where
        all of it is to be found there, this comes before.
        """
        self._steps_until(lambda: self._scheduler.connector.scheduler.is_idle)
        return True

    def _steps_until(self, wanted: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SETTLE_S
        while not wanted():
            assert time.monotonic() < deadline, f"not so after {SETTLE_S} s"
            self.generate([[5, 6, 7]])

    def corrupt(self, components: list[int] | None = None) -> Any:
        """Flip a number in every host page: the identity checks must see what comes of it. components: of
        these alone."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        role = get_kv_transfer_group().worker.role
        for component, pair in enumerate(role._controller._copies._pairs):
            if components is None or component in components:
                pair.host.buffer.view(pair.host.dtype).mul_(-1.0)
        return True

    def forget(self, host: bool = False) -> Any:
        """Empty vLLM's own prefix cache, and the host tier if told so, as if both had been needed for others.
        With `storage_after_reset` same, storage goes on as it is."""
        scheduler = self._scheduler
        assert scheduler.kv_cache_manager.block_pool.reset_prefix_cache()
        if host:
            scheduler.connector.scheduler.reset()
        return True

    def listen(self) -> Any:
        """From now on keep what vLLM would publish."""
        self.batches: list[Any] = []
        scheduler = self._scheduler
        scheduler.kv_event_publisher.publish = self.batches.append
        self.told: dict[str, float] = {}
        whole = scheduler.make_stats

        def make_stats(*args: Any, **kwargs: Any) -> Any:
            from hiradix.adapters.vllm.stats import HiRadixStats

            for stats in (*args, *kwargs.values()):
                if isinstance(stats, HiRadixStats):
                    self.told = HiRadixStats(self.told).aggregate(stats).data
            return whole(*args, **kwargs)

        scheduler.make_stats = make_stats
        return True

    def heard(self) -> Any:
        """Per event its medium and the blocks stored and removed."""
        shown = []
        for event in (event for batch in self.batches for event in batch.events):
            names = [str(name) for name in getattr(event, "block_hashes", ())]
            kind = type(event).__name__
            shown.append(
                {
                    "medium": getattr(event, "medium", None),
                    "stored": names if kind == "BlockStored" else [],
                    "removed": names if kind == "BlockRemoved" else [],
                }
            )
        return shown

    def figures(self) -> Any:
        """What vLLM's log and metrics were given since `listen`, summed."""
        return self.told

    def reset(self) -> Any:
        """vLLM's own call to forget its prefix cache and the connector's."""
        return self._scheduler.reset_prefix_cache(reset_connector=True)

    def train(self, factor: float, is_paused: bool) -> Any:
        """Other weights, as a trainer puts them in: paused, changed, and on, or changed and then told so."""
        core = self.llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        if is_paused:
            core.pause_scheduler(mode="keep", clear_cache=True)
        model = core.model_executor.driver_worker.worker.model_runner.model
        for name, weights in model.named_parameters():
            if "layernorm" in name:  # what is multiplied is packed for the processor, away from these
                weights.data.mul_(factor)
        if is_paused:
            core.resume_scheduler()
        else:  # what trainers call that know nothing of connectors
            assert self.llm.reset_prefix_cache()
        return True

    def attach(self, name: str, keys: dict[str, Any]) -> Any:
        """Have this store in place of the one there is, as the admin endpoint would; steps take it up."""
        role = self._scheduler.connector.scheduler
        role.storage.ask(name, keys)
        self.generate([[5, 6, 7]])  # what there was is let go
        self._steps_until(lambda: role.has_storage)
        return True

    def fault(self, mode: str) -> Any:
        """How the naughty backend behaves from now on."""
        from tests.vllm.naughty import Naughty

        Naughty.mode = mode
        return True

    def stop(self) -> Any:
        """vLLM's own end, which ends the connectors of all workers."""
        self.llm.llm_engine.engine_core.shutdown()
        return True


def _answer(output: Any) -> Any:
    one = output.outputs[0]
    tops = [{str(token): entry.logprob for token, entry in top.items()} for top in one.logprobs]
    return {"tokens": list(one.token_ids), "logprobs": tops, "cached": output.num_cached_tokens}


def main() -> None:
    for name, value in FIRST.items():
        os.environ.setdefault(name, value)
    obey(Play(json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
