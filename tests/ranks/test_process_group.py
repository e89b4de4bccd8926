"""Collective calls over gloo, with the ranks as threads of this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hiradix.apps.engine import ranks
from hiradix.errors import CacheError, ConfigError
from hiradix.transfer.process_group import Membership, ProcessGroup, RankLost

SIZE = 3


def on_all(folder: Path, body: Callable[[ProcessGroup], Any], timeout_s: float = 60.0) -> list[Any]:
    """What `body` returns on each rank; an exception is returned as it is."""

    def run(rank: int) -> Any:
        group = ProcessGroup(Membership(rank, SIZE, f"file://{folder / 'meet'}", timeout_s))
        try:
            return body(group)
        except CacheError as error:
            return error
        finally:
            group.close()

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(run, range(SIZE)))


def test_all_calls_give_every_rank_the_same(tmp_path: Path) -> None:
    long = {"text": "x" * 5000, "rows": [list(range(40))] * 3, "none": None, "umlaut": "ö"}

    def body(group: ProcessGroup) -> Any:
        own = np.array([5 - group.rank, group.rank, -7 * group.rank, 1 << 60], np.int64)
        least, decided = group.least(own), group.decide(own)
        assert own[0] == 5 - group.rank, "the caller's vector was written to"
        summed = group.add(torch.full((2, 3), float(group.rank + 1)))
        told = [group.share(value if group.rank == 0 else None) for value in (long, ["step"], "y" * 1016)]
        return least.tolist(), decided.tolist(), summed.tolist(), told

    same = [3, 0, -14, 1 << 60]
    told = [long, ["step"], "y" * 1016]
    assert on_all(tmp_path, body) == [(same, same, [[6.0] * 3] * 2, told)] * SIZE


def test_a_rank_that_left_is_lost_to_the_others_for_good(tmp_path: Path) -> None:
    def body(group: ProcessGroup) -> Any:
        group.least(np.zeros(4, np.int64))
        if group.rank == 1:
            group.close()
        found = []
        for _ in range(3):
            with pytest.raises(RankLost) as caught:
                group.least(np.zeros(4, np.int64))
            found.append(caught.value)
        assert found[1] is found[2]
        return str(found[0])

    left = on_all(tmp_path, body)
    assert "rank 1 has left" in left[1] and all("other ranks failed" in left[r] for r in (0, 2)), left


def test_ranks_that_never_meet_are_told_so_within_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(RankLost, match="rank 0 of 2: the start"):
        ProcessGroup(Membership(0, 2, f"file://{tmp_path / 'meet'}", timeout_s=0.5))


@pytest.mark.parametrize(("rank", "size", "timeout_s"), [(2, 2, 1.0), (-1, 2, 1.0), (0, 0, 1.0), (0, 2, 0.0)])
def test_impossible_memberships_are_refused(rank: int, size: int, timeout_s: float) -> None:
    with pytest.raises(ConfigError):
        Membership(rank, size, "127.0.0.1:1", timeout_s)


def test_a_rank_that_cannot_start_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ranks.signal, "signal", lambda *given: None)
    with pytest.raises(SystemExit) as ended:
        ranks._run_follower(Membership(1, 2, f"file://{tmp_path / 'meet'}", 0.2))
    (record,) = caplog.records
    assert ended.value.code == 1 and record.exc_info is None
    assert record.getMessage().startswith("rank 1 of 2 cannot start: ")
