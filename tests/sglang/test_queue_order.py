"""SGLang's `lpm` with our cache: what is below the device counts where the queue is sorted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang.srt.managers.schedule_policy import SchedulePolicy

from hiradix.adapters.sglang.queue_order import follow_queue
from tests.sglang.prompts import tokens
from tests.sglang.rig import PAGE, Request, Rig
from tests.sglang.server import ADMIN_KEY, Reference, WarmServer, _answer

LONG = 40 * PAGE


class Asked(Request):
    """What SGLang's policy sees of its Req, too."""

    def _compute_max_prefix_len(self, num_tokens: int) -> int:
        return num_tokens - 1


def queued(rig: Rig, prompt: Sequence[int], **namespace: Any) -> Any:
    req: Any = rig.request(prompt, **namespace)
    req.__class__ = Asked
    req.cache_request_handle, req.arrival_processed_tokens = rig.handle(req), 0
    return req


def order(rig: Rig, queue: list[Any], policy: str = "lpm") -> list[Any]:
    """As SGLang's scheduler would look through it."""
    follow_queue()
    SchedulePolicy(policy, rig.cache, True, False, False).calc_priority(queue)
    return queue


def test_what_the_host_has_comes_before_what_nobody_has() -> None:
    rig = Rig()
    known = list(range(1000, 1000 + LONG))
    rig.run(known)
    rig.settle()
    rig.evict_all()
    cold, warm = queued(rig, range(2000, 2000 + LONG)), queued(rig, [*known, *range(3000, 3000 + PAGE)])
    assert order(rig, [cold, warm]) == [warm, cold]
    assert (warm.prefix_len, warm.host_hit_length) == (0, LONG)


def test_what_is_left_to_compute_decides_and_not_how_much_was_found() -> None:
    rig = Rig()
    known = list(range(1000, 1000 + 20 * PAGE))
    rig.run(known)
    long = queued(rig, [*known, *range(3000, 3000 + 30 * PAGE)])
    short = queued(rig, range(5000, 5000 + 2 * PAGE))
    assert order(rig, [long, short]) == [short, long]


def test_what_storage_has_counts_before_it_has_come(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    known = list(range(1000, 1000 + LONG))
    rig.run(known)
    rig.settle()
    rig.cache.reset()
    cold, stored = queued(rig, range(2000, 2000 + LONG)), queued(rig, [*known, *range(3000, 3000 + PAGE)])
    assert order(rig, [cold, stored]) == [cold, stored]
    handle = rig.prefetch(stored)
    assert any(told(rig, handle) == LONG for _ in range(1000))  # storage was asked; nothing has been read
    assert order(rig, [cold, stored]) == [stored, cold]
    rig.settle()
    assert told(rig, handle) == 0
    assert order(rig, [cold, stored]) == [stored, cold]
    assert stored.host_hit_length == LONG


def told(rig: Rig, handle: Any) -> int:
    """Tokens that storage has for a request and the host has not, one step of a worker later."""
    rig.driver.step()
    rig.cache.check_hicache_events()
    return int(rig.cache.inner.fetching_tokens(handle))


def test_one_of_two_with_a_new_prefix_goes_first_and_the_other_last() -> None:
    """As SGLang has it: the second finds what the first has computed. Not where the prefix is on the host."""
    rig = Rig()
    shared = list(range(1000, 1000 + 20 * PAGE))
    first, second = (queued(rig, [*shared, *range(at, at + PAGE)]) for at in (3000, 4000))
    other = queued(rig, range(5000, 5000 + 30 * PAGE))
    assert order(rig, [first, second, other]) == [first, other, second]
    rig.run(shared)
    rig.settle()
    rig.evict_all()
    assert order(rig, [other, first, second]) == [first, second, other]


def test_other_policies_keep_their_order() -> None:
    rig = Rig()
    known = list(range(1000, 1000 + LONG))
    rig.run(known)
    cold, warm = queued(rig, range(2000, 2000 + LONG)), queued(rig, [*known, *range(3000, 3000 + LONG // 2)])
    short = queued(rig, range(5000, 5000 + PAGE))
    assert order(rig, [short, warm, cold], "hrrn") == [cold, warm, short]  # nobody has waited: by name
    assert order(rig, [cold, warm, short], "lpm") == [short, warm, cold]


def test_a_long_prefix_on_the_host_is_served_before_cold_prompts(
    model: Path, reference: Reference, tmp_path: Path
) -> None:
    """Live, with one request at a time: cold ones came first."""
    flags = (
        *("--radix-cache-backend", "hiradix", "--page-size", "16", "--max-total-tokens", "1024"),
        *("--max-running-requests", "1", "--schedule-policy", "lpm", "--enable-hierarchical-cache"),
        *("--hicache-ratio", "8", "--enable-metrics", "--admin-api-key", ADMIN_KEY),
    )
    known = tokens(600, "known")
    asked = [*(tokens(620, f"cold {number}") for number in range(3)), known + tokens(20, "more")]
    server = WarmServer(model, tmp_path / "lpm", flags).launch().wait()
    sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    body = {"input_ids": asked, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 4}
    try:
        server.ask(known)
        server.ask(tokens(900, "away with it"))
        told = server._generate(body)  # of one call: all wait before the first of them runs
        server.assert_healthy()
    finally:
        server.stop()
    took_s = [one["meta_info"]["e2e_latency"] for one in told]
    assert min(range(4), key=took_s.__getitem__) == 3, took_s
    answers = [_answer(prompt, one) for prompt, one in zip(asked, told, strict=True)]
    assert answers[3].tier("host") >= 592 and not any(answer.cached for answer in answers[:3])
    reference.prepare(asked)
    reference.assert_same(answers)
