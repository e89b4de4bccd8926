"""The command: what cannot be judged is said in one line, what is wrong can be sent again."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from hiradix.apps.certify import main as command
from hiradix.apps.certify.client import CertifyError, RequestFailed, ServerUnderTest
from hiradix.apps.certify.prompts import Prompt
from hiradix.cli import main
from tests.certify.fake import URL, Fake, Traits

FAST = ("--prompt-tokens", "100", "--settle", "0", "--pressure", "1500", "--max-tokens", "4", "--run", "test")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Callable[[Traits], None]:
    """Has the command talk to a fake."""

    def serve(traits: Traits) -> None:
        fake = Fake(traits)

        def server(url: str, **settings: object) -> ServerUnderTest:
            return ServerUnderTest(url, transport=fake.transport, clock=fake.clock, **settings)  # type: ignore[arg-type]

        monkeypatch.setattr(command, "ServerUnderTest", server)

    return serve


SMALL = {"device_pages": 120, "tiers": True}


def test_a_right_server_ends_with_0_and_a_record(
    served: Callable[[Traits], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served(Traits(**SMALL))  # type: ignore[arg-type]
    file = tmp_path / "result.json"
    assert main(["certify", URL, *FAST, "--json", str(file), "--minutes", "1000"]) == 0
    out = capsys.readouterr()
    assert "\nRIGHT: noise, cold, device" in out.out and "restart  " in out.err
    record = json.loads(file.read_text())
    assert record["status"] == 0 and record["findings"] == [] and record["hits_by"] == "usage"
    assert [arm["name"] for arm in record["arms"]] == command.ARMS
    assert record["arms"][command.ARMS.index("restart")]["state"] == "not offered"


def test_a_wrong_one_ends_with_1_and_the_requests_to_send_again(
    served: Callable[[Traits], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served(Traits(fault="stream", key="secret", **SMALL))  # type: ignore[arg-type]
    flags = ["--repro", str(tmp_path / "again"), "--api-key", "secret", "--json", str(tmp_path / "r.json")]
    assert main(["certify", URL, *FAST, *flags, "--minutes", "1000"]) == 1
    out = capsys.readouterr().out
    assert "\nWRONG: wrong answer" in out and "stream: wrong answer: " in out and "in place of" in out
    got = json.loads((tmp_path / "again" / "1-got.json").read_text())
    reference = json.loads((tmp_path / "again" / "1-reference.json").read_text())
    assert got["stream"] is True and got["prompt"] == reference["prompt"] and "cache_salt" in reference
    assert f"-d @{tmp_path}/again/1-got.json" in out and "$API_KEY" in out and "secret" not in out
    assert "secret" not in (tmp_path / "r.json").read_text()


def test_an_arm_that_is_required_and_not_shown_ends_with_2(
    served: Callable[[Traits], None], capsys: pytest.CaptureFixture[str]
) -> None:
    served(Traits(**SMALL))  # type: ignore[arg-type]
    assert main(["certify", URL, *FAST, "--require", "restart", "--minutes", "1000"]) == 2
    assert "NOT JUDGED: restart: not offered, needs --restart COMMAND" in capsys.readouterr().out


def test_a_restart_that_fails_is_told(
    served: Callable[[Traits], None], capsys: pytest.CaptureFixture[str]
) -> None:
    served(Traits(**SMALL))  # type: ignore[arg-type]
    assert (
        main(["certify", URL, *FAST, "--restart", "echo no such unit >&2; exit 3", "--minutes", "1000"]) == 2
    )
    assert "restart: 1 requests failed: --restart: exit status 3: no such unit" in capsys.readouterr().out


def failed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The line the command ends with, which must be the only one."""
    assert main(["certify", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("hiradix certify: error: "), err
    return err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("ftp://x",), "expected http://HOST:PORT"),
        (("http://x:99999",), "Port out of range"),
        ((URL, "--prompt-tokens", "10"), "--prompt-tokens"),
        ((URL, "--minutes", "0"), "--minutes"),
        ((URL, "--settle", "-1"), "--settle"),
        ((URL, "--pressure", "0"), "--pressure"),
        ((URL, "--require", "cold,warm"), "--require: warm: the arms are noise, cold,"),
        ((URL, "--json", "/no/such/folder/x"), "--json"),
    ],
)
def test_a_flag_that_cannot_be_used_is_named(
    flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in failed(capsys, *flags)


def test_no_server_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        assert f"{url}: no connection" in failed(capsys, url)


def test_a_key_that_is_missing_is_asked_for(
    served: Callable[[Traits], None], capsys: pytest.CaptureFixture[str]
) -> None:
    served(Traits(key="secret"))
    assert "HTTP 401: give the key with --api-key" in failed(capsys, URL)


def test_a_model_that_is_unknown_is_told(
    served: Callable[[Traits], None], capsys: pytest.CaptureFixture[str]
) -> None:
    served(Traits())
    assert "--model other: unknown, the server has fake" in failed(capsys, URL, "--model", "other")


def answering(handle: Callable[[httpx.Request], httpx.Response]) -> ServerUnderTest:
    return ServerUnderTest(URL, transport=httpx.MockTransport(handle), model="m")


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (httpx.Response(200, text="<html>"), "not the list of an OpenAI-compatible server"),
        (httpx.Response(200, json=[]), "not the list of an OpenAI-compatible server"),
        (httpx.Response(403), "HTTP 403: give the key"),
    ],
)
def test_what_is_no_such_server_is_told(reply: httpx.Response, said: str) -> None:
    with pytest.raises(CertifyError, match=said):
        asyncio.run(answering(lambda request: reply).connect())


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (httpx.Response(500, text="boom"), "HTTP 500: boom"),
        (httpx.Response(200, text="nonsense"), "not an answer of the OpenAI API"),
        (httpx.Response(200, json={"choices": [{"text": "a"}]}), "no finish_reason"),
        (httpx.Response(200, json={"error": {"message": "late"}}), "broke off: .*late"),
    ],
)
def test_a_request_that_fails_says_why(reply: httpx.Response, said: str) -> None:
    with pytest.raises(RequestFailed, match=said):
        asyncio.run(answering(lambda request: reply).ask(Prompt("p", ("p",))))


def test_an_answer_that_never_comes_is_given_up() -> None:
    async def never(request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    server = ServerUnderTest(URL, transport=httpx.MockTransport(never), model="m", timeout_s=0.01)
    with pytest.raises(RequestFailed, match="no answer within 0.01 s"):
        asyncio.run(server.ask(Prompt("p", ("p",))))
