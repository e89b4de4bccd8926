"""Unmodified clients against a real server: what they send is taken, what comes back they understand.

The model is tiny and random: what it says is nothing, but a grammar's forms and forced calls are always right.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from typing import Any, Literal

import anthropic
import httpx
import langchain_openai
import llguidance  # noqa: F401
import openai
import pytest

from tests.clients.conftest import ADMIN, KEY

DEADLINE_S = 120.0
USER: Any = [{"role": "user", "content": "hi"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["a", "b"]}},
    "required": ["age", "kind"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "get_age", "description": "an age", "parameters": SCHEMA},
}


@pytest.fixture(scope="module", autouse=True)
def no_telemetry() -> None:
    os.environ |= {
        "LANGSMITH_TRACING": "false",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "NO_PROXY": "127.0.0.1",
    }


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, timeout=DEADLINE_S, max_retries=0)


@pytest.fixture
def claude(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key=KEY, timeout=DEADLINE_S, max_retries=0)


def is_formed(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"age", "kind"} and value["kind"] in ("a", "b") and 0 <= value["age"] < 100


def test_openai_chat_whole_streamed_and_async(client: openai.OpenAI, url: str) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": USER, "max_tokens": 6, "temperature": 0, "seed": 1}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    assert whole.usage is not None and whole.usage.completion_tokens <= 6
    assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.content
    options: Any = {"include_usage": True}
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options=options))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content and chunks[-1].usage is not None

    async def several() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, timeout=DEADLINE_S) as http:
            answers = await asyncio.gather(*(http.chat.completions.create(**asked) for _ in range(3)))
        return [answer.choices[0].message.content or "" for answer in answers]

    assert asyncio.run(several()) == [text] * 3


def test_openai_completions_in_batches_with_echo(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "max_tokens": 3, "temperature": 0, "logprobs": 1}
    both = client.completions.create(prompt=["the first", "the second"], n=2, echo=True, **asked)
    assert len(both.choices) == 4 and both.choices[0].text == both.choices[1].text
    assert both.choices[2].text.startswith("the second")
    found = both.choices[0].logprobs
    assert found is not None and found.token_logprobs is not None and found.token_logprobs[0] is None  # type: ignore[comparison-overlap]
    assert "".join(found.tokens or ()).startswith("the first") and found.text_offset == sorted(
        found.text_offset or ()
    )
    alone = client.completions.create(prompt="the first", **asked)
    assert both.choices[0].text == "the first" + alone.choices[0].text


def test_several_answers_share_their_prompt(client: openai.OpenAI) -> None:
    prompt: Any = [7 + i % 300 for i in range(200)]
    found = client.completions.create(model="tiny", prompt=prompt, n=4, max_tokens=4, seed=3)
    assert len({choice.index for choice in found.choices}) == 4 and found.usage is not None
    assert found.usage.prompt_tokens == 200, "a prompt counts once"
    again = client.completions.create(model="tiny", prompt=prompt, n=4, max_tokens=4, seed=3)
    assert [c.text for c in again.choices] == [c.text for c in found.choices], "behind a hit, too"
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == 192


def test_openai_structured(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "age", "schema": SCHEMA, "strict": True}}
    answer = client.chat.completions.create(model="tiny", messages=USER, response_format=form, max_tokens=100)
    assert is_formed(answer.choices[0].message.content or "")
    more = {"guided_choice": ["yes", "no"]}
    answer = client.chat.completions.create(model="tiny", messages=USER, extra_body=more)
    assert answer.choices[0].message.content in ("yes", "no")
    response = client.responses.create(
        model="tiny", input="hi", text={"format": {"type": "json_schema", "name": "age", "schema": SCHEMA}}
    )
    assert is_formed(response.output_text) and response.usage is not None


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_age"}}])
def test_openai_tools_over_turns(client: openai.OpenAI, choice: Any) -> None:
    asked: Any = {"model": "tiny", "tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    answer = client.chat.completions.create(messages=USER, **asked)
    [call] = answer.choices[0].message.tool_calls or []
    assert answer.choices[0].finish_reason == "tool_calls" and call.type == "function"
    assert call.function.name == "get_age" and is_formed(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "7"}
    talk = [*USER, answer.choices[0].message.model_dump(), result]
    with client.chat.completions.stream(messages=talk, **asked) as stream:
        final = stream.get_final_completion()
    [call] = final.choices[0].message.tool_calls or []
    assert is_formed(call.function.arguments)
    plain = client.chat.completions.create(model="tiny", messages=talk, tools=[TOOL], max_tokens=5)
    assert plain.choices[0].finish_reason in ("stop", "length")


def test_openai_responses_streamed_with_tools(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "name": "get_age", "parameters": SCHEMA, "strict": True}
    with client.responses.stream(
        model="tiny", input="hi", tools=[tool], tool_choice="required", parallel_tool_calls=False
    ) as stream:
        names = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.function_call_arguments.delta" in names and names[-1] == "response.completed"
    [call] = final.output
    assert call.type == "function_call" and is_formed(call.arguments)


def test_openai_errors_are_its_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt", messages=USER)
    with pytest.raises(openai.BadRequestError, match="lora_path"):
        client.chat.completions.create(model="tiny", messages=USER, extra_body={"lora_path": "a"})
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_anthropic_whole_streamed_and_with_tools(claude: anthropic.Anthropic) -> None:
    asked: Any = {"model": "tiny", "max_tokens": 200, "messages": USER}
    system: Any = [{"type": "text", "text": "be brief " * 20, "cache_control": {"type": "ephemeral"}}]
    first = claude.messages.create(system=system, **{**asked, "max_tokens": 4})
    again = claude.messages.create(system=system, **{**asked, "max_tokens": 4})
    assert first.stop_reason in ("end_turn", "max_tokens") and first.usage.cache_creation_input_tokens
    assert again.usage.cache_read_input_tokens and again.usage.input_tokens == 0
    tool: Any = {"name": "get_age", "description": "an age", "input_schema": SCHEMA}
    forced: Any = {"tools": [tool], "tool_choice": {"type": "tool", "name": "get_age"}}
    with claude.messages.stream(**asked, **forced) as stream:
        message = stream.get_final_message()
    [call] = message.content
    assert message.stop_reason == "tool_use" and call.type == "tool_use" and is_formed(json.dumps(call.input))
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "7"}
    talk: Any = [
        *USER,
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]},
        {"role": "user", "content": [result]},
    ]
    last = claude.messages.create(model="tiny", max_tokens=4, messages=talk, tools=[tool])
    assert last.usage.output_tokens <= 4
    counted = claude.messages.count_tokens(model="tiny", messages=talk, tools=[tool])
    assert counted.input_tokens == last.usage.input_tokens + (last.usage.cache_read_input_tokens or 0)
    with pytest.raises(anthropic.BadRequestError, match="thinking"):
        claude.messages.create(**asked, thinking={"type": "enabled", "budget_tokens": 1024})


def test_langchain_with_tools_and_structured_output(url: str) -> None:
    chat = langchain_openai.ChatOpenAI(
        base_url=f"{url}/v1", api_key=KEY, model="tiny", temperature=0, max_retries=0
    )  # type: ignore[arg-type, call-arg]
    assert chat.invoke("hi", max_tokens=4).response_metadata["model_name"] == "tiny"
    assert "".join(str(chunk.content) for chunk in chat.stream("hi", max_tokens=4)) is not None
    formed: Any = chat.with_structured_output({"title": "age", **SCHEMA}, method="json_schema").invoke("hi")
    assert is_formed(json.dumps(formed))
    called = chat.bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False).invoke("hi")
    assert [call["name"] for call in called.tool_calls] == ["get_age"]  # type: ignore[attr-defined]


def test_an_agents_framework_over_several_turns(url: str) -> None:
    agents = pytest.importorskip("agents")
    model = agents.OpenAIChatCompletionsModel(
        model="tiny", openai_client=openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, timeout=DEADLINE_S)
    )
    agents.set_tracing_disabled(True)
    asked: list[str] = []

    @agents.function_tool
    def look_up(shelf: Literal["a", "b"]) -> str:
        """Look on a shelf."""
        asked.append(shelf)
        return "found"

    settings = agents.ModelSettings(
        tool_choice="required", parallel_tool_calls=False, max_tokens=60, temperature=1.0
    )
    agent = agents.Agent(
        name="clerk", instructions="look it up", model=model, tools=[look_up], model_settings=settings
    )
    result = agents.Runner.run_sync(agent, "which shelf?", max_turns=4)
    assert asked and set(asked) <= {"a", "b"} and len(result.raw_responses) >= 2
    assert any(item.type == "tool_call_output_item" for item in result.new_items)


def test_litellm_speaks_to_it(url: str) -> None:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    litellm = pytest.importorskip("litellm")
    answer = litellm.completion(
        model="hosted_vllm/tiny", api_base=f"{url}/v1", api_key=KEY, messages=USER, max_tokens=4
    )
    assert answer.usage.completion_tokens <= 4
    pieces = litellm.completion(
        model="hosted_vllm/tiny", api_base=f"{url}/v1", api_key=KEY, messages=USER, max_tokens=4, stream=True
    )
    assert any(chunk.choices[0].finish_reason for chunk in pieces)


# -- cache controls -------------------------------------------------------------------------

SYSTEM = "you sort letters by their date and say which of them are missing " * 3


def told(usage: Any) -> list[dict[str, Any]]:
    """What became of a request's wishes, as an unmodified client shows fields that it does not know."""
    found: list[dict[str, Any]] = (usage.model_extra or {}).get("hiradix_intents", [])
    return found


