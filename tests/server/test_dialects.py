"""Anthropic's and OpenAI's newer API, and vLLM's token endpoints, over a scripted engine."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from hiradix.apps.engine.api import ChatPrompt, EngineBusy, Output
from hiradix.apps.server.dialects import tokens
from tests.server.scripted import MODEL, CharTokenizer, ScriptedService, application, piece

USER = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "get", "arguments": {"x": 1}}\n</tool_call>'
TOOL = {"name": "get", "input_schema": {"type": "object", "properties": {}}}
FLAT = {"type": "function", "name": "get", "parameters": {"type": "object"}, "strict": True}
EPHEMERAL = {"type": "ephemeral", "ttl": "1h"}


def ask(path: str, body: dict[str, Any], script: list[Output] | None = None) -> tuple[ScriptedService, Any]:
    service = ScriptedService(script or [piece("Hel"), piece("lo!", "stop", num_done=6)])
    return service, TestClient(application(service)).post(path, json=body)


def letters(text: str, finish: str) -> list[Output]:
    return [piece(char) for char in text[:-1]] + [piece(text[-1], finish, num_done=9)]


def events(text: str) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == data["type"] for name, data in found)
    return found


def prompt(service: ScriptedService) -> str:
    return "".join(map(chr, service.requests[0].prompt_ids))


def test_a_message() -> None:
    body = {
        "model": MODEL,
        "max_tokens": 9,
        "system": [{"type": "text", "text": "be brief"}],
        "messages": USER,
        "temperature": 0.5,
        "top_k": 5,
        "stop_sequences": ["x"],
        "metadata": {"user_id": "u"},
    }
    service, reply = ask("/v1/messages", body)
    found = reply.json()
    assert found["content"] == [{"type": "text", "text": "Hello!"}] and found["role"] == "assistant"
    assert (found["stop_reason"], found["stop_sequence"]) == ("end_turn", None)
    usage = found["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (15, 35, 6)
    assert usage["cache_creation_input_tokens"] == 0
    params = service.requests[0].params
    assert (params.max_new_tokens, params.temperature, params.top_k, params.stop) == (9, 0.5, 5, ("x",))
    assert prompt(service) == "<system>be brief<user>hi"


def test_marks_are_taken_and_what_was_written_is_told() -> None:
    marked = [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": EPHEMERAL}]}]
    service, reply = ask("/v1/messages", {"max_tokens": 9, "messages": marked})
    assert prompt(service) == "<user>hi", "a mark is no token"
    usage = reply.json()["usage"]
    assert (usage["input_tokens"], usage["cache_creation_input_tokens"]) == (0, 15)
    _, reply = ask("/v1/messages", {"max_tokens": 9, "messages": marked * 5})
    assert reply.status_code == 400 and "cache_control" in reply.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
def test_marks_are_holds_of_what_is_before_them(path: str) -> None:
    parts: list[dict[str, Any]] = [{"type": "text", "text": text} for text in ("one ", "two ", "three")]
    parts[1]["cache_control"] = EPHEMERAL
    talk: list[Any] = [*USER, {"role": "assistant", "content": "yes"}, {"role": "user", "content": parts}]
    service, reply = ask(path, {"max_tokens": 9, "messages": talk})
    assert reply.status_code == 200, reply.text
    [wish] = service.requests[0].scope.wishes
    assert wish.body == {"verb": "hold", "ttl_s": 3600.0} and wish.num_tokens is not None
    assert prompt(service)[: wish.num_tokens].endswith("<user>one two ")


def test_a_mark_whose_place_cannot_be_found_in_time_fails_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = ScriptedService([piece("a", "stop")])
    whole = CharTokenizer.apply_chat

    def apply(self: CharTokenizer, conversation: ChatPrompt, context_length: int | None = None) -> list[int]:
        if context_length is None:
            raise TimeoutError("many prompts wait")
        return whole(self, conversation, context_length)

    monkeypatch.setattr(CharTokenizer, "apply_chat", apply)
    marked = {"type": "text", "text": "hi", "cache_control": EPHEMERAL}
    talk = [{"role": "user", "content": [marked, {"type": "text", "text": "!"}]}]
    reply = TestClient(application(service)).post("/v1/messages", json={"max_tokens": 9, "messages": talk})
    assert reply.status_code == 200, reply.text
    [wish] = service.requests[0].scope.wishes
    assert wish.answer == {"state": "refused", "reason": "its place is not known: many prompts wait"}


def test_tools_over_turns_and_an_answer_that_is_gone_on_with() -> None:
    talk = [
        *USER,
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "let me see"},
                {"type": "tool_use", "id": "t1", "name": "get", "input": {"x": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "7"}]},
                {"type": "text", "text": "go on"},
            ],
        },
        {"role": "assistant", "content": "It is"},
    ]
    service, reply = ask(
        "/v1/messages", {"max_tokens": 9, "messages": talk, "tools": [TOOL]}, letters(CALL, "tool_calls")
    )
    assert reply.status_code == 200, reply.text
    assert '<assistant>let me see\n<tool_call>\n{"name": "get"' in prompt(service)
    assert prompt(service).endswith("<tool_response>\n7\n</tool_response><user>go on<assistant>It is")
    found = reply.json()
    assert found["stop_reason"] == "tool_use"
    [call] = found["content"]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "get", {"x": 1})


def test_a_message_as_events() -> None:
    body = {"max_tokens": 9, "messages": USER, "tools": [TOOL], "stream": True}
    _, reply = ask("/v1/messages", body, letters("Hi! " + CALL, "tool_calls"))
    found = events(reply.text)
    names = [name for name, _ in found]
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"]
    assert [n for n in names if "block_st" in n] == ["content_block_start", "content_block_stop"] * 2
    deltas = [data["delta"] for name, data in found if name == "content_block_delta"]
    assert "".join(d.get("text", "") for d in deltas) == "Hi! "
    assert json.loads("".join(d.get("partial_json", "") for d in deltas)) == {"x": 1}
    assert found[0][1]["message"]["usage"]["input_tokens"] == 15
    assert found[-2][1]["delta"]["stop_reason"] == "tool_use" and found[-2][1]["usage"]["output_tokens"] == 9


def test_a_stop_sequence_and_a_length_are_told() -> None:
    _, reply = ask(
        "/v1/messages", {"max_tokens": 9, "messages": USER}, [replace(piece("a", "stop"), matched_stop="x")]
    )
    assert (reply.json()["stop_reason"], reply.json()["stop_sequence"]) == ("stop_sequence", "x")
    _, reply = ask("/v1/messages", {"max_tokens": 9, "messages": USER}, [piece("a", "length")])
    assert reply.json()["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages.0.content.0.type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1"}]}]},
            "messages.0.content.0.type",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "no"}}, "tool_choice"),
        (
            {"system": [{"type": "text", "text": "a", "cache_control": {"type": "for ever"}}]},
            "system.0.cache_control",
        ),
        ({"mcp_servers": [{"a": 1}]}, "mcp_servers"),
        ({"colour": 1}, "colour"),
    ],
)
def test_what_a_message_may_not_have_is_named(more: dict[str, Any], field: str) -> None:
    service, reply = ask("/v1/messages", {"max_tokens": 9, "messages": USER, **more})
    assert reply.status_code == 400, reply.text
    error = reply.json()
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert error["error"]["message"].startswith(field) and not service.requests


def test_errors_of_the_engine_in_anthropics_form() -> None:
    service = ScriptedService((EngineBusy("the queue is full"),))
    reply = TestClient(application(service)).post("/v1/messages", json={"max_tokens": 9, "messages": USER})
    assert reply.status_code == 503 and reply.json()["error"]["type"] == "overloaded_error"
    failed = replace(piece("", "error"), error="a step failed")
    _, reply = ask("/v1/messages", {"max_tokens": 9, "messages": USER, "stream": True}, [piece("a"), failed])
    assert events(reply.text)[-1][1] == {
        "type": "error",
        "error": {"type": "api_error", "message": "a step failed"},
    }


def test_tokens_are_counted() -> None:
    _, reply = ask("/v1/messages/count_tokens", {"messages": USER, "system": "be"})
    assert reply.json() == {"input_tokens": len("<system>be<user>hi")}


def test_a_key_as_anthropics_clients_send_it() -> None:
    http = TestClient(application(ScriptedService(), api_key="secret"))
    for headers, status in (({"x-api-key": "secret"}, 200), ({"x-api-key": "no"}, 401), ({}, 401)):
        reply = http.post("/v1/messages", json={"max_tokens": 9, "messages": USER}, headers=headers)
        assert reply.status_code == status
    both = {"x-api-key": "secret", "Authorization": "Bearer no"}
    assert http.get("/v1/models", headers=both).status_code == 401


def test_a_response() -> None:
    body = {"model": MODEL, "input": "hi", "instructions": "be brief", "max_output_tokens": 7, "store": False}
    service, reply = ask("/v1/responses", body)
    found = reply.json()
    assert found["object"] == "response" and found["status"] == "completed" and found["store"] is False
    assert found["output"][0]["content"][0]["text"] == "Hello!"
    assert (
        found["usage"]["input_tokens"] == 50 and found["usage"]["input_tokens_details"]["cached_tokens"] == 35
    )
    assert prompt(service) == "<system>be brief<user>hi"
    assert service.requests[0].params.max_new_tokens == 7
    _, reply = ask("/v1/responses", {"input": "hi"}, [piece("a", "length")])
    assert reply.json()["incomplete_details"] == {"reason": "max_output_tokens"}


def test_a_response_with_tools_over_turns() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "m",
            "status": "completed",
            "content": [{"type": "output_text", "text": "see", "annotations": []}],
        },
        {
            "type": "function_call",
            "id": "fc",
            "call_id": "c1",
            "name": "get",
            "arguments": "{}",
            "status": "completed",
        },
        {"type": "function_call_output", "call_id": "c1", "output": "7"},
    ]
    service, reply = ask("/v1/responses", {"input": items, "tools": [FLAT]}, letters(CALL, "tool_calls"))
    assert reply.status_code == 200, reply.text
    assert '<assistant>see\n<tool_call>\n{"name": "get"' in prompt(service)
    [call] = reply.json()["output"]
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "get", '{"x": 1}')
    assert service.requests[0].params.tool_markers == ("<tool_call>",)


def test_a_response_as_events() -> None:
    body = {"input": "hi", "tools": [FLAT], "stream": True}
    _, reply = ask("/v1/responses", body, letters("Hi! " + CALL, "tool_calls"))
    found = events(reply.text)
    assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
    names = [name.removeprefix("response.") for name, _ in found]
    order = list(dict.fromkeys(names))
    assert order == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "completed",
    ]
    text = "".join(data["delta"] for name, data in found if name.endswith("text.delta"))
    assert text == "Hi! "
    last = found[-1][1]["response"]
    assert [item["type"] for item in last["output"]] == ["message", "function_call"]
    assert last["output"][1]["arguments"] == '{"x": 1}' and last["usage"]["output_tokens"] == 9


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0.type",
        ),
        ({"input": [{"type": "reasoning"}]}, "input.0.type"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input.0.call_id"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ],
)
def test_what_a_response_may_not_have_is_named(more: dict[str, Any], field: str) -> None:
    service, reply = ask("/v1/responses", {"input": "hi", **more})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == field and error["message"].startswith(field) and not service.requests


def test_tokens_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    _, reply = ask("/tokenize", {"prompt": "ab", "return_token_strs": True})
    assert reply.json() == {"count": 2, "max_model_len": 100, "tokens": [97, 98], "token_strs": ["a", "b"]}
    _, reply = ask("/tokenize", {"messages": USER})
    assert reply.json()["count"] == len("<user>hi")
    _, reply = ask("/detokenize", {"tokens": [97, 98]})
    assert reply.json() == {"prompt": "ab"}
    for body, field in (
        ({}, "prompt"),
        ({"prompt": "a", "messages": USER}, "prompt"),
        ({"prompt": 3}, "prompt"),
    ):
        _, reply = ask("/tokenize", body)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == field
    monkeypatch.setattr(tokens, "MAX_TOKEN_IDS", 3)
    monkeypatch.setattr(tokens, "MANY_TOKENS", 2)
    _, reply = ask("/tokenize", {"prompt": "abcd"})
    assert reply.status_code == 400 and reply.json()["error"]["message"] == "prompt: has more than 3 tokens"
    _, reply = ask("/tokenize", {"prompt": "abc", "return_token_strs": True})
    assert reply.json()["token_strs"] == ["a", "b", "c"], "beside the event loop"
    _, reply = ask("/detokenize", {"tokens": [-1]})
    assert reply.status_code == 400 and reply.json()["error"]["param"].startswith("tokens")
