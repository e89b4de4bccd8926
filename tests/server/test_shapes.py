"""Request shapes that popular clients send: each taken with its effect, or refused by name."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import Any

import llguidance  # noqa: F401
import pytest
from starlette.testclient import TestClient

from hiradix.apps.engine.api import SamplingParams
from tests.server.scripted import CharTokenizer, ScriptedService, application, piece

CHAT, TEXT = "chat/completions", "completions"
USER = [{"role": "user", "content": "hi"}]
PNG = {"type": "image_url", "image_url": {"url": "data:image/png;base64,x"}}
TOOL = {"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": '{"x": 1}'}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def ask(path: str, body: dict[str, Any]) -> tuple[ScriptedService, Any]:
    service = ScriptedService([piece("Hel"), piece("lo!", "stop", num_done=6)])
    with_prompt = {**({"messages": USER} if path == CHAT else {"prompt": "hi"}), **body}
    return service, TestClient(application(service)).post(f"/v1/{path}", json=with_prompt)


TAKEN: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (CHAT, {"repetition_penalty": 1.0}, {}),
    (CHAT, {"top_k": -1, "min_p": 0}, {"top_k": 0, "min_p": 0.0}),
    (CHAT, {"top_k": 20, "min_p": 0.1}, {"top_k": 20, "min_p": 0.1}),
    (CHAT, {"presence_penalty": 0, "frequency_penalty": 0}, {}),
    (
        CHAT,
        {"presence_penalty": 0.5, "frequency_penalty": -1},
        {"presence_penalty": 0.5, "frequency_penalty": -1},
    ),
    (CHAT, {"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
    (CHAT, {"logit_bias": {"5": -100, "7": 0}}, {"logit_bias": ((5, -100.0),)}),
    (CHAT, {"logit_bias": {}}, {"logit_bias": ()}),
    (TEXT, {"min_tokens": 3}, {"min_new_tokens": 3}),
    (
        TEXT,
        {"stop": "x", "include_stop_str_in_output": True},
        {"stop": ("x",), "include_stop_str_in_output": True},
    ),
    (TEXT, {"stop": None, "stop_token_ids": []}, {"stop": (), "stop_token_ids": ()}),
    (
        TEXT,
        {"ignore_eos": True, "skip_special_tokens": False},
        {"ignore_eos": True, "skip_special_tokens": False},
    ),
    (TEXT, {"spaces_between_special_tokens": True}, {}),
    (TEXT, {"best_of": 1, "suffix": None, "use_beam_search": False, "length_penalty": 1.0}, {}),
    (TEXT, {"prompt_logprobs": 2}, {"prompt_logprobs": 2}),
    (TEXT, {"echo": True, "logprobs": 3}, {"prompt_logprobs": 3, "logprobs": 3}),
    (TEXT, {"echo": False}, {"prompt_logprobs": None}),
    (TEXT, {"max_tokens": 0, "echo": True, "logprobs": 1}, {"max_new_tokens": 1}),
    (CHAT, {"logprobs": False, "top_logprobs": 0}, {"logprobs": None}),
    (CHAT, {"rid": "mine"}, {}),
    (CHAT, {"request_id": "mine", "user": "u", "metadata": {"a": "b"}, "store": False}, {}),
    (CHAT, {"response_format": {"type": "text"}}, {"grammar": None}),
    (CHAT, {"tools": [], "tool_choice": "auto"}, {"tool_markers": ()}),
    (CHAT, {"tools": [TOOL], "tool_choice": "none"}, {"tool_markers": ()}),
    (CHAT, {"tools": [TOOL], "parallel_tool_calls": False}, {"tool_markers": ("<tool_call>",)}),
    (CHAT, {"tools": None, "tool_choice": None, "functions": None, "function_call": None}, {}),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, {}),
    (CHAT, {"add_generation_prompt": True, "continue_final_message": False}, {}),
    (CHAT, {"stream_options": None, "stream": False}, {}),
    (CHAT, {"reasoning_effort": None, "modalities": ["text"], "audio": None, "prediction": None}, {}),
    (CHAT, {"separate_reasoning": True, "lora_path": None, "truncate_prompt_tokens": None}, {}),
    (CHAT, {"max_completion_tokens": 5}, {"max_new_tokens": 5}),
    (CHAT, {"service_tier": "auto", "safety_identifier": "x", "prompt_cache_key": "k"}, {}),
]


@pytest.mark.parametrize(("path", "body", "effect"), TAKEN, ids=lambda value: str(value)[:60])
def test_it_is_taken_with_its_effect(path: str, body: dict[str, Any], effect: dict[str, Any]) -> None:
    service, reply = ask(path, body)
    assert reply.status_code == 200, reply.text
    params = service.requests[0].params
    for name, value in effect.items():
        assert getattr(params, name) == value
    plain = SamplingParams(max_new_tokens=params.max_new_tokens, temperature=1.0)
    assert replace(params, **{name: getattr(plain, name) for name in effect}) == plain or effect


FORMED = [
    {"response_format": {"type": "json_object"}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": SCHEMA, "strict": True},
        }
    },
    {"guided_json": SCHEMA},
    {"guided_json": '{"type": "object"}'},
    {"json_schema": '{"type": "object"}'},
    {"guided_regex": "[0-9]+"},
    {"regex": "[0-9]+"},
    {"guided_choice": ["a", "b"]},
    {"guided_grammar": 'start: "a"'},
    {"ebnf": 'root ::= "a"'},
    {"structured_outputs": {"choice": ["a"]}},
    {"structured_outputs": {"json": SCHEMA}},
    {"tools": [TOOL], "tool_choice": "required"},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "get"}}},
    {"tools": [TOOL], "response_format": {"type": "json_object"}},
]


@pytest.mark.parametrize("body", FORMED, ids=lambda value: str(value)[:60])
def test_an_answers_form_reaches_the_engine(body: dict[str, Any]) -> None:
    service, reply = ask(CHAT, body)
    assert reply.status_code == 200, reply.text
    assert service.grammars == [service.requests[0].params.grammar] and service.grammars[0]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [{"role": "user", "content": [PNG]}]}, "messages.0.content.0.type"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    (CHAT, {"messages": [{"role": "function", "content": "x"}]}, "messages.0.role"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
    (CHAT, {"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
    (CHAT, {"tools": [TOOL], "guided_regex": "a"}, "guided_regex"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
    (CHAT, {"lora_path": "sql"}, "lora_path"),
    (CHAT, {"chat_template": "{{ messages }}"}, "chat_template"),
    (CHAT, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    (CHAT, {"continue_final_message": True}, "continue_final_message"),
    (CHAT, {"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt"),
    (CHAT, {"web_search_options": {"a": 1}}, "web_search_options"),
    (CHAT, {"custom_logit_processor": "code"}, "custom_logit_processor"),
    (TEXT, {"best_of": 4}, "best_of"),
    (TEXT, {"suffix": "end"}, "suffix"),
    (TEXT, {"use_beam_search": True}, "use_beam_search"),
    (TEXT, {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    (TEXT, {"rid": "a b"}, "rid"),
    (CHAT, {"guided_json": "{"}, "guided_json"),
    (CHAT, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.regex"),
]


@pytest.mark.parametrize(("path", "body", "field"), REFUSED, ids=lambda value: str(value)[:60])
def test_it_is_refused_by_name(path: str, body: dict[str, Any], field: str) -> None:
    service, reply = ask(path, body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == field and error["message"].startswith(f"{field}"), error
    assert service.requests == []


def test_there_are_sixty_of_them() -> None:
    assert len(TAKEN) + len(FORMED) + len(REFUSED) >= 60


def test_several_answers_of_several_prompts() -> None:
    service, reply = ask(TEXT, {"prompt": ["ab", [99, 100]], "n": 2, "seed": 5, "rid": "mine"})
    found = reply.json()
    assert found["id"] == "cmpl-mine" and [c["index"] for c in found["choices"]] == [0, 1, 2, 3]
    assert all(c["text"] == "Hello!" for c in found["choices"])
    asked = {request.rid: (list(request.prompt_ids), request.params.seed) for request in service.requests}
    assert asked == {
        "cmpl-mine": ([97, 98], 5),
        "cmpl-mine-1": ([97, 98], 6),
        "cmpl-mine-2": ([99, 100], 5),
        "cmpl-mine-3": ([99, 100], 6),
    }
    assert found["usage"]["prompt_tokens"] == 100 and found["usage"]["completion_tokens"] == 24


def test_echo_shows_the_prompt_and_its_logprobs() -> None:
    scored = replace(piece("c", "stop"), prompt_logprobs=piece("b").logprobs)
    service = ScriptedService([scored])
    http = TestClient(application(service))
    body = {"prompt": "ab", "echo": True, "logprobs": 1}
    [choice] = http.post("/v1/completions", json=body).json()["choices"]
    assert choice["text"] == "abc"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    [choice] = http.post("/v1/completions", json={**body, "max_tokens": 0}).json()["choices"]
    assert choice["text"] == "ab" and choice["logprobs"]["tokens"] == ["a", "b"]
    [choice] = http.post("/v1/completions", json={"prompt": "ab", "prompt_logprobs": 1}).json()["choices"]
    assert choice["prompt_logprobs"][0] is None and choice["prompt_logprobs"][1]["98"]["decoded_token"] == "b"
    assert choice["text"] == "c"


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_a_stream_has_the_prompts_logprobs_where_its_first_token_shows_no_text(path: str) -> None:
    part = replace(piece("a"), text="", prompt_logprobs=piece("b").logprobs)
    service = ScriptedService([part, piece("c", "stop")])
    body = {"prompt": "ab"} if path == TEXT else {"messages": USER}
    reply = TestClient(application(service)).post(
        f"/v1/{path}", json={**body, "prompt_logprobs": 1, "stream": True}
    )
    chunks = [json.loads(line[6:]) for line in reply.text.split("\n\n") if line and "[DONE]" not in line]
    shown = [one["choices"][0] if path == TEXT else one for one in chunks]
    found = [one["prompt_logprobs"] for one in shown if "prompt_logprobs" in one]
    assert len(found) == 1 and found[0][0] is None and found[0][1]["98"]["decoded_token"] == "b"


@pytest.mark.parametrize("token", [None, 5])
def test_a_call_is_shown_where_its_mark_is_a_special_token(
    token: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScriptedService, "special_token", lambda _, text: token)
    service = ScriptedService()
    body = {"messages": USER, "tools": [TOOL]}
    assert TestClient(application(service)).post("/v1/chat/completions", json=body).status_code == 200
    [asked] = service.requests
    assert asked.params.skip_special_tokens is (token is None)


def test_a_known_form_does_not_wait_for_anothers_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def compiles(_: object, grammar: str) -> None:
        begun.set()
        assert "known" not in grammar and may_end.wait(30)

    monkeypatch.setattr(ScriptedService, "check_grammar", compiles)
    monkeypatch.setattr(ScriptedService, "knows_grammar", lambda _, grammar: "known" in grammar)
    service = ScriptedService()
    with TestClient(application(service)) as http:

        def ask(text: str) -> int:
            return http.post("/v1/completions", json={"prompt": "ab", "guided_choice": [text]}).status_code

        slow = threading.Thread(target=ask, args=("new",), daemon=True)
        slow.start()
        assert begun.wait(30)
        try:
            assert ask("known") == 200 and slow.is_alive() and len(service.requests) == 1
        finally:
            may_end.set()
            slow.join(30)
    assert len(service.requests) == 2


def test_a_long_prompts_logprobs_are_shown_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    long = replace(piece("a"), prompt_logprobs=piece("b" * 400).logprobs)
    service = ScriptedService([long, piece("c", "stop")])
    threads = {"a": "", "b": "", "c": ""}

    def named(_: object, token_id: int) -> str:
        threads[chr(token_id)] = threading.current_thread().name
        return chr(token_id)

    monkeypatch.setattr(CharTokenizer, "token_text", named)
    body = {"prompt": "ab", "logprobs": 0, "prompt_logprobs": 1, "stream": True}
    assert "[DONE]" in TestClient(application(service)).post("/v1/completions", json=body).text
    assert threads["b"] == "hiradix-off-loop" != threads["c"]


def test_tool_messages_reach_the_template_and_usage_comes_with_each_chunk() -> None:
    talk = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
    ]
    options = {"include_usage": True, "continuous_usage_stats": True}
    service, reply = ask(CHAT, {"messages": talk, "tools": [TOOL], "stream": True, "stream_options": options})
    assert reply.status_code == 200, reply.text
    prompt = "".join(map(chr, service.requests[0].prompt_ids))
    assert prompt.startswith("<system>be brief") and '<tool_call>\n{"name": "get"' in prompt
    assert "<tool_response>\n7" in prompt
    assert reply.text.count('"completion_tokens":1,') == 1 and reply.text.count('"completion_tokens":6,') == 2


ANSWER = '<tool_call>\n{"name": "get", "arguments": {"x": 1}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_an_answer(stream: bool) -> None:
    outputs = [piece(char) for char in ANSWER[:-1]] + [piece(ANSWER[-1], "tool_calls", num_done=9)]
    http = TestClient(application(ScriptedService(outputs)))
    body = {"messages": USER, "tools": [TOOL], "stream": stream}
    reply = http.post("/v1/chat/completions", json=body)
    if not stream:
        [choice] = reply.json()["choices"]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        [call] = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "get", "arguments": '{"x": 1}'} and call["id"].startswith("call_")
        return
    import json

    chunks = [json.loads(line[6:]) for line in reply.text.split("\n\n") if line.startswith("data: {")]
    deltas = [call for c in chunks for call in c["choices"][0]["delta"].get("tool_calls", ())]
    assert deltas[0]["function"]["name"] == "get" and {d["index"] for d in deltas} == {0} and len(deltas) > 3
    assert "".join(d["function"]["arguments"] for d in deltas) == '{"x": 1}'
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
