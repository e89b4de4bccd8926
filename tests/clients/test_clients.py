"""Unmodified clients against a real server: what they send is taken, what comes back they understand.

The model is tiny and random: what it says is nothing, but a grammar's forms and forced calls are always right.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any, Literal

import anthropic
import langchain_openai
import llguidance  # noqa: F401
import openai
import pytest

from tests.clients.conftest import KEY

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
