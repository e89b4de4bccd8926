"""Completions and chat over a scripted engine: shapes, streaming, usage by tier, named refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from hiradix.apps.engine.api import EngineBusy, EngineStopped, Output, RequestError, Usage
from tests.server.scripted import ANSWER, MODEL, ScriptedService, application, piece

USAGE = {
    "prompt_tokens": 50,
    "completion_tokens": 6,
    "total_tokens": 56,
    "prompt_tokens_details": {"cached_tokens": 35},
    "cached_tokens_details": {"device": 10, "host": 20, "storage": 5},
}
USER = [{"role": "user", "content": "hi"}]


def client(service: ScriptedService) -> TestClient:
    return TestClient(application(service))


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_chat_answer() -> None:
    service = ScriptedService()
    reply = client(service).post("/v1/chat/completions", json={"messages": USER, "model": MODEL}).json()
    assert reply["object"] == "chat.completion" and reply["model"] == MODEL
    [choice] = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello!"}
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    assert reply["usage"] == USAGE
    assert service.requests[0].prompt_ids == [ord(c) for c in "<user>hi"]
    assert service.requests[0].params.max_new_tokens == 100 - len("<user>hi")
    assert service.aborted == []


def test_completion_answer_from_text_and_from_token_ids() -> None:
    service = ScriptedService()
    http = client(service)
    reply = http.post("/v1/completions", json={"prompt": "ab"}).json()
    assert reply["object"] == "text_completion" and reply["usage"] == USAGE
    assert reply["choices"] == [{"index": 0, "text": "Hello!", "logprobs": None, "finish_reason": "stop"}]
    for prompt in ([1, 2], [[1, 2]], ["ab"]):
        assert http.post("/v1/completions", json={"prompt": prompt}).status_code == 200
    assert [list(r.prompt_ids) for r in service.requests] == [[97, 98], [1, 2], [1, 2], [97, 98]]
    assert service.requests[0].params.max_new_tokens == 16


def test_parameters_reach_the_engine() -> None:
    service = ScriptedService()
    body = {
        "prompt": "a",
        "max_tokens": 7,
        "temperature": 0,
        "top_p": 0.5,
        "stop": ["x", "y"],
        "stop_token_ids": [3],
        "ignore_eos": True,
        "seed": 11,
        "logprobs": 2,
        "cache_salt": "tenant",
        "extra_key": "lora",
        "priority": 4,
        "n": 1,
        "echo": False,
        "user": "u",
    }
    assert client(service).post("/v1/completions", json=body).status_code == 200
    [request] = service.requests
    params, scope = request.params, request.scope
    assert (params.max_new_tokens, params.temperature, params.top_p) == (7, 0, 0.5)
    assert (params.stop, params.stop_token_ids, params.ignore_eos) == (("x", "y"), (3,), True)
    assert (params.seed, params.logprobs) == (11, 2)
    assert (scope.cache_salt, scope.extra_key, scope.priority) == ("tenant", "lora", 4)


def test_an_answer_may_be_sent_back_as_official_clients_have_it() -> None:
    """Their `model_dump()` of a message has fields that say nothing, and so have the requests of some."""
    service = ScriptedService()
    empty = {"refusal": None, "audio": None, "function_call": None, "tool_calls": None, "annotations": None}
    answer = {"role": "assistant", "content": "Hello!", **empty}
    fields = {"parallel_tool_calls": True, "function_call": "none", "reasoning_effort": None, "audio": None}
    options = {"stream_options": {"include_usage": True, "include_obfuscation": False}}
    for message in (answer, {**answer, "tool_calls": [], "annotations": []}):
        body = {"messages": [*USER, message, *USER], **fields, **options}
        assert client(service).post("/v1/chat/completions", json=body).status_code == 200
    body = {"messages": [*USER, {**answer, "annotations": [{"type": "function"}]}]}
    reply = client(service).post("/v1/chat/completions", json=body)
    assert reply.status_code == 400 and reply.json()["error"]["param"].startswith("messages.1.annotations")
    assert len(service.requests) == 2


def test_each_request_has_its_own_id() -> None:
    service = ScriptedService()
    http = client(service)
    replies = [http.post("/v1/completions", json={"prompt": "a"}).json() for _ in range(3)]
    assert len({r["id"] for r in replies}) == 3
    assert [r["id"] for r in replies] == [r.rid for r in service.requests]


def test_chat_stream() -> None:
    body = {"messages": USER, "stream": True, "stream_options": {"include_usage": True}}
    reply = client(ScriptedService()).post("/v1/chat/completions", json=body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    chunks = events(reply.text)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"]["content"] for c in chunks[1:-1]) == "Hello!"
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None, None, None, "stop"]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == USAGE
    assert all(c["usage"] is None for c in chunks[:-1])
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"} and len({c["id"] for c in chunks}) == 1


def test_completion_stream_without_usage() -> None:
    chunks = events(
        client(ScriptedService()).post("/v1/completions", json={"prompt": "a", "stream": True}).text
    )
    assert "".join(c["choices"][0]["text"] for c in chunks) == "Hello!"
    assert all(c["usage"] is None for c in chunks)


def test_held_back_text_sends_no_empty_chunk() -> None:
    silent = Output("", (5,), Usage(1, 1))
    service = ScriptedService((piece("a"), silent, piece("b", "stop")))
    chunks = events(client(service).post("/v1/completions", json={"prompt": "a", "stream": True}).text)
    assert [c["choices"][0]["text"] for c in chunks] == ["a", "b"]


def test_chat_logprobs() -> None:
    service = ScriptedService((piece("a"), piece("b", "stop")))
    body = {"messages": USER, "logprobs": True, "top_logprobs": 2}
    [choice] = client(service).post("/v1/chat/completions", json=body).json()["choices"]
    assert service.requests[0].params.logprobs == 2
    first, second = choice["logprobs"]["content"]
    assert (first["token"], first["logprob"], first["bytes"]) == ("a", -0.5, [97])
    assert [t["token"] for t in second["top_logprobs"]] == ["b", "z"]


def test_completion_logprobs_stream_with_offsets() -> None:
    service = ScriptedService((piece("ab"), piece("c", "stop")))
    body = {"prompt": "x", "logprobs": 1, "stream": True, "return_token_ids": True}
    chunks = [c["choices"][0] for c in events(client(service).post("/v1/completions", json=body).text)]
    assert [c["logprobs"]["tokens"] for c in chunks] == [["a", "b"], ["c"]]
    assert [c["logprobs"]["text_offset"] for c in chunks] == [[0, 1], [2]]
    assert chunks[0]["logprobs"]["top_logprobs"][0] == {"a": -0.5, "z": -2.0}
    assert [c["token_ids"] for c in chunks] == [[97, 98], [99]]


def test_part_of_a_character_is_named_by_its_id() -> None:
    service = ScriptedService((piece("\x90", "stop"),))
    body = {"messages": USER, "logprobs": True}
    [choice] = client(service).post("/v1/chat/completions", json=body).json()["choices"]
    [entry] = choice["logprobs"]["content"]
    assert (entry["token"], entry["bytes"]) == ("token_id:144", None)


def test_without_a_tokenizer_only_token_ids_are_served() -> None:
    service = ScriptedService()
    service.tokenizer = None
    http = client(service)
    reply = http.post("/v1/completions", json={"prompt": [1]}).json()
    assert reply["choices"][0]["token_ids"] == [ord(c) for c in "Hello!"]
    for path, body in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": USER})):
        refused = http.post(f"/v1/{path}", json=body)
        assert refused.status_code == 400 and "tokenizer" in refused.json()["error"]["message"]


CHAT = "chat/completions"
BAD = [
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
    (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
    (CHAT, {"messages": USER, "temperature": "1"}, "temperature"),
    (CHAT, {"messages": USER, "temperature": -0.1}, "temperature"),
    (CHAT, {"messages": USER, "temperature": True}, "temperature"),
    (CHAT, {"messages": USER, "top_p": 0}, "top_p"),
    (CHAT, {"messages": USER, "max_tokens": 0}, "max_tokens"),
    (CHAT, {"messages": USER, "max_tokens": True}, "max_tokens"),
    (CHAT, {"messages": USER, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    (CHAT, {"messages": USER, "stop": ""}, "stop"),
    (CHAT, {"messages": USER, "stop": ["a", ""]}, "stop.1"),
    (CHAT, {"messages": USER, "seed": 2**63}, "seed"),
    (CHAT, {"messages": USER, "top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"messages": USER, "n": 0}, "n"),
    (CHAT, {"messages": USER, "n": 129}, "n"),
    (CHAT, {"messages": USER, "n": True}, "n"),
    (CHAT, {"messages": USER, "tools": [{"type": "web_search"}]}, "tools.0.type"),
    (CHAT, {"messages": USER, "response_format": {"type": "xml"}}, "response_format.type"),
    (CHAT, {"messages": USER, "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (CHAT, {"messages": USER, "colour": "red"}, "colour"),
    (CHAT, {"messages": USER, "cache_salt": 5}, "cache_salt"),
    (CHAT, {"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
    ("completions", {}, "prompt"),
    ("completions", {"prompt": []}, "prompt"),
    ("completions", {"prompt": ["a", 5]}, "prompt"),
    ("completions", {"prompt": [[1], []]}, "prompt"),
    ("completions", {"prompt": ["a"] * 129}, "prompt"),
    ("completions", {"prompt": ["a"] * 3, "n": 64}, "n"),
    ("completions", {"prompt": [1, True]}, "prompt"),
    ("completions", {"prompt": [1.5]}, "prompt"),
    ("completions", {"prompt": {"a": 1}}, "prompt"),
    ("completions", {"prompt": "a", "logprobs": True}, "logprobs"),
    ("completions", {"prompt": "a", "echo": 1}, "echo"),
    ("completions", {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ("completions", {"prompt": "a", "best_of": 3}, "best_of"),
    ("completions", {"prompt": "a", "logit_bias": {"x": 5}}, "logit_bias"),
    ("completions", {"prompt": "a", "logit_bias": {"a": 101}}, "logit_bias.a"),
    ("completions", {"prompt": "a", "presence_penalty": 2.5}, "presence_penalty"),
    ("completions", {"prompt": "a", "min_tokens": 9, "max_tokens": 5}, "min_tokens"),
    ("completions", {"prompt": "a", "guided_regex": "a", "guided_choice": ["b"]}, "guided_regex"),
]


@pytest.mark.parametrize(("path", "body", "param"), BAD, ids=lambda value: str(value)[:60])
def test_bad_field_is_named(path: str, body: dict[str, Any], param: str) -> None:
    service = ScriptedService()
    reply = client(service).post(f"/v1/{path}", json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert param.split(".")[0] in error["message"]
    assert service.requests == []


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"[" * 100_000], ids=lambda d: repr(d[:8]))
def test_body_that_is_no_object(data: bytes) -> None:
    reply = client(ScriptedService()).post("/v1/completions", content=data)
    assert reply.status_code == 400 and "body" in reply.json()["error"]["message"]


def test_body_has_a_size_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hiradix.apps.server.intake.MAX_BODY_BYTES", 100)
    reply = client(ScriptedService()).post("/v1/completions", json={"prompt": "a" * 200})
    assert reply.status_code == 413


def test_unknown_model() -> None:
    http = client(ScriptedService())
    for reply in (
        http.post("/v1/completions", json={"prompt": "a", "model": "gpt"}),
        http.get("/v1/models/gpt"),
    ):
        assert reply.status_code == 404
        error = reply.json()["error"]
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert "gpt" in error["message"] and MODEL in error["message"]


def test_models() -> None:
    http = client(ScriptedService())
    [card] = http.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", 100)
    assert http.get(f"/v1/models/{MODEL}").json() == card


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (RequestError("the prompt has 200 tokens, but the context length is 100"), 400, "prompt"),
        (RequestError("stop: stop strings need a tokenizer"), 400, "stop"),
        (EngineBusy("the queue is full"), 503, None),
        (EngineStopped("closed"), 503, None),
    ],
)
def test_refusal_of_the_engine(error: Exception, status: int, param: str | None, stream: bool) -> None:
    service = ScriptedService((error,))
    reply = client(service).post("/v1/completions", json={"prompt": "a", "stream": stream})
    assert reply.status_code == status
    assert reply.json()["error"]["param"] == param
    named = f"prompt: {error}" if param == "prompt" else str(error)
    assert reply.json()["error"]["message"] == named
    assert service.aborted == []


def test_failure_in_mid_answer() -> None:
    failed = Output("", (), Usage(1), finish_reason="error", error="a step failed")
    reply = client(ScriptedService((piece("a"), failed))).post("/v1/completions", json={"prompt": "a"})
    assert reply.status_code == 500 and reply.json()["error"]["message"] == "a step failed"
    body = {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}}
    chunks = events(client(ScriptedService((piece("a"), failed))).post("/v1/completions", json=body).text)
    assert chunks[0]["choices"][0]["text"] == "a"
    assert chunks[1]["error"]["message"] == "a step failed" and len(chunks) == 2


def test_answer_that_never_ends_properly_is_an_error() -> None:
    reply = client(ScriptedService(ANSWER[:1])).post("/v1/completions", json={"prompt": "a"})
    assert reply.status_code == 500


def test_unknown_path_and_method() -> None:
    http = client(ScriptedService())
    assert http.get("/v1/nothing").status_code == 404
    reply = http.get("/v1/completions")
    assert reply.status_code == 405 and "GET /v1/completions" in reply.json()["error"]["message"]
