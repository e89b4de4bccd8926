"""The log: each line has a time, a level and its request; JSON when asked for; what repeats is counted."""

from __future__ import annotations

import json
import logging
import re
import signal
from pathlib import Path

import httpx
import pytest

from hiradix.apps.server import logs
from hiradix.apps.server.logs import MAX_ALIKE, MAX_KINDS, MAX_TEXT, PERIOD_S, Bounded, JsonLines, TextLines
from tests.server.scripted import ScriptedService
from tests.server.test_admin import client
from tests.server.test_serve import AUTH, DEADLINE_S, server

LINE = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (DEBUG|INFO|WARNING|ERROR) [\w.]+( \[[\w.:-]+\])?: ."
)


def record(
    text: str, *values: object, name: str = "hiradix.x", level: int = logging.INFO
) -> logging.LogRecord:
    return logging.LogRecord(name, level, __file__, 1, text, values, None)


def test_a_line_of_text_has_time_level_and_request() -> None:
    one = record("%s happened", "it")
    one.created, one.msecs = 1_000_000_000.25, 250.0
    assert TextLines().format(one) == "2001-09-09T01:46:40.250Z INFO hiradix.x: it happened"
    token = logs._request_id.set("r1")
    try:
        assert TextLines().format(one) == "2001-09-09T01:46:40.250Z INFO hiradix.x [r1]: it happened"
    finally:
        logs._request_id.reset(token)


def test_a_line_of_json_is_one_line_whatever_it_says() -> None:
    one = record("%s", 'a "quote"\nand a line\u2028 more')
    try:
        raise ValueError("broken")
    except ValueError as error:
        one.exc_info = (type(error), error, error.__traceback__)
    text = JsonLines().format(one)
    assert text.isascii() and "\n" not in text
    found = json.loads(text)
    assert found["message"] == 'a "quote"\nand a line\u2028 more' and found["level"] == "info"
    assert "ValueError: broken" in found["error"]
    long = json.loads(JsonLines().format(record("x" * 3 * MAX_TEXT)))["message"]
    assert len(long) < MAX_TEXT + 50 and long.endswith("characters)")


def test_what_repeats_is_counted_and_others_are_told() -> None:
    now_s = 0.0
    bound = Bounded(lambda: now_s)
    assert [bound.filter(record("again %d", number)) for number in range(MAX_ALIKE + 5)] == (
        [True] * MAX_ALIKE + [False] * 5
    )
    assert bound.filter(record("other")) and bound.filter(record("again %d", 1, level=logging.ERROR))
    assert all(bound.filter(record("act", name="hiradix.audit")) for _ in range(5 * MAX_ALIKE))
    now_s = PERIOD_S
    later = record("again %d", 7)
    assert bound.filter(later) and later.getMessage() == "again 7 (and 5 more like it)"
    for number in range(2 * MAX_KINDS):
        bound.filter(record(f"kind {number}"))
    assert len(bound._kinds) == MAX_KINDS


@pytest.mark.parametrize(
    ("given", "kept"),
    [("trace-1:a.b_c", True), (None, False), ("a b", False), ("x" * 65, False), ("é", False)],
)
def test_each_answer_has_the_id_of_its_request(given: str | None, kept: bool) -> None:
    headers = {} if given is None else {"X-Request-Id": given.encode("latin-1")}
    http = client()
    for path in ("/health", "/nowhere"):
        found = http.get(path, headers=headers).headers.get_list("x-request-id")
        assert len(found) == 1
        assert found[0] == given if kept else re.fullmatch(r"[0-9a-f]{32}", found[0])


def test_a_line_of_a_request_has_its_id(capsys: pytest.CaptureFixture[str]) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    audit = logging.getLogger("hiradix.audit")
    audit.addHandler(handler)
    before = audit.level
    audit.setLevel(logging.INFO)
    try:
        client(ScriptedService()).post("/flush_cache", headers={"X-Request-Id": "mine"})
    finally:
        audit.setLevel(before)
        audit.removeHandler(handler)
    (line,) = [json.loads(text) for text in capsys.readouterr().err.splitlines()]
    assert line["request_id"] == "mine" and line["message"].startswith("flush of device and host by ")


@pytest.mark.parametrize("form", ["text", "json"])
def test_all_that_a_server_writes_on_stderr_has_the_form(form: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    more = ("--log-format", form, "--log-level", "debug")
    with server(str(tmp_path), "answer", *more) as running:
        running.wait_ready()
        assert running.ask().status_code == 200
        headers = {**AUTH, "X-Request-Id": "mine"}
        url = f"{running.url}/flush_cache"
        assert httpx.post(url, headers=headers, timeout=DEADLINE_S, trust_env=False).status_code in (200, 401)
        _, _, err = running.end(signal.SIGTERM)
    lines = err.splitlines()
    assert lines
    if form == "json":
        assert any(json.loads(line).get("request_id") == "mine" for line in lines)
        assert all({"time", "level", "logger", "message"} <= set(json.loads(line)) for line in lines)
    else:
        assert all(LINE.match(line) for line in lines), err
        assert any(" [mine]: " in line for line in lines)
