"""Servers that behave oddly, and runs that break off: no verdict that was not earned, no key in any report."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from hiradix.apps.certify import main as command
from hiradix.apps.certify.client import Reply, ServerUnderTest, Token
from hiradix.apps.certify.judge import Judge, Likeness, Noise
from hiradix.apps.certify.prompts import Prompt
from hiradix.cli import main
from tests.certify import fake as fakes
from tests.certify.fake import URL, Fake, Traits
from tests.certify.test_command import FAST, failed
from tests.certify.test_fake import SMALL, certified, found, shown

SMALL_TRAITS = {"device_pages": 120, "tiers": True}
Handler = Callable[[httpx.Request], httpx.Response | None]


class Odd(Fake):
    """A fake before which something else may answer."""

    before: Handler = staticmethod(lambda request: None)

    async def _handle(self, request: httpx.Request) -> httpx.Response:
        return self.before(request) or await super()._handle(request)


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has the command talk to an odd fake."""

    def serve(before: Handler, **traits: Any) -> None:
        server_of = Odd(Traits(**(SMALL_TRAITS | traits)))
        server_of.before = before  # type: ignore[method-assign]

        def server(url: str, **settings: Any) -> ServerUnderTest:
            return ServerUnderTest(url, transport=server_of.transport, clock=server_of.clock, **settings)

        monkeypatch.setattr(command, "ServerUnderTest", server)

    return serve


def test_a_server_that_refuses_every_third_request_for_now_is_judged_all_the_same(
    odd: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    count = [0]

    def busy(request: httpx.Request) -> httpx.Response | None:
        count[0] += request.method == "POST"
        is_refused = request.method == "POST" and count[0] % 3 == 0 and request.url.path != "/flush_cache"
        return httpx.Response(429, headers={"retry-after": "0"}) if is_refused else None

    odd(busy)
    assert main(["certify", URL, *FAST, "--minutes", "1000", "--require", "salt,device,split"]) == 0
    assert "RIGHT: noise, cold, device, split" in capsys.readouterr().out


def test_a_server_that_is_too_busy_to_say_what_it_reads_is_not_judged(
    odd: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def busy(request: httpx.Request) -> httpx.Response | None:
        is_salted = b"cache_salt" in request.content
        return httpx.Response(503, headers={"retry-after": "0"}) if is_salted else None

    odd(busy)
    assert "HTTP 503: it is too busy to be judged" in failed(capsys, URL, *FAST)


def test_a_server_that_draws_its_answers_is_not_called_wrong(
    odd: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not heed the temperature."""

    class Drawing(fakes._Run):
        def decode(self) -> None:
            for at in range(self.body["max_tokens"]):
                logits = self._logits(at)
                total = math.log(sum(map(math.exp, logits.values())))
                top = sorted(((v - total, name) for name, v in logits.items()), reverse=True)
                chosen = self.fake._draw.choice(top[:20])
                self.chosen.append((chosen[1], chosen[0], {n: v for v, n in [*top[:5], chosen]}))
                self._compute(chosen[1])
                self.said.append(chosen[1])

    monkeypatch.setattr(fakes, "_Run", Drawing)
    odd(lambda request: None)
    assert main(["certify", URL, *FAST, "--minutes", "1000"]) == 2
    assert "answers are drawn, not greedy" in capsys.readouterr().err


def test_time_that_is_over_before_anything_is_judged_is_no_verdict(
    odd: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    odd(lambda request: None)
    assert "--minutes 1e-06: over before" in failed(capsys, URL, *FAST, "--minutes", "1e-6")


def test_what_breaks_in_the_command_itself_is_no_verdict(
    odd: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def models(request: httpx.Request) -> httpx.Response | None:
        cards = {"data": [{"id": "fake", "max_model_len": "plenty"}]}
        return httpx.Response(200, json=cards) if request.url.path == "/v1/models" else None

    odd(models)
    assert main(["certify", URL, *FAST]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("fault", ["", "device"])
def test_a_flush_that_fails_takes_no_finding_back(
    fault: str, odd: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def locked(request: httpx.Request) -> httpx.Response | None:
        return httpx.Response(403) if request.url.path == "/empty" else None

    odd(locked, fault=fault)
    flags = ["--flush", "/empty", "--minutes", "1000", "--repro", str(tmp_path / "wrong")]
    assert main(["certify", URL, *FAST, *flags]) == (1 if fault else 2)
    assert "--flush /empty: HTTP 403" in capsys.readouterr().out


@pytest.mark.parametrize("fault", ["", "device"])
def test_a_report_that_cannot_be_written_changes_no_verdict_to_right_or_wrong(
    fault: str, odd: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def full(*args: Any, **settings: Any) -> int:
        raise OSError("no space left")

    odd(lambda request: None, fault=fault)
    monkeypatch.setattr(Path, "write_text", full)
    flags = ["--json", str(tmp_path / "x"), "--minutes", "1000", "--repro", str(tmp_path / "wrong")]
    assert main(["certify", URL, *FAST, *flags]) == (1 if fault else 2)
    assert "could not be written: no space left" in capsys.readouterr().err


def test_no_report_has_a_key(
    odd: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The server repeats what it was sent; the command that restarts it has a key in it."""

    count = [0]

    def repeats(request: httpx.Request) -> httpx.Response | None:
        count[0] += request.method == "POST"
        said = f"refused: {dict(request.headers)}"
        return httpx.Response(500, text=said) if count[0] > 60 and count[0] % 7 == 0 else None

    odd(repeats, fault="device", key="sk-secret")
    file, again = tmp_path / "r.json", tmp_path / "again"
    flags = ["--restart", "true --api-key sk-secret #", "--json", str(file), "--repro", str(again)]
    main(["certify", URL, *FAST, *flags, "--minutes", "1000", "--api-key", "sk-secret"])
    out = capsys.readouterr()
    files = [path.read_text() for path in (file, *again.iterdir())]
    assert "***" in file.read_text() and json.loads(file.read_text())["status"] == 1
    assert not any("sk-secret" in text for text in (out.out, out.err, *files))


@pytest.mark.parametrize("flags", [("http://me:word@host:1",), (URL, "--flush", "http://me:word@host/x")])
def test_a_password_in_a_url_is_refused_and_not_repeated(
    flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "word@" not in failed(capsys, *flags)


@pytest.mark.parametrize("other", [math.nan, -math.inf])
def test_a_log_probability_that_is_no_number_is_far_from_every_other(other: float) -> None:
    right = Reply(
        Prompt("p", ("x",)), "/", {}, "a", (Token("a", -0.5, {"a": -0.5}),), "stop", 1, 0, None, 1.0
    )
    spoilt = replace(right, tokens=(Token("a", other, {"a": other}),))
    assert Judge(Noise()).compare(right, spoilt).kind is Likeness.DRIFT


def test_log_probabilities_that_are_never_numbers_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fakes._Run.whole

    def spoilt(self: Any) -> dict[str, Any]:
        self.chosen = [(name, -math.inf, dict.fromkeys(top, -math.inf)) for name, _, top in self.chosen]
        return whole(self)

    def answer(
        status: int, json: Any = None, **more: Any
    ) -> httpx.Response:  # as servers that write -Infinity
        return real(status, text=to_text(json), **more) if json is not None else real(status, **more)

    real, to_text = httpx.Response, json.dumps
    monkeypatch.setattr(fakes._Run, "whole", spoilt)
    monkeypatch.setattr(fakes.httpx, "Response", answer)
    ladder = certified(Traits(device_pages=220), **SMALL)
    assert ladder.server.able.num_top == 0 and found(ladder) == set(), shown(ladder)
