"""`hiradix ctl` against a real server: each verb, what it is answered, and what becomes of the pages."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from hiradix.apps import ctl as ctl_command
from hiradix.apps.ctl import AdminClient
from hiradix.apps.demo.process import ServerProcess
from hiradix.cli import main
from tests.e2e.tiny_model import write_tiny_model

ROOT = Path(__file__).parents[2]
PAGE = 16
PROMPT = [5 + n % 90 for n in range(6 * PAGE + 3)]
ADMIN = {"Authorization": "Bearer admin"}
DEADLINE_S = 60.0

Ctl = Callable[..., Any]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("ctl")
    model = write_tiny_model(folder / "model")
    pages = {"file_storage_path": str(folder / "pages"), "prefetch_threshold": PAGE, "deadline_s": DEADLINE_S}
    flags = [
        *("--model-path", str(model), "--served-model-name", "tiny", "--enable-hierarchical-cache"),
        *(
            "--admin-api-key",
            "admin",
            "--hicache-no-regret",
            "off",
            "--page-size",
            str(PAGE),
            "--max-total-tokens",
            "256",
        ),
        *("--hicache-ratio", "2", "--hicache-storage-prefetch-policy", "wait_complete", "--check-invariants"),
        *("--hicache-storage-backend", "file", "--hicache-storage-backend-extra-config", json.dumps(pages)),
    ]
    with ServerProcess(flags, folder / "log") as process:
        yield process


@pytest.fixture
def ctl(server: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ctl:
    """Runs a command; the answer's JSON, or with `status` what it printed where it fails so."""
    monkeypatch.setenv("HIRADIX_ADMIN_API_KEY", "admin")

    def run(*arguments: str, status: int = 0) -> Any:
        assert main(["ctl", "--url", server.url, "--json", *arguments]) == status, capsys.readouterr()
        printed = capsys.readouterr()
        return json.loads(printed.out) if not status else printed.out + printed.err

    return run


def ask(server: ServerProcess, prompt: object, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True, **fields}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=DEADLINE_S)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def tokens(prompt: list[int]) -> str:
    return ",".join(map(str, prompt))


def cached(answer: dict[str, Any]) -> int:
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def test_a_prefix_is_located_held_under_pressure_and_released(server: ServerProcess, ctl: Ctl) -> None:
    prompt = [7, *PROMPT]
    ask(server, prompt)
    found = ctl("locate", "--tokens", tokens(prompt))
    assert found["state"] == "done" and found["found"]["device"]["tokens"] == 6 * PAGE
    lease = ctl("hold", "--tokens", tokens(prompt), "--ttl", "600", "--wait", str(DEADLINE_S))
    assert lease["state"] == "held" and lease["done"]["tokens"] == 6 * PAGE
    for other in range(20):  # ten times what the host has
        ask(server, [20 + other, *PROMPT])
    assert ctl("locate", "--tokens", tokens(prompt))["found"]["host"]["tokens"] == 6 * PAGE
    assert cached(ask(server, prompt)) == 6 * PAGE
    assert any(one["id"] == lease["id"] for one in ctl("status")["intents"])
    assert ctl("release", str(lease["id"]))["is_end"]
    assert ctl("status", str(lease["id"]))["is_end"]


def test_what_is_forgotten_is_nowhere_and_the_next_request_says_why(server: ServerProcess, ctl: Ctl) -> None:
    prompt = [8, *PROMPT]
    ask(server, prompt)
    gone = ctl("forget", "--tokens", tokens(prompt), "--wait", str(DEADLINE_S))
    assert gone["state"] == "done", gone
    again = ask(server, prompt)
    assert cached(again) == 0
    found = ctl("explain", again["id"])
    assert found["by_source"] == {"computed": len(prompt)}
    assert found["by_reason"]["forgotten"] == 6 * PAGE
    assert ctl("explain", "--last", "1")["requests"][0]["id"] == again["id"]


