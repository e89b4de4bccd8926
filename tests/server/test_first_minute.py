"""The first minute: a missing extra is named, a start says what it does, pages load nothing from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from hiradix.apps.demo.__main__ import next_steps
from hiradix.apps.engine import smollm2
from hiradix.apps.server import flags, serve
from hiradix.apps.server.api_docs import BODIES
from hiradix.apps.server.flags import parse_serve_args
from hiradix.cli import EXTRAS, USAGE
from hiradix.intents import http as intents_http
from tests.project.repo import ROOT
from tests.server.scripted import ScriptedService, application

BARE = "import sys\nfor name in {names!r}:\n    sys.modules[name] = None\n"
THIRD_PARTY = [
    "torch",
    "transformers",
    "fastapi",
    "pydantic",
    "uvicorn",
    "httpx",
    "rich",
    "msgspec",
    "prometheus_client",
]


def model_dir(folder: Path) -> Path:
    (folder / "config.json").write_text("{}")
    return folder


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)


def test_every_command_has_its_extras() -> None:
    named = USAGE.partition("{")[2].partition("}")[0].split(",")
    assert set(EXTRAS) <= set(named)


@pytest.mark.parametrize("command", ["serve", "bench", "certify"])
def test_without_its_extra_a_command_says_which(command: str) -> None:
    arguments = {"serve": ["serve", "--model-path", "x"]}.get(command, [command, "http://127.0.0.1:1"])
    ended = run(
        BARE.format(names=THIRD_PARTY) + f"from hiradix.cli import main\nsys.exit(main({arguments!r}))"
    )
    assert "Traceback" not in ended.stderr, ended.stderr
    if ended.returncode == 2 and "is not installed" in ended.stderr:
        assert f"pip install 'hiradix[{EXTRAS[command]}]'" in ended.stderr


def test_anothers_missing_module_is_an_error_like_any_other() -> None:
    code = (
        "from hiradix import cli\ncli._command = lambda a: __import__('hiradix.nothing')\ncli.main(['serve'])"
    )
    assert "Traceback" in run(code).stderr


def test_the_demos_model_is_known_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_dir(tmp_path)
    monkeypatch.setattr(flags, "smollm2_path", lambda: folder)
    config = parse_serve_args(["--model-path", smollm2.MODEL_NAME])
    assert config.engine.model_path == str(folder) and config.model_name == smollm2.MODEL_NAME


def test_a_model_is_known_by_its_folders_name_too(tmp_path: Path) -> None:
    folder = model_dir(tmp_path)
    assert parse_serve_args(["--model-path", str(folder)]).other_names == (folder.name,)
    assert parse_serve_args(["--model-path", str(folder), "--served-model-name", "x"]).other_names == ()


def test_a_start_says_at_once_what_it_does(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "PROGRESS_S", 0.001)
    config = parse_serve_args(["--model-path", str(model_dir(tmp_path))])
    with serve._progress(config):
        first = capfd.readouterr().out
        while "still loading" not in first:
            first += capfd.readouterr().out
    assert first.startswith(f"hiradix serve: loading {config.model_name} (")


def test_the_demo_ends_with_three_things_to_try() -> None:
    lines = next_steps(Path("/models/x"), is_default=True)
    assert [line.strip()[:2] for line in lines if line.strip()[:1].isdigit()] == ["1.", "2.", "3."]
    assert f"--model-path {smollm2.MODEL_NAME}" in "\n".join(lines)
    assert "--model-path /models/x" in "\n".join(next_steps(Path("/models/x"), is_default=False))


def test_the_endpoints_are_described() -> None:
    http = TestClient(application(ScriptedService()))
    schema = http.get("/openapi.json").json()
    assert set(BODIES) <= set(schema["paths"])
    operations = [(path, one) for path, methods in schema["paths"].items() for one in methods.values()]
    assert len({one["operationId"] for _, one in operations}) == len(operations)
    for path, one in operations:
        named = [known["name"] for known in one["parameters"] if known["in"] == "path"]
        assert sorted(named) == sorted(re.findall(r"{(\w+)}", path)), path
    wish = schema["components"]["schemas"]["WishBody"]["properties"]
    assert set(wish) == set(intents_http.FIELDS), "the schema has the fields that are read"
    chat = schema["components"]["schemas"]["ChatBody"]["properties"]
    assert {"messages", "tools", "response_format", "top_k"} <= set(chat)
    reply = http.get("/docs")
    assert reply.status_code == 200 and "default-src 'none'" in reply.headers["content-security-policy"]
    assert "<script" not in reply.text and "://" not in reply.text
    assert "POST /v1/messages" in reply.text and "repetition_penalty" in reply.text
    closed = TestClient(application(ScriptedService(), api_key="secret"))
    assert closed.get("/docs").status_code == 401 and closed.get("/openapi.json").status_code == 401