def settled(url: str, wish: dict[str, Any]) -> dict[str, Any]:
    """The receipt of a wish once nothing of it is under way, as the operator sees it."""
    until = time.monotonic() + DEADLINE_S
    while True:
        reply = httpx.get(f"{url}/hicache/intents/{wish['id']}", headers=ADMIN, timeout=DEADLINE_S)
        receipt: dict[str, Any] = reply.json()
        if receipt["state"] not in ("accepted", "running") or time.monotonic() > until:
            return receipt
        time.sleep(0.01)


def leases(url: str) -> list[dict[str, Any]]:
    found = httpx.get(f"{url}/hicache/intents", headers=ADMIN, timeout=DEADLINE_S).json()["intents"]
    return [one for one in found if one["verb"] == "hold" and not one["is_end"]]


def test_anthropic_marks_that_move_on_hold_the_prompt_and_change_no_token(
    claude: anthropic.Anthropic, url: str
) -> None:
    def turns(is_marked: bool, salt: str) -> tuple[list[str], list[int], list[list[dict[str, Any]]]]:
        marks: dict[str, Any] = {"cache_control": {"type": "ephemeral"}} if is_marked else {}
        hour: dict[str, Any] = {"cache_control": {"type": "ephemeral", "ttl": "1h"}} if is_marked else {}
        system: Any = [{"type": "text", "text": SYSTEM, **hour}]
        talk: list[Any] = []
        texts, hits, wishes = [], [], []
        for turn in range(4):
            asked = {"role": "user", "content": [{"type": "text", "text": f"letter {turn} of may", **marks}]}
            answer = claude.messages.create(
                model="tiny", max_tokens=12, system=system, messages=[*talk, asked],
                extra_body={"cache_salt": salt, "temperature": 0}, extra_headers={"X-Session-Id": "letters"},
            )  # fmt: skip
            text = "".join(block.text for block in answer.content if block.type == "text")
            plain = {"role": "user", "content": [{"type": "text", "text": f"letter {turn} of may"}]}
            talk += [plain, {"role": "assistant", "content": text or "-"}]
            texts.append(text)
            hits.append(answer.usage.cache_read_input_tokens or 0)
            wishes.append(told(answer.usage))
        return texts, hits, wishes

    before = len(leases(url))
    marked, unmarked = turns(True, "rolling"), turns(False, "plain")
    assert marked[:2] == unmarked[:2] and unmarked[2] == [[]] * 4, "no token and no hit is another"
    assert marked[1] == sorted(marked[1]) and marked[1][1] > 0
    for wishes in marked[2]:
        assert [(one["field"], one["verb"]) for one in wishes] == [("cache_control", "hold")] * 2
    assert len({one["id"] for wishes in marked[2] for one in wishes}) == 2, "two leases that go on"
    hour, minutes = (settled(url, one) for one in marked[2][-1])
    assert (hour["state"], minutes["state"]) == ("held", "held"), (hour, minutes)
    assert hour["done"]["tokens"] < minutes["done"]["tokens"] and minutes["saved_tokens"] > 0
    assert 300 < hour["remaining_s"] <= 3600 and minutes["remaining_s"] <= 300
    assert len(leases(url)) == before + 2, "old ones are not piled up"
    claude.messages.create(
        model="tiny", max_tokens=4, messages=USER,
        extra_body={"cache_salt": "rolling", "hiradix": {"verb": "locate", "tiers": ["host"]}},
    )  # fmt: skip
    ended = httpx.post(
        f"{url}/v1/end_of_session",
        json={"prompt": [1, 2, 3], "cache_salt": "rolling", "session_id": "letters"},
        headers=ADMIN,
        timeout=DEADLINE_S,
    )
    assert ended.status_code == 200 and len(leases(url)) == before, "a session's leases end with it"