def test_pages_are_brought_from_storage_to_the_host(server: ServerProcess, ctl: Ctl) -> None:
    prompt = [9, *PROMPT]
    ask(server, prompt)
    assert ctl("bring", "--tokens", tokens(prompt), "--target", "storage", "--wait", "60")["state"] == "done"
    ctl("forget", "--tokens", tokens(prompt), "--tier", "device", "--tier", "host", "--wait", "60")
    warm = ctl("bring", "--tokens", tokens(prompt), "--target", "host", "--wait", str(DEADLINE_S))
    assert warm["state"] == "done" and warm["done"]["tokens"] == 6 * PAGE
    usage = ask(server, prompt)["usage"]
    assert usage["cached_tokens_details"] == {"device": 0, "host": 6 * PAGE, "storage": 0}


def test_text_and_sessions_select_what_their_requests_have(server: ServerProcess, ctl: Ctl) -> None:
    text = "a prompt of some length, so that it has pages " * 4
    ask(server, text, session_id="s1", cache_salt="alice")
    by_text = ctl("locate", "--text", text, "--cache-salt", "alice")["found"]["device"]["tokens"]
    by_session = ctl("locate", "--session", "s1", "--cache-salt", "alice")["found"]["device"]["tokens"]
    assert by_text >= PAGE and by_session >= by_text
    assert ctl("locate", "--text", text)["found"]["device"]["tokens"] == 0, "another namespace"
    assert [row["tenant"] for row in ctl("tenants")["tenants"]].count("salt:alice") == 1
    ctl("forget", "--tenant", "salt:alice", "--wait", str(DEADLINE_S))
    assert ctl("locate", "--text", text, "--cache-salt", "alice")["found"]["device"]["tokens"] == 0


def test_each_operation_of_lmcaches_controller_is_done_by_the_command_that_the_page_names(
    server: ServerProcess, ctl: Ctl
) -> None:
    page = (ROOT / "docs" / "lmcache.md").read_text(encoding="utf-8").partition("## Operations")[2]
    rows = [
        line.split("|")[1:3] for line in page.partition("\n## ")[0].splitlines() if line.startswith("| `")
    ]
    prompt = [11, *PROMPT]
    ask(server, prompt)
    answers, lease = {}, 0
    for name, commands in rows:
        for command in re.findall(r"`hiradix ctl ([^`]*)`", commands):
            asked = command.replace("TOKENS", tokens(prompt)).replace("ID", str(lease)).split()
            answers[name.strip()] = ctl(*asked)
            if asked[0] == "hold":
                lease = answers["`pin`"]["id"]
    assert len(rows) == len(answers) == 10, "each operation has a command, and it succeeds"
    where = answers["`lookup`"]["found"]
    assert [where[tier]["tokens"] for tier in ("device", "host")] == [6 * PAGE] * 2
    assert where["storage"]["is_known"]
    states = {name: answer["state"] for name, answer in answers.items() if "state" in answer}
    for name in ("`move`", "`move` with `copy`", "`compress`", "`decompress`", "`clear`"):
        assert states[name] == "done", states
    assert answers["`move` with `copy`"]["done"]["tokens"] == 6 * PAGE, "back from storage"
    assert answers["`check_finish`"]["id"] == lease and answers["`clear`"]["by_tier"]["storage"]["pages"] == 6
    assert cached(ask(server, prompt)) == 0, "cleared"


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("hold", "--ttl", "5"), 1, "selector"),
        (("hold", "--tokens", "1,x", "--ttl", "5"), 2, "--tokens"),
        (("hold", "--tokens", "1", "--text", "b", "--ttl", "5"), 1, "selector"),
        (("hold", "--tokens", tokens(PROMPT), "--ttl", "-1"), 1, "ttl_s"),
        (("bring", "--tokens", "1,2", "--target", "nowhere"), 1, "nowhere"),
        (("release", "999999"), 1, "id"),
        (("status", "999999"), 1, "id"),
        (("explain", "nobody"), 1, "id"),
        (("explain", "no body"), 1, "id"),
    ],
)
def test_what_is_wrong_is_named(ctl: Ctl, arguments: tuple[str, ...], status: int, said: str) -> None:
    assert said in ctl(*arguments, status=status)


