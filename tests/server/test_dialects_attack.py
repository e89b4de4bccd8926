"""Requests and answers that are meant to break the server: each is answered, or refused by its field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from hiradix.apps.engine.api import Output
from hiradix.apps.server.tools import FORMATS, CallReader, TextDelta
from tests.server.scripted import ANSWER, ScriptedService, application, piece

USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}


def ask(
    path: str, body: dict[str, Any], script: tuple[Output, ...] = ANSWER, template: str = ""
) -> tuple[ScriptedService, Any]:
    service = ScriptedService(script)
    assert service.tokenizer is not None
    service.tokenizer.chat_template = template
    http = TestClient(application(service), raise_server_exceptions=False)
    return service, http.post(path, content=json.dumps(body))


@pytest.mark.parametrize("template", ["tools [TOOL_CALLS]", "tools <|python_tag|>"])
def test_tools_of_a_model_whose_mark_is_a_special_token(template: str) -> None:
    service, reply = ask("/v1/chat/completions", {"messages": USER, "tools": [TOOL]}, template=template)
    assert reply.status_code == 200, reply.text
    assert not service.requests[0].params.skip_special_tokens


@pytest.mark.parametrize(
    "template", ["tools <tool_call><function=", "tools <tool_call>", "tools", "tools [TOOL_CALLS] [ARGS]"]
)
@pytest.mark.parametrize("is_call", [True, False])
def test_a_form_beside_tools_is_read_as_its_grammar_writes(template: str, is_call: bool) -> None:
    """A family whose calls are no JSON writes them so under a grammar."""
    text = '{"name": "get", "arguments": {"x": 1}}' if is_call else '{"age": 7}'
    if is_call and template == "tools <tool_call>":
        text = f"<tool_call>\n{text}\n</tool_call>"
    script = (*map(piece, text), piece("", "stop"))
    body = {"messages": USER, "tools": [TOOL], "response_format": {"type": "json_object"}}
    service, reply = ask("/v1/chat/completions", body, script, template)
    [choice] = reply.json()["choices"]
    if not is_call:
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
        return
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "get", "arguments": '{"x": 1}'}, choice
    assert choice["finish_reason"] == "tool_calls" and (len(call["id"]) == 9) == ("[ARGS]" in template)
    assert any(marker in text for marker in service.requests[0].params.tool_markers)


def test_the_highest_seed_has_answers_of_its_own() -> None:
    service, reply = ask("/v1/completions", {"prompt": "a", "n": 3, "seed": 2**63 - 1})
    assert reply.status_code == 200, reply.text
    assert [one.params.seed for one in service.requests] == [2**63 - 1, -(2**63), -(2**63) + 1]


@pytest.mark.parametrize("name", ["", "a b", "x" * 129])
def test_a_functions_name_is_checked_in_every_dialect(name: str) -> None:
    flat = {"type": "function", "name": name}
    bodies: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/responses", {"input": "a", "tools": [flat]}, "tools.0.name"),
        (
            "/v1/chat/completions",
            {"messages": USER, "tools": [{"type": "function", "function": {"name": name}}]},
            "tools.0.function.name",
        ),
    ]
    for path, body, field in bodies:
        service, reply = ask(path, body)
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["param"] == field and not service.requests


def test_a_hint_names_the_field_that_its_template_cannot_have() -> None:
    _, reply = ask("/v1/end_of_session", {"messages": USER, "chat_template_kwargs": {"tools": 1}})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "chat_template_kwargs"


HALF = "\\ud800"
NO_CALLS = [
    r'{"name": "get\_x", "arguments": {"x": 1}}',
    r'{"name": "\u12", "arguments": {"x": 1}}',
    '{"name": "", "arguments": {"x": 1}}',
    f'{{"name": "{HALF}", "arguments": {{"x": 1}}}}',
    f'{{"name": "get", "arguments": "{HALF}"}}',
]
CALLS = [
    '{"name": "get", "arguments": {"x": 1e999}}',
    '{"name": "get", "arguments": {"x": NaN}}',
    f'{{"name": "get", "arguments": {{"x": "{HALF}"}}}}',
    f'{{"arguments": {{"x": "{HALF}"}}, "name": "get"}}',
    '{"name": "get", "arguments": ' + '{"a":' * 5000 + "1" + "}" * 5001,
    '{"name": "get", "arguments": "5"}',
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("call", [*NO_CALLS, *CALLS], ids=lambda call: call[:60])
def test_no_call_that_a_model_writes_breaks_an_answer(call: str, stream: bool) -> None:
    script = (piece(f"<tool_call>{call}</tool_call>", "tool_calls"),)
    flat = {"type": "function", "name": "get"}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": USER, "tools": [TOOL]}),
        ("/v1/messages", {"messages": USER, "max_tokens": 9, "tools": [{"name": "get", "input_schema": {}}]}),
        ("/v1/responses", {"input": "a", "tools": [flat]}),
    ]
    for path, body in bodies:
        _, reply = ask(path, {**body, "stream": stream}, script)
        assert reply.status_code == 200, (path, reply.text)
        is_call = '"name":"get"' in reply.text
        assert is_call == (call in CALLS), (path, reply.text)
        if stream:
            assert (
                reply.text.count("[DONE]")
                or '"stop_reason":"' in reply.text
                or "response.completed" in reply.text
            )
    _, reply = ask(*bodies[1], script)
    for block in reply.json()["content"]:
        assert block["type"] == "text" or isinstance(block["input"], dict)


@pytest.mark.parametrize("answer", ["<function= >x</function>", '[get(x="\\ud800")]'])
def test_a_call_of_another_form_has_a_name_and_whole_characters(answer: str) -> None:
    form = "qwen3_coder" if "function" in answer else "pythonic"
    reader = CallReader(FORMATS[form])
    deltas = [
        *reader.push(f"<tool_call>{answer}</tool_call>" if form == "qwen3_coder" else answer),
        *reader.finish(),
    ]
    for delta in deltas:
        text = delta.text if isinstance(delta, TextDelta) else delta.arguments
        assert text.encode()
        assert isinstance(delta, TextDelta) or delta.name == "get"


@pytest.mark.parametrize(
    ("wish", "field"),
    [({"\ud800": 1}, r"hiradix.\ud800"), ({"verb": "bring", "target": "\ud800"}, "hiradix.target")],
)
def test_half_a_character_in_a_wish_is_named(wish: dict[str, Any], field: str) -> None:
    """Before anything runs: no answer could show it."""
    service = ScriptedService()
    body = json.dumps({"prompt": "a", "hiradix": wish})
    reply = TestClient(application(service), raise_server_exceptions=False).post(
        "/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    assert reply.status_code == 400 and reply.json()["error"]["param"] == field
    assert not service.requests
