"""Tool calls in answers: every family, cut at any place; grammars that force calls; templates without tools."""

from __future__ import annotations

import json
import random
from typing import Any

import llguidance
import pytest

from hiradix.apps.engine import grammar
from hiradix.apps.server.tools import (
    FORMATS,
    CallDelta,
    CallReader,
    Delta,
    TextDelta,
    calls_rules,
    described,
    format_of,
)

ANSWERS: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    (
        "hermes",
        '<tool_call>\n{"name": "get", "arguments": {"city": "Bonn"}}\n</tool_call>',
        "",
        [("get", {"city": "Bonn"})],
    ),
    (
        "hermes",
        'Let me see.\n<tool_call>\n{"name": "get", "arguments": {"a": [1, {"b": "}\\""}]}}\n</tool_call>\n'
        '<tool_call>{"arguments": {}, "name": "now"}</tool_call>',
        "Let me see.\n",
        [("get", {"a": [1, {"b": '}"'}]}), ("now", {})],
    ),
    ("hermes", "no call < tool_call>", "no call < tool_call>", []),
    ("hermes", "<tool_call>what</tool_call>", "<tool_call>what</tool_call>", []),
    ("hermes", '<tool_call>{"nam": 1}</tool_call>', '<tool_call>{"nam": 1}</tool_call>', []),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get>\n<parameter=city>\nBonn\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>",
        "",
        [("get", {"city": "Bonn", "n": 3})],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=get><parameter=a>NaN</parameter><parameter=b>-1e999</parameter></function></tool_call>",
        "",
        [("get", {"a": "NaN", "b": "-1e999"})],
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"x": NaN}, "name": "f"}',
        '<tool_call>{"arguments": {"x": NaN}, "name": "f"}',
        [],
    ),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "get", "arguments": {"x": 1}}, {"name": "now", "arguments": {}}]',
        "",
        [("get", {"x": 1}), ("now", {})],
    ),
    (
        "mistral_args",
        '[TOOL_CALLS]get[ARGS]{"x": 1}[TOOL_CALLS]now[ARGS]{}',
        "",
        [("get", {"x": 1}), ("now", {})],
    ),
    (
        "lfm2",
        '<|tool_call_start|>[get(city="Bonn", n=-2), now()]<|tool_call_end|>done',
        "done",
        [("get", {"city": "Bonn", "n": -2}), ("now", {})],
    ),
    (
        "lfm2",
        "<|tool_call_start|>[__import__('os').x]<|tool_call_end|>",
        "<|tool_call_start|>[__import__('os').x]<|tool_call_end|>",
        [],
    ),
    (
        "deepseek_v3",
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n"
            '{"x": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
        ),
        "",
        [("get", {"x": 1})],
    ),
    ("granite", '<|tool_call|>[{"name": "get", "arguments": {"x": 1}}]', "", [("get", {"x": 1})]),
    (
        "llama3_json",
        '{"name": "get", "parameters": {"x": 1}}; {"name": "now", "parameters": {}}',
        "",
        [("get", {"x": 1}), ("now", {})],
    ),
    ("llama3_json", '<|python_tag|>{"name": "get", "parameters": {"x": 1}}', "", [("get", {"x": 1})]),
    ("llama3_json", '<|python_tag|>\n{"name": "get", "parameters": {}}', "", [("get", {})]),
    ("llama3_json", "It is warm.", "It is warm.", []),
    ("pythonic", "[get(x=1)]", "", [("get", {"x": 1})]),
    ("pythonic", "[1] is a source", "[1] is a source", []),
    ("pythonic", "[get(x=1e999)]", "[get(x=1e999)]", []),
    ("json", '{"name": "get", "arguments": {"x": 1}}', "", [("get", {"x": 1})]),
    ("json", '{"just": "json"}', '{"just": "json"}', []),
]


def read(
    form: str, pieces: list[str], most: int | None = None
) -> tuple[str, list[tuple[str, str]], list[Delta]]:
    reader, text, calls = CallReader(FORMATS[form], most), "", []
    deltas: list[Delta] = []
    for piece in pieces:
        deltas += reader.push(piece)
    deltas += reader.finish()
    ids: set[str] = set()
    for delta in deltas:
        if isinstance(delta, TextDelta):
            text += delta.text
        elif delta.name:
            assert delta.index == len(calls) and delta.id and delta.id not in ids
            ids.add(delta.id)
            calls.append((delta.name, delta.arguments))
        else:
            name, arguments = calls[delta.index]
            calls[delta.index] = name, arguments + delta.arguments
    return text, calls, deltas


