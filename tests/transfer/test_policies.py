"""Write and prefetch policies: tables of numbers in and decisions out."""

from __future__ import annotations

import math

import pytest

from hiradix.errors import ConfigError
from hiradix.policy.prefetch_policy import PREFETCH_POLICIES, PrefetchLimits, PrefetchPolicy
from hiradix.policy.write_policy import WRITE_POLICIES, WritePolicy


@pytest.mark.parametrize(
    "name,due_at,on_evict",
    [("write_through", 1, False), ("write_through_selective", 2, False), ("write_back", None, True)],
)
def test_write_policies(name: str, due_at: int | None, on_evict: bool) -> None:
    policy = WritePolicy.from_name(name)
    due = [hits for hits in range(5) if policy.is_due(hits)]
    assert due == ([] if due_at is None else list(range(due_at, 5)))
    assert (policy.writes_on_insert, policy.writes_on_evict) == (due_at is not None, on_evict)


def test_unknown_names_are_refused_with_the_list() -> None:
    with pytest.raises(
        ConfigError, match="--hicache-write-policy.*write_threw.*" + ".*".join(WRITE_POLICIES)
    ):
        WritePolicy.from_name("write_threw")
    with pytest.raises(
        ConfigError, match="--hicache-storage-prefetch-policy.*" + ".*".join(PREFETCH_POLICIES)
    ):
        PrefetchPolicy.from_name("soon", PrefetchLimits(64))


def test_the_deadline_grows_with_the_tokens() -> None:
    limits = PrefetchLimits(64, timeout_base_s=1.0, timeout_s_per_ki_token=0.25)
    assert limits.deadline_s(0) == 1.0
    assert limits.deadline_s(16) == pytest.approx(1.25), "16 pages of 64 tokens are 1024 tokens"
    assert limits.deadline_s(2048) == pytest.approx(33.0)


@pytest.mark.parametrize("page_size,threshold,pages", [(64, 256, 4), (64, 257, 5), (512, 256, 1), (1, 0, 1)])
def test_the_threshold_is_at_least_a_page(page_size: int, threshold: int, pages: int) -> None:
    policy = PrefetchPolicy.from_name("timeout", PrefetchLimits(page_size, threshold_tokens=threshold))
    assert not policy.worth_asking(pages - 1) and policy.worth_asking(pages)
    assert not policy.worth_reading(pages - 1) and policy.worth_reading(pages)


@pytest.mark.parametrize(
    "name,limit_s", [("best_effort", 0.0), ("wait_complete", math.inf), ("timeout", 1.25)]
)
def test_how_long_a_request_waits(name: str, limit_s: float) -> None:
    policy = PrefetchPolicy.from_name(name, PrefetchLimits(64))
    assert policy.wait_limit_s(16) == pytest.approx(limit_s)
    assert policy.should_stop(limit_s, 16) or limit_s == math.inf
    assert not policy.should_stop(limit_s * 0.99 if limit_s < math.inf else 1e9, 16) or limit_s == 0


def test_waiting_requests_may_hold_a_share_of_the_host() -> None:
    assert PrefetchLimits(64, capacity_share=0.5).capacity_pages(101) == 50