def test_anthropic_marks_in_streams_and_too_short_ones(claude: anthropic.Anthropic) -> None:
    block: Any = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    asked: Any = {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": [block]}]}
    with claude.messages.stream(**asked) as stream:
        wishes = [told(event.usage) for event in stream if event.type == "message_delta"]
    [[wish]] = wishes
    assert wish["field"] == "cache_control" and wish["state"] in ("refused", "held", "running")


def test_openai_cache_keys_name_sessions_and_retention_holds(client: openai.OpenAI, url: str) -> None:
    talk: list[Any] = [{"role": "system", "content": SYSTEM}]
    ids = []
    for turn in range(3):
        talk.append({"role": "user", "content": f"letter {turn} of june"})
        answer = client.chat.completions.create(
            model="tiny", messages=talk, max_tokens=12, temperature=0, prompt_cache_key="june",
            prompt_cache_retention="24h", extra_body={"cache_salt": "june"},
        )  # fmt: skip
        key, retention = told(answer.usage)
        assert key == {"field": "prompt_cache_key", "state": "done", "reason": "it names the session"}
        assert (retention["field"], retention["verb"]) == ("prompt_cache_retention", "hold")
        ids.append(retention["id"])
        talk.append({"role": "assistant", "content": answer.choices[0].message.content or "-"})
    assert len(set(ids)) == 1, "one lease that goes on"
    held = settled(url, retention)
    assert held["state"] == "held" and held["remaining_s"] > 80_000, "no storage here: in the host for a day"
    body = {"selector": {"session": "june", "cache_salt": "june"}}
    found = httpx.post(f"{url}/hicache/prefix/locate", json=body, headers=ADMIN, timeout=DEADLINE_S).json()
    assert found["found"]["device"]["tokens"] >= held["done"]["tokens"]
    response = client.responses.create(
        model="tiny",
        input=SYSTEM,
        max_output_tokens=4,
        prompt_cache_key="x" * 300,
        prompt_cache_retention="in_memory",
    )
    assert response.usage is not None and [one["state"] for one in told(response.usage)] == ["done"]
    asked: Any = {"model": "tiny", "prompt": SYSTEM, "max_tokens": 2}
    wrong = client.completions.create(**asked, extra_body={"prompt_cache_retention": "for ever"})
    assert told(wrong.usage)[0]["state"] == "refused"


def test_hiradix_wishes_of_a_request_are_carried_out_and_checked(client: openai.OpenAI, url: str) -> None:
    asked: Any = {"model": "tiny", "prompt": SYSTEM + "own", "max_tokens": 12, "temperature": 0}
    wishes: list[Any] = [{"verb": "hold", "ttl_s": 60, "max_bytes": 1}, {"verb": "forget"}]
    answer = client.completions.create(**asked, extra_body={"hiradix": wishes, "cache_salt": "own"})
    clipped, gone = told(answer.usage)
    assert (clipped["field"], gone["verb"]) == ("hiradix", "forget")
    assert (
        settled(url, clipped)["state"] in ("refused", "cancelled") and settled(url, gone)["state"] == "done"
    )
    again = client.completions.create(**asked, extra_body={"cache_salt": "own"})
    details = again.usage and again.usage.prompt_tokens_details
    assert details is not None and details.cached_tokens == 0, "store nothing: nothing is there"
    common = client.completions.create(**asked, extra_body={"hiradix": {"verb": "forget"}})
    [refused] = told(common.usage)
    assert refused["state"] == "refused" and "cache_salt" in refused["reason"]
    for wish, field in (({"verb": "hold"}, "ttl_s"), ({"verb": "hold", "ttl": 1}, "ttl"), ({}, "verb")):
        with pytest.raises(openai.BadRequestError, match=f"hiradix.{field}"):
            client.completions.create(**asked, extra_body={"hiradix": wish})
    hinted = client.completions.create(**asked, extra_body={"end_of_session": True})
    assert told(hinted.usage)[0]["field"] == "end_of_session"
