"""What a benchmark has measured is shown and written, whatever ends the run or leaves a peer out."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hiradix.apps.bench import main as serve
from hiradix.apps.bench.client import Answer, ChatRequest, Message, Sources
from hiradix.errors import CacheError
from tests.project.repo import ROOT


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Modules of benchmarks/ by name."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


def written(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def test_an_error_leaves_the_rows_so_far(
    load: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common, out = load("common"), tmp_path / "bench" / "rows.json"
    with pytest.raises(TypeError), common.Report(out, ["peer"]) as report:
        report.add([common.Row("first", "rate", "GB/s", 2.0, {"peer": 1.0})])
        raise TypeError("the last step")
    assert "first  rate, GB/s     2.00  1.00 (0.50x)" in capsys.readouterr().out
    assert [row["case"] for row in written(out)["rows"]] == ["first"]


def test_rows_are_printed_before_what_is_optional(
    load: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common, printed = load("common"), list[str]()

    def fails() -> list[Any]:
        printed.append(capsys.readouterr().out)
        raise RuntimeError("no server")

    out = tmp_path / "rows.json"
    with pytest.raises(SystemExit) as ended, common.Report(out, []) as report:
        report.add([common.Row("first", "time", "s", 1.0)])
        report.optional("second", fails)
        report.add([common.Row("third", "time", "s", 3.0)])
    captured = capsys.readouterr()
    assert ended.value.code == 1, "a step of ours failed"
    assert "first" in printed[0] and "third" in captured.out and "first" not in captured.out
    assert captured.err == "left out: second: RuntimeError: no server\n"
    found = written(out)
    assert found["machine"]["left_out"] == ["second: RuntimeError: no server"]
    assert [row["case"] for row in found["rows"]] == ["first", "third"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_refused(load: Any, tmp_path: Path, value: float) -> None:
    common = load("common")
    with pytest.raises(ValueError, match="JSON"):
        common.write_json(tmp_path / "rows.json", [common.Row("a", "b", "s", value)], {})


class Store:
    """A worker of the storage benchmark; the calls named in `fails` end in its error."""

    def __init__(self, name: str, fails: tuple[str, ...] = ()):
        self.name, self.folder, self.fails, self.is_closed = name, Path(name), fails, False

    def do(self, what: str, **order: Any) -> Any:
        if what in self.fails:
            raise RuntimeError(f"{self.name} ended: see the log")
        return []

    def call(self, name: str, **how: Any) -> float:
        self.do(name)
        return 0.5

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("fails", ["open", "put", "check", "get"])
def test_a_store_that_fails_takes_no_further_part(load: Any, fails: str) -> None:
    storage, told = load("bench_storage"), list[str]()
    peer = Store("peer", (fails,))
    workers = {name: Store(name) for name in ("hiradix", "physical")} | {"peer": peer}
    bench = storage.Bench(workers, 1 << 20, 4 << 20, 2, told.append)
    bench.open()
    put, rates = bench.put(), bench.rates(lambda store: None, 4)
    assert peer.is_closed and "peer" not in rates and "peer" not in workers
    assert len(told) == 1 and told[0].startswith("peer, pages of 1MiB: peer ended")
    assert set(put) >= {"hiradix"} and all(len(values) == 2 for values in rates.values())
    rows = bench.rows("get cold", rates)
    assert rows[0].ours == pytest.approx(8 * (1 << 20) / 1e9) and "memcpy" in rows[0].peers


def test_our_own_store_may_not_fail(load: Any) -> None:
    workers = {"hiradix": Store("hiradix", ("put",)), "physical": Store("physical")}
    bench = load("bench_storage").Bench(workers, 1 << 20, 4 << 20, 2, lambda told: None)
    with pytest.raises(RuntimeError, match="hiradix ended"):
        bench.put()


@pytest.mark.parametrize("fails, at", [("prepare", 1), ("measure", 1), ("measure", 3)])
def test_a_tree_that_fails_has_no_part_in_the_case(load: Any, fails: str, at: int) -> None:
    tree, plan, told = load("bench_tree"), load("bench_tree_plan"), list[str]()

    def worker(name: str, fails: str = "") -> Any:
        orders: list[str] = []

        def do(**order: Any) -> dict[str, Any]:
            orders.append(order["do"])
            if order["do"] == fails and orders.count(fails) == at:
                raise RuntimeError(f"{name}: no")
            return {"us, warm": [1.0, 2.0, 6.0]} if order["do"] == "measure" else {}

        return Hashable(name=name, do=do, orders=orders, close_case=lambda: do(do="close"))

    ours, good, bad = worker("ours"), worker("good"), worker("bad", fails)
    case = plan.Planned("match", "match", {}, rounds=3)
    (row,) = tree.measure(case, [ours], [good, bad], told.append)
    assert (row.case, row.ours, row.peers) == ("match (plain, lru)", 2.0, {"good": 2.0})
    assert told == ["match: bad: no"] and bad.orders[-1] == "close" and bad.orders.count("close") == 1


class Hashable(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]


def test_rows_of_the_tree_say_what_they_are(load: Any) -> None:
    plan: ModuleType = load("bench_tree_plan")
    cases = plan.plan(False, False, True)
    forms = {how.name.rpartition("(")[2] for case in cases for how in case.ours}
    assert forms == {"plain, lru)", "compiled, lru)", "plain, ghd)", "compiled, ghd)"}
    names = [case.name + how.name for case in cases for how in case.ours]
    assert len(names) == len(set(names))
    assert {"vllm-0.32", "vllm-0.32-hashed"} <= {peer for case in cases for peer in case.peers}


def answer(text: str) -> Answer:
    request = ChatRequest("c#1", (Message("user", "hi"),), 8)
    return Answer(request, text, (), 100, Sources(computed=100), 0.5, 1.0)


def test_a_further_server_that_fails_leaves_the_others_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Server:
        def __init__(self, url: str, *_: Any, **__: Any):
            self.url = url

        async def __aenter__(self) -> Server:
            if "dead" in self.url:
                raise CacheError(f"{self.url}: connection refused")
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

    async def played(server: Any, *_: Any) -> list[Answer]:
        return [answer("x")]

    monkeypatch.setattr(serve, "ChatServer", Server)
    monkeypatch.setattr(serve, "play_phase", played)
    monkeypatch.setattr(serve, "replay", played)
    monkeypatch.setattr(serve, "make_workload", lambda size: SimpleNamespace(conversations=(), phases=(1,)))
    out = tmp_path / "serve.json"
    urls = ["http://ours:1", "http://dead:1", "http://off:1"]
    assert serve.main(["--table", "--out", str(out), *urls]) == 2
    captured = capsys.readouterr()
    assert "http://dead:1 is left out: http://dead:1: connection refused" in captured.err
    rows = written(out)["rows"]
    assert all(isinstance(row["ours"], int | float) for row in rows) and "NaN" not in out.read_text()
    (total,) = [row for row in rows if (row["case"], row["metric"]) == ("all", "total_p50")]
    assert total["peers"] == {"http://off:1": 1.0} and "total_p50, s" in captured.out
    assert not [row for row in rows if row["case"] == "device" and row["metric"].startswith("ttft")]


def test_the_machine_says_which_form_was_measured(load: Any) -> None:
    assert load("common").machine()["hiradix"] in ("plain Python", "compiled")
    assert sys.modules["common"]
