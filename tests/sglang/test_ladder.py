"""The ladder of SGLang, sampled, for those families that no other test of this lane takes through all arms."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from tests.ladder.climb import Climb, assert_right, climbed
from tests.ladder.controls import wrong_answers
from tests.ladder.sglang import LadderServer, ServerLife, Sglang

NEEDLES = 4


class FaultyServer:
    """A server that starts, and whose calls of one name fail."""

    def __init__(self, fault: str) -> None:
        self.fault, self.is_stopped = fault, False

    def launch(self) -> FaultyServer:
        return self

    def wait(self) -> None: ...

    def stop(self) -> None:
        self.is_stopped = True

    def attach(self, *_: Any, **__: Any) -> None:
        assert self.fault != "attach"

    def detach(self) -> None:
        assert self.fault != "detach"

    def assert_healthy(self) -> None:
        assert self.fault != "health"


@pytest.mark.long(120)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", ["window", "mamba 2"])
def test_every_arm_answers_as_without_a_cache(family: str, tmp_path: Path) -> None:
    for row in climbed(Climb(Sglang(), family, tmp_path, NEEDLES, is_quick=True)):
        assert_right(row)


def test_a_planted_fault_is_seen(tmp_path: Path) -> None:
    climb = Climb(Sglang(), "mamba 2", tmp_path, NEEDLES, is_quick=True)
    assert wrong_answers(climb, "a state one block off") > 0


@pytest.mark.parametrize("fault", ["attach", "detach", "health"])
def test_a_server_ends_whatever_fails(fault: str, tmp_path: Path) -> None:
    server = FaultyServer(fault)
    with pytest.raises(AssertionError):
        ServerLife(cast(LadderServer, server), Sglang.runs["full"], tmp_path).stop()
    assert server.is_stopped
