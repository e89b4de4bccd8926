"""The report: identity rule with its positive controls, rows by source, and the JSON of the benchmark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hiradix.apps.bench.client import Answer, ChatRequest, Message, Sources, TokenChoice
from hiradix.apps.bench.main import main
from hiradix.apps.bench.report import (
    compare,
    first_difference,
    long_rows,
    percentile,
    rows,
    summary,
    tier_shares,
)
from tests.bench.fake_server import Reply, fake_server


def made(tokens: str, *, label: str = "c#1", sources: Sources | None = None, **fields: object) -> Answer:
    """An answer whose tokens are single letters; `runner_up` is ("letter", gap) at every place."""
    name, gap = fields.get("runner_up", ("z", 2.0))  # type: ignore[misc]
    choices = tuple(
        TokenChoice(t.encode(), -0.5, ((t.encode(), -0.5), (str(name).encode(), -0.5 - float(gap))))
        for t in tokens
    )
    sources = sources or Sources(computed=100)
    return Answer(
        request=ChatRequest(label, (Message("user", "hi"),), 8),
        text=tokens,
        tokens=choices,
        prompt_tokens=sources.reused + sources.computed,
        sources=sources,
        ttft_s=float(fields.get("ttft_s", 1.0)),  # type: ignore[arg-type]
        total_s=2.0,
    )


def test_equal_answers_are_identical() -> None:
    identity = compare([made("abc"), made("d")], [made("abc"), made("d")])
    assert identity.holds
    assert identity.line() == "answers identical to cache-off: 2 of 2"


def test_a_tie_is_flagged_and_only_few_are_allowed() -> None:
    ours, reference = made("abc"), made("abd", runner_up=("c", 5e-5))
    difference = first_difference(ours, reference)
    assert difference is not None and difference.is_tie and difference.position == 2
    same = [made("abc")] * 199
    assert compare([ours, *same], [reference, *same]).holds
    assert not compare([ours, *same[:198]], [reference, *same[:198]]).holds
    assert compare([ours], [reference]).line() == "answers identical to cache-off: 1 of 1 (1 flagged as ties)"


@pytest.mark.parametrize("gap", [1.1e-4, 0.3, 5.0])
def test_a_wider_gap_is_a_difference(gap: float) -> None:
    identity = compare([made("abc")] * 300, [made("abc")] * 299 + [made("abd", runner_up=("c", gap))])
    assert not identity.holds and identity.num_identical == 299
    assert "DIFFERENT: c#1 token 2: b'c' / b'd'" in str(identity.differences[0])


def test_a_token_the_reference_never_considered_is_a_difference() -> None:
    assert not compare([made("q")], [made("a")]).holds


def test_a_shorter_answer_is_a_difference() -> None:
    assert not compare([made("ab")], [made("abc")]).holds


def test_no_answers_prove_nothing() -> None:
    assert not compare([], []).holds


def test_answers_to_other_prompts_cannot_be_compared() -> None:
    with pytest.raises(AssertionError, match="compared with"):
        compare([made("a", label="x#1")], [made("a", label="y#1")])


def test_percentiles() -> None:
    assert percentile([], 50) is None
    assert percentile([3.0], 95) == 3.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile(range(101), 95) == 95


def test_rows_group_by_the_largest_source_and_count_every_token() -> None:
    ours = [
        made("a", sources=Sources(device=900, computed=200), ttft_s=0.1),
        made("a", sources=Sources(device=100, host=1000, computed=50), ttft_s=0.2),
        made("a", sources=Sources(storage=300, computed=20), ttft_s=0.4),
        made("a", sources=Sources(computed=500), ttft_s=3.0),
    ]
    off = [made("a", ttft_s=2.0 + i) for i in range(4)]
    table = {row.name: row for row in rows(ours, off)}
    assert {n: r.num_tokens for n, r in table.items()} == {
        "device": 1000,
        "host": 1000,
        "storage": 300,
        "computed": 770,
        "all": 3070,
    }
    assert (table["host"].ttft_p50_s, table["host"].off_p50_s) == (0.2, 3.0)
    assert table["all"].num_requests == 4
    assert {row.name: row.num_requests for row in long_rows(ours, off)}["storage"] == 0
    assert tier_shares(ours)["storage"] == pytest.approx(300 / 2300)


def test_summary_is_json() -> None:
    text = json.dumps(summary([made("abc")], [made("abd")]))
    assert json.loads(text)["identity"]["holds"] is False


def test_benchmark_measures_the_first_url_and_compares_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("chitchat_dataset")
    out = tmp_path / "bench" / "rows.json"
    with (
        fake_server(lambda body: Reply(("x",), cached=(64, 128, 0))) as (ours, _),
        fake_server(lambda body: Reply(("x",))) as (off, seen),
        fake_server(lambda body: Reply(("y",))) as (wrong, _),
    ):
        assert main([ours, off, "--out", str(out)]) == 0
        report = json.loads(capsys.readouterr().out)
        assert main([ours, wrong, "--out", str(tmp_path / "other.json")]) == 1
    assert report["server"]["tokens"]["host"] == 128 * len(seen.bodies)
    assert report["compared"][0]["identity"]["holds"] is True
    written = json.loads(out.read_text())
    assert written["machine"]["num_cores"]
    host = next(r for r in written["rows"] if (r["case"], r["metric"]) == ("host", "prompt_tokens"))
    times = {(r["case"], r["metric"]): r["peers"][off] for r in written["rows"] if r["unit"] == "s"}
    assert times["all", "ttft_p50"] > 0 and times["all", "total_p95"] > 0
    assert (host["ours"], host["peers"], host["unit"]) == (128 * len(seen.bodies), {off: 0}, "tokens")


def test_benchmark_says_why_it_could_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("chitchat_dataset")
    assert main(["http://127.0.0.1:9"]) == 2
    assert "/v1/models" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["http://127.0.0.1:9", "--concurrency", "0"], "--concurrency must be >= 1"),
        (["http://127.0.0.1:9", "--max-tokens", "0"], "--max-tokens must be >= 1"),
        (["http://127.0.0.1:9", "--top-logprobs", "-1"], "--top-logprobs must be >= 0"),
        (["http://127.0.0.1:99999"], "http://127.0.0.1:99999: Port out of range"),
        (["127.0.0.1:9"], "127.0.0.1:9: expected http://HOST:PORT"),
        (["http://"], "http://: expected http://HOST:PORT"),
        (["http://127.0.0.1:9", "--out", "/dev/null/x.json"], "--out /dev/null/x.json: "),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"hiradix bench: error: {words}") and said.count("\n") == 1