@pytest.mark.parametrize(("form", "answer", "text", "calls"), ANSWERS, ids=lambda value: str(value)[:40])
def test_every_family_is_read_however_it_is_cut(form: str, answer: str, text: str, calls: list[Any]) -> None:
    rng = random.Random(1)
    cuts = [[answer], list(answer)]
    for _ in range(20):
        at = sorted(rng.sample(range(len(answer) + 1), min(4, len(answer))))
        cuts.append([answer[a:b] for a, b in zip([0, *at], [*at, len(answer)], strict=True)])
    for pieces in cuts:
        found, called, _ = read(form, pieces)
        assert (found, [(name, json.loads(arguments)) for name, arguments in called]) == (text, calls), pieces


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "answer",
    [
        "[]",
        "[1, 2]",
        '["a", "b"]',
        '[{"x": 1}, {"y": []}]',
        ' {"x": 1}',
        "BEGIN",
        "BEGIN[ 1]",
        "BEGIN[;,]END",
        "BEGINEND",
    ],
)
def test_what_begins_as_a_call_and_is_none_is_whole(form: str, answer: str) -> None:
    """Such as JSON of a `response_format`, or a list."""
    answer = answer.replace("BEGIN", FORMATS[form].begin).replace("END", FORMATS[form].end)
    for pieces in ([answer], list(answer)):
        assert read(form, pieces)[:2] == (answer, [])


def test_arguments_are_handed_on_as_they_come() -> None:
    answer = '<tool_call>\n{"name": "write", "arguments": {"text": "' + "long " * 50 + '"}}\n</tool_call>'
    _, [(name, arguments)], deltas = read("hermes", list(answer))
    assert name == "write" and json.loads(arguments) == {"text": "long " * 50}
    assert len([d for d in deltas if isinstance(d, CallDelta)]) > 200


def test_an_answer_cut_short_has_what_there_is_of_its_arguments() -> None:
    text, [(name, arguments)], _ = read("hermes", ['<tool_call>{"name": "get", "arguments": {"x": "ab'])
    assert (text, name, arguments) == ("", "get", '{"x": "ab')
    text, calls, _ = read("hermes", ['<tool_call>{"na'])
    assert (text, calls) == ('<tool_call>{"na', [])


def test_no_more_calls_than_are_asked_for() -> None:
    answer = '<tool_call>{"name": "a", "arguments": {}}</tool_call>' * 3
    _, calls, _ = read("hermes", list(answer), most=1)
    assert [name for name, _ in calls] == ["a"]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("most_one", [True, False])
def test_a_forced_call_has_a_grammar_in_every_family(name: str, most_one: bool) -> None:
    schema = {
        "$defs": {"n": {"type": "integer"}},
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/n"}},
    }
    tools = [{"function": {"name": "get", "parameters": schema}}, {"function": {"name": "now"}}]
    form = FORMATS[name].forced
    rules = calls_rules(form, tools, most_one, lambda text: 5 if form.is_special else None)
    text = grammar.of_lark(f"start: calls\n{rules}")
    assert llguidance.LLMatcher.validate_grammar(text) == "", rules


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}<tool_call><function={% endif %}", "qwen3_coder"),
        ("{{ tools }}[TOOL_CALLS]", "mistral"),
        ("{{ tools }}[TOOL_CALLS] [ARGS]", "mistral_args"),
        ('{{ tools }}<|python_tag|>{"name": , "parameters": }', "llama3_json"),
        ("{{ tools }}<|tool_call_start|>", "lfm2"),
        ("{{ tools }}", "json"),
        ("{{ messages }}", "hermes"),
    ],
)
def test_a_family_is_known_by_its_template(template: str, name: str) -> None:
    assert format_of(template).name == name


def test_a_template_without_tools_has_them_in_words() -> None:
    tool = {"type": "function", "function": {"name": "get", "parameters": {}}}
    call = {"id": "1", "type": "function", "function": {"name": "get", "arguments": {"x": 1}}}
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "1"},
    ]
    shown = described(talk, [tool])
    assert [m["role"] for m in shown] == ["system", "user", "assistant", "user"]
    assert shown[0]["content"].startswith("Be brief.") and '"name": "get"' in shown[0]["content"]
    assert read("hermes", [shown[2]["content"]])[1] == [("get", '{"x": 1}')]
    assert "7" in shown[3]["content"]
    assert described(talk[1:2], [tool])[0]["role"] == "system"
