"""Every field with every kind of wrong value: 400 in the OpenAI form, the message begins with the field."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from hiradix.apps.engine.api import RequestError
from hiradix.apps.server.fields import CHAT, COMPLETIONS, refused_names
from hiradix.apps.server.schema import MAX_NAME_CHARS, MAX_STOP_CHARS
from hiradix.storage.attach.rules import AttachRules, Prepared
from tests.server.scripted import ScriptedService, application

USER = [{"role": "user", "content": "hi"}]
SAMPLING = (
    *("max_tokens", "temperature", "top_p", "seed", "stop", "stop_token_ids", "ignore_eos", "stream"),
    *("stream_options", "return_token_ids", "priority", "end_of_session", "keep_alive"),
)
SCOPE = ("model", "cache_salt", "extra_key")
MORE = (
    *("n", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *(
        "min_tokens",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "prompt_logprobs",
        "rid",
        "request_id",
    ),
    *(
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
    ),
    *("regex", "ebnf", "json_schema", "echo", "add_special_tokens"),
)
TOOLS = (
    *("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message"),
)
NEUTRAL = {*refused_names(COMPLETIONS), *refused_names(CHAT)}
NEW = ("colour", "top-p", "", "str", "field " * 10_000)
FIELDS = {
    "completions": ("prompt", "logprobs", *SAMPLING, *MORE, *SCOPE, *refused_names(COMPLETIONS), *NEW),
    "chat/completions": (
        *("messages", "max_completion_tokens", "logprobs", "top_logprobs"),
        *(*SAMPLING, *MORE, *TOOLS, *SCOPE, *refused_names(CHAT), *NEW),
    ),
    "end_of_session": ("prompt", "messages", *SCOPE, *NEW),
    "keep_alive": ("prompt", "messages", *SCOPE, *NEW),
}
SESSIONS = ("end_of_session", "keep_alive")
VALUES = (
    *(None, "", "x", "x" * 5000, "\ud800", "a\0b", True, False, 0, -1, 1, 1.5, 2**63, 10**400),
    *(float("nan"), float("inf"), float("-inf"), [], [1], [1.5], [-1], [2**70], [True], [None], [""], ["a"]),
    *(["x" * 5000], ["\ud800"], ["a"] * 17, [1] * 65, [[1]], [{}], {}, {"a": 1}, {"": 1}, {"\ud800": 1}),
)


def client(service: ScriptedService) -> TestClient:
    prepared = AttachRules({"default": Prepared("file", {})})
    return TestClient(application(service, admin_key="admin", attach=prepared), raise_server_exceptions=False)


def body_of(path: str, field: str, value: object) -> dict[str, Any]:
    conversation = {"messages": USER} if path == "chat/completions" else {"prompt": "a"}
    if field in ("prompt", "messages"):
        conversation = {}
    return {**conversation, field: value}


def assert_named(reply: httpx.Response, field: str, told: object) -> None:
    status = 404 if field == "model" and isinstance(told, str) else 400
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert reply.status_code == status, (field, told, reply.text)
    assert error["param"].startswith(field[:MAX_NAME_CHARS]) and error["message"].startswith(
        error["param"] + ": "
    ), told
    assert len(reply.text) < 6000


@pytest.mark.parametrize("path", FIELDS)
def test_the_message_begins_with_the_field(path: str) -> None:
    service = ScriptedService()
    http, num_refused = client(service), 0
    for field in FIELDS[path]:
        for value in VALUES if field not in {*NEUTRAL, *MORE, *TOOLS} else VALUES[::4]:
            if value is None and path in SESSIONS and field in ("prompt", "messages"):
                continue  # as if it were left out
            data = json.dumps(body_of(path, field, value)).encode()
            reply = http.post(f"/v1/{path}", content=data)
            if reply.status_code != 200:
                num_refused += 1
                assert_named(reply, field, value)
    assert num_refused > 5 * len(FIELDS[path])
    assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("completions", {"stop": ["a"] * 17}, "stop: List should have at most 16 items"),
        ("completions", {"stop": ["a" * 5000]}, f"stop.0: String should have at most {MAX_STOP_CHARS} "),
        ("completions", {"stop": "a" * 5000}, f"stop: String should have at most {MAX_STOP_CHARS} "),
        ("completions", {"stop": ""}, "stop: String should have at least 1 character"),
        ("completions", {"stop": ["a", ""]}, "stop.1: String should have at least 1 character"),
        ("completions", {"stop": 5}, "stop: Input should be a valid string, or a valid list"),
        ("completions", {"stop": ["a", 5]}, "stop.1: Input should be a valid string"),
        ("completions", {"prompt": 5}, "prompt: Input should be a valid string, or a valid list"),
        ("completions", {"top-p": 1}, "top-p: unknown field"),
        ("completions", {"end_of_session": True, "keep_alive": True}, "end_of_session: excludes keep_alive"),
        ("chat/completions", {"top_logprobs": 1}, "top_logprobs: needs logprobs: true"),
        ("chat/completions", {"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens: excludes max_"),
        ("end_of_session", {"messages": USER}, "messages: send either messages or prompt"),
    ],
)
def test_what_is_wrong_is_said(path: str, fields: dict[str, Any], message: str) -> None:
    body = body_of(path, "", 0) | fields
    del body[""]
    reply = client(ScriptedService()).post(f"/v1/{path}", json=body)
    assert reply.status_code == 400 and reply.json()["error"]["message"].startswith(message), reply.text


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("the prompt has 200 tokens, but the context length is 100", "prompt: the prompt has 200 tokens"),
        ("half a character at 5: of the text", "prompt: half a character at 5: of the text"),
        ("logprobs=70: must be in 0..50", "logprobs=70: must be in 0..50"),
        ("stop: stop strings need a tokenizer", "stop: stop strings need a tokenizer"),
    ],
)
def test_what_the_engine_refuses_names_a_field_too(error: str, message: str) -> None:
    reply = client(ScriptedService((RequestError(error),))).post("/v1/completions", json={"prompt": "a"})
    told = reply.json()["error"]
    assert told["message"].startswith(message) and message.startswith(told["param"])


ADMIN_BODY = ("hicache_storage_backend", "hicache_storage_backend_extra_config_json",
              "hicache_storage_prefetch_policy", "hicache_write_policy")  # fmt: skip


@pytest.mark.parametrize("field", ADMIN_BODY)
def test_an_administrators_field_is_named(field: str) -> None:
    service = ScriptedService()
    http, num_refused = client(service), 0
    for value in VALUES:
        data = json.dumps({"hicache_storage_backend": "file"} | {field: value}).encode()
        reply = http.put("/hicache/storage-backend", content=data, headers={"Authorization": "Bearer admin"})
        if reply.status_code != 200:
            num_refused += 1
            told = reply.json()
            assert (reply.status_code, told["object"], told["param"]) == (400, "error", field)
            assert told["message"].startswith(f"{field}: ")
    assert num_refused > 20
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize("path", FIELDS)
@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
@pytest.mark.parametrize("value", ["\ud800", "a\udfffb", 7, 1.5, ["a"], {"a": 1}], ids=ascii)
def test_what_names_no_namespace_is_refused(path: str, field: str, value: Any) -> None:
    service = ScriptedService()
    reply = client(service).post(f"/v1/{path}", content=json.dumps(body_of(path, field, value)))
    assert reply.status_code == 400 and reply.json()["error"]["param"] == field
    assert not service.calls


@pytest.mark.parametrize("path", FIELDS)
def test_an_extra_key_that_names_an_adapters_pages_is_refused(path: str) -> None:
    service = ScriptedService()
    body = body_of(path, "extra_key", "\0adapter:sql@0")
    reply = client(service).post(f"/v1/{path}", content=json.dumps(body))
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "extra_key"
    assert not service.calls
