"""Our own server, asked over HTTP alone: right as it is, wrong with a fault planted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.certify.own import OwnServer, certified
from tests.certify.planted import faults
from tests.planting import copied, planted

FEW = ("--max-tokens", "4", "--prompt-tokens", "240")


@pytest.mark.long(30)
@pytest.mark.timeout(600)
def test_every_arm_is_right_on_every_tier(tiny_model: Path, tmp_path: Path) -> None:
    with OwnServer(tmp_path, tiny_model) as server:
        code, record, text = certified(server, "--require", "all", *FEW)
    assert code == 0, text
    assert record["hits_by"] == "usage" and record["cold_by"] == "salt"


@pytest.mark.long(20)
@pytest.mark.timeout(600)
def test_a_planted_fault_is_seen_over_http(tiny_model: Path, tmp_path: Path) -> None:
    fault = next(fault for fault in faults() if fault.name == "walk: a partial page counts as matched")
    (tmp_path / "code").mkdir()
    copy = copied(tmp_path / "code")
    planted(fault, copy)
    with OwnServer(tmp_path, tiny_model, copy) as server:
        code, record, text = certified(server, "--flush", "none", *FEW, restart=False)
    assert code == 1, text
    assert any(f["arm"] == "split" and f["fault"] == "wrong answer" for f in record["findings"]), text