def test_without_the_key_nothing_is_told(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIRADIX_ADMIN_API_KEY", "wrong")
    assert main(["ctl", "--url", server.url, "locate", "--everything"]) == 1
    for path in ("/hicache/intents", "/hicache/intents/1", "/hicache/tenants", "/explain", "/explain/x"):
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            assert httpx.get(server.url + path, headers=headers).status_code == 401, path
    reply = httpx.post(f"{server.url}/hicache/prefix/forget", json={"selector": {"everything": True}})
    assert reply.status_code == 401


@pytest.mark.parametrize("as_file", [True, False])
def test_what_is_no_key_is_not_sent_and_not_shown(
    as_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_text("k1secret\nk2secret\n")
    monkeypatch.setenv("HIRADIX_ADMIN_API_KEY", "k1secret\nk2secret")
    more = ["--key-file", str(tmp_path / "key")] if as_file else []
    assert main(["ctl", *more, "status"]) == 2
    err = capsys.readouterr().err
    assert "a key must be non-empty printable ASCII text" in err and "secret" not in err
    (tmp_path / "key").write_bytes(b"\xff\xfe")
    assert main(["ctl", "--key-file", str(tmp_path / "key"), "status"]) == 2
    assert "not a text file" in capsys.readouterr().err


def test_metrics_say_why_tokens_were_computed(server: ServerProcess) -> None:
    ask(server, [10, *PROMPT])
    text = httpx.get(f"{server.url}/metrics").text
    lines = [line for line in text.splitlines() if line.startswith("hiradix:computed_tokens_total{")]
    by_reason = sum(float(line.split()[-1]) for line in lines)
    prompt = sum(
        float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith("sglang:prompt_tokens_total{")
    )
    total = sum(
        float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith("sglang:cached_tokens_total{") and 'cache_source="total"' in line
    )
    assert lines and by_reason == prompt - total


@pytest.mark.parametrize(
    ("states", "status"),
    [
        (["done"], 0),
        (["accepted", "running", "held"], 0),
        (["running", "expired"], 1),
        (["running", "cancelled"], 1),
        (["running"], 1),
    ],
)
def test_the_status_of_a_wait_says_how_it_ended(
    states: list[str], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last state is answered from then on; the clock is over where none is left."""
    left = list(states)

    def ask(server: AdminClient, *_: object, timeout_s: float = 0.0) -> dict[str, Any]:
        assert timeout_s <= 10.0
        return {"id": 7, "state": left.pop(0) if len(left) > 1 else left[0]}

    times = iter(range(100))
    monkeypatch.setattr(AdminClient, "ask", ask)
    monkeypatch.setattr(ctl_command, "time", SimpleNamespace(monotonic=lambda: next(times), sleep=bool))
    hold = ("hold", "--tokens", "1,2", "--ttl", "60")
    assert main(["ctl", "--json", *hold, "--wait", "9"]) == status
    assert json.loads(capsys.readouterr().out)["state"] == states[-1]
    left[:] = ["running"]
    assert main(["ctl", "--json", *hold]) == 0, "without --wait it is under way"


def test_what_is_no_time_and_what_is_no_receipt_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hold = ("ctl", "hold", "--tokens", "1", "--ttl", "60")
    for wrong in ("-1", "inf", "nan", "soon"):
        with pytest.raises(SystemExit):
            main([*hold, f"--wait={wrong}"])
        assert "argument --wait" in capsys.readouterr().err
    monkeypatch.setattr(AdminClient, "ask", lambda *_: "<html>")
    assert main(hold) == 1
    assert "no receipt, but '<html>'" in capsys.readouterr().err


def test_an_answer_that_breaks_off_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Of an error, too, whose text is read when it is known to be one."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def break_off() -> None:
            with listening.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 500 no\r\ncontent-length: 99\r\n\r\nno")

        thread = threading.Thread(target=break_off, daemon=True)
        thread.start()
        assert main(["ctl", "--url", f"http://127.0.0.1:{listening.getsockname()[1]}", "tenants"]) == 1
        thread.join(30)
    assert "does not answer" in capsys.readouterr().err
