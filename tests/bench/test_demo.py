"""The demo's own parts: process handling on a stand-in command, output without a terminal, its verdict."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from hiradix.apps.bench.client import Sources
from hiradix.apps.bench.report import compare
from hiradix.apps.bench.workload import Workload
from hiradix.apps.demo.driver import Demo, DemoConfig
from hiradix.apps.demo.process import ServerFailed, ServerProcess
from hiradix.apps.demo.view import View, result_table, show_verdict
from tests.bench.test_report import made

HEALTHY = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class H(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
print("up", flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[1])), H).serve_forever()
"""


def process(tmp_path: Path, code: str) -> ServerProcess:
    made = ServerProcess([], tmp_path / "logs" / "server.log")
    made.command = [sys.executable, "-c", code, str(made.port)]
    return made


def test_a_process_is_ready_on_entry_and_gone_on_exit(tmp_path: Path) -> None:
    server = process(tmp_path, HEALTHY)
    with server:
        assert server.exit_code() is None
    assert server.exit_code() == -15
    assert "up" in server.tail()


def test_a_killed_process_is_gone(tmp_path: Path) -> None:
    with process(tmp_path, HEALTHY) as server:
        server.kill()
        assert server.exit_code() == -9


def test_a_process_that_dies_shows_its_last_words_and_its_log(tmp_path: Path) -> None:
    server = process(tmp_path, "import sys; sys.exit('no such model')")
    with pytest.raises(ServerFailed, match="(?s)exit code 1.*no such model.*server.log"):
        server.launch()


def test_a_process_that_never_answers_is_given_up(tmp_path: Path) -> None:
    server = process(tmp_path, "import threading; threading.Event().wait()")
    server.start()
    with pytest.raises(ServerFailed, match="not ready after 0 s"):
        server.wait_ready(timeout_s=0.3)
    server.kill()


def view() -> tuple[View, io.StringIO]:
    out = io.StringIO()
    return View(Console(file=out, force_terminal=False, width=80, highlight=False)), out


def test_progress_without_a_terminal_is_plain_lines() -> None:
    shown, out = view()
    with shown.working("starting"), shown.phase("first turns", 9) as progress:
        for _ in range(9):
            progress(made("a", sources=Sources(host=70, computed=30)))
    lines = out.getvalue().splitlines()
    assert lines[0] == "starting ..."
    assert [line.split("(")[0].strip() for line in lines[1:]] == ["first turns: 8/9", "first turns: 9/9"]
    assert "100 tokens, host, 1.00 s" in lines[1]


def test_progress_on_a_terminal_is_a_bar() -> None:
    out = io.StringIO()
    shown = View(Console(file=out, force_terminal=True, width=120))
    with shown.working("starting"), shown.phase("first turns", 2) as progress:
        progress(made("a"))
    assert "first turns" in out.getvalue() and "1/2" in out.getvalue()


def test_the_table_and_the_last_line() -> None:
    shown, out = view()
    ours = [
        made("ab", sources=Sources(host=1500, computed=10)),
        made("cd", sources=Sources(device=64, computed=9)),
    ]
    off = [made("ab", ttft_s=4.0), made("cd", ttft_s=0.3)]
    shown.console.print(result_table(ours, off))
    show_verdict(shown, {"it was fast": True, "it was free": False}, compare(ours, off))
    text = out.getvalue()
    assert "1,000+ tokens" in text and " 4.00" in text and "1,500" in text
    assert "yes  it was fast\nNO   it was free\n" in text
    assert text.endswith("answers identical to cache-off: 2 of 2\n")


def demo(tmp_path: Path, ours: list, reference: list) -> Demo:  # type: ignore[type-arg]
    made_demo = Demo(DemoConfig(Path("model"), tmp_path), Workload((), ()), view()[0])
    made_demo._by_phase = [ours]
    made_demo.reference = reference
    made_demo.num_restored_tokens = 5
    return made_demo


def test_claims_hold_only_when_every_tier_helped(tmp_path: Path) -> None:
    def run(storage: int, ttft_s: float) -> list[bool]:
        ours = [
            made("a", sources=Sources(device=1100)),
            made("a", sources=Sources(host=1100), ttft_s=ttft_s),
            made("a", sources=Sources(storage=storage), ttft_s=0.5),
        ]
        off = [made("a", ttft_s=2.0, sources=Sources(computed=1100)) for _ in ours]
        return list(demo(tmp_path, ours, off).claims().values())

    assert run(1100, 0.5) == [True] * 5
    assert run(100, 0.5) == [False, True, True, True, False]
    assert run(1100, 2.5) == [True, True, True, False, True]
