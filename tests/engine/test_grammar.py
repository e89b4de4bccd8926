"""Answers of a given form: every one matches it, whatever the model would say."""

from __future__ import annotations

import json
import re
import sys
import threading
from dataclasses import replace

import llguidance  # noqa: F401
import pytest

from hiradix.apps.engine import RequestError, SamplingParams
from hiradix.apps.engine import grammar as forms
from hiradix.config import HiCacheConfig
from hiradix.prefix_cache import build_prefix_cache
from tests.engine.checkpoints import prompts
from tests.engine.conftest import MakeEngine
from tests.engine.driving import assert_empty, serve, tokens

PAGES = HiCacheConfig(page_size=16)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["a", "b"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
WARM = SamplingParams(max_new_tokens=200, temperature=1.0)


def test_every_answer_is_json_of_the_schema(make_engine: MakeEngine) -> None:
    engine = make_engine(cache=PAGES)
    asked = prompts([20, 31, 9, 14], seed=1)
    for seed in range(3):
        params = replace(WARM, seed=seed, grammar=forms.of_json_schema(SCHEMA))
        for answer in serve(engine, asked, params):
            assert answer.finish_reason == "stop", answer
            value = json.loads(answer.text)
            assert set(value) == {"name", "age", "kind"} and value["kind"] in ("a", "b")
            assert isinstance(value["age"], int) and 0 <= value["age"] < 100 and len(value["name"]) <= 6
    assert_empty(engine)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_choice_and_regex_end_by_themselves(make_engine: MakeEngine, temperature: float) -> None:
    engine = make_engine(cache=PAGES)
    params = replace(WARM, temperature=temperature, seed=3, ignore_eos=True)
    asked = prompts([20, 12], seed=2)
    choices = ("left", 'right "quoted"', "straight\non")
    for answer in serve(engine, asked, replace(params, grammar=forms.of_choice(choices))):
        assert answer.text in choices and answer.finish_reason == "stop"
    for answer in serve(engine, asked, replace(params, grammar=forms.of_regex("[0-9]{3}-[a-f]{2}"))):
        assert re.fullmatch("[0-9]{3}-[a-f]{2}", answer.text) and answer.finish_reason == "stop"


@pytest.mark.parametrize(
    "text", ['start: "yes" | "no" /[0-9]/', 'root ::= "yes" | "no" [0-9]'], ids=["lark", "gbnf"]
)
def test_a_grammar_in_either_notation(make_engine: MakeEngine, text: str) -> None:
    engine = make_engine(cache=PAGES)
    for answer in serve(engine, prompts([20, 12], seed=2), replace(WARM, grammar=forms.of_grammar(text))):
        assert re.fullmatch("yes|no[0-9]", answer.text)


def test_texts_of_a_choice_may_look_like_the_other_notation(make_engine: MakeEngine) -> None:
    grammars = make_engine(cache=PAGES).grammars
    assert grammars is not None
    grammars.check(forms.of_choice(["a ::= b", "c" * 17_000]))


def test_behind_a_hit_the_answer_is_the_same(make_engine: MakeEngine) -> None:
    asked = prompts([50, 37, 50], seed=3)
    grammar = forms.of_regex("([a-z]{2} ){25}")
    params = replace(WARM, max_new_tokens=60, seed=7, grammar=grammar, repetition_penalty=1.2)
    expected = tokens(serve(make_engine(cache=PAGES), asked, params))
    engine = make_engine(cache=PAGES, build_cache=build_prefix_cache)
    for _ in range(2):
        assert tokens(serve(engine, asked, params)) == expected


def test_an_answer_cut_by_its_length_says_so(make_engine: MakeEngine) -> None:
    params = replace(WARM, max_new_tokens=3, grammar=forms.of_json_schema(SCHEMA))
    [answer] = serve(make_engine(cache=PAGES), prompts([20]), params)
    assert answer.finish_reason == "length" and answer.text.startswith("{")


def test_min_tokens_does_not_forbid_the_end_that_a_grammar_has(make_engine: MakeEngine) -> None:
    params = replace(WARM, min_new_tokens=50, grammar=forms.of_choice(["yes", "no"]))
    [answer] = serve(make_engine(cache=PAGES), prompts([20]), params)
    assert answer.text in ("yes", "no")


@pytest.mark.parametrize("bad", ["start: (", "what", 'start: "a" missing'])
def test_no_grammar_is_refused_when_it_comes(make_engine: MakeEngine, bad: str) -> None:
    engine = make_engine(cache=PAGES)
    with pytest.raises(RequestError, match="^grammar: "):
        engine.add_request("r", [5, 6, 7], replace(WARM, grammar=forms.of_lark(bad)))
    assert not engine.has_work


def test_a_bad_schema_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(cache=PAGES)
    assert engine.grammars is not None
    for schema in ({"type": "thing"}, {"properties": 5}, "text", {"$ref": "#/nowhere"}):
        with pytest.raises(RequestError, match="^grammar: "):
            engine.grammars.check(forms.of_json_schema(schema))


def test_without_the_library_the_refusal_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"^grammar: .*pip install 'hiradix\[structured\]'"):
        forms.of_regex("a")


def test_grammars_are_kept_and_forgotten(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "MAX_KEPT", 2)
    grammars = make_engine(cache=PAGES).grammars
    assert grammars is not None
    for text in ("ab", "cd", "ef", "ab"):
        grammars.check(forms.of_choice([text]))
    assert len(grammars._known) == 2
    assert grammars.knows(forms.of_choice(["ef"])) and not grammars.knows(forms.of_choice(["cd"]))
    monkeypatch.setattr(forms, "MAX_KEPT_CHARS", 10)
    grammars.check(forms.of_choice(["gh"]))
    assert len(grammars._known) == 1


def test_while_one_is_compiled_the_engine_finds_another(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = make_engine(cache=PAGES).grammars
    assert grammars is not None
    known, slow = forms.of_regex("a"), forms.of_regex("b+")
    grammars.check(known)
    begun, may_end, compiled = threading.Event(), threading.Event(), grammars._compiled

    def slowly(grammar: str) -> object:
        begun.set()
        assert may_end.wait(30)
        return compiled(grammar)

    monkeypatch.setattr(grammars, "_compiled", slowly)
    compiling = threading.Thread(target=grammars.check, args=(slow,), daemon=True)
    compiling.start()
    assert begun.wait(30)
    found = threading.Thread(target=grammars.matcher, args=(known,), daemon=True)
    found.start()
    found.join(10)
    was_held_up = found.is_alive()
    may_end.set()
    compiling.join(30)
    assert not was_held_up


def test_a_grammar_that_takes_too_long_is_refused_before_it_runs(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = make_engine(cache=PAGES).grammars
    assert grammars is not None
    monkeypatch.setattr(forms, "MAX_COMPILE_S", 0.0)
    with pytest.raises(RequestError, match="to compile"):
        grammars.check(forms.of_regex("(ab|c)+"))
    assert not grammars._known


def test_one_that_would_take_minutes_is_ended_and_the_next_is_compiled(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms, "MAX_COMPILE_S", 0.5)
    grammars = make_engine(cache=PAGES).grammars
    assert grammars is not None
    with pytest.raises(
        RequestError, match=r"^grammar: compiling it ran for too long: not done within 0\.5 s"
    ):
        grammars.check(forms.of_json_schema({"type": "integer", "multipleOf": 999983}))
    grammars.check(forms.of_regex("(ab|c)+"))
    assert len(grammars._known) == 1 and grammars._child is not None
    special = forms.of_lark('start: "a" <[1]>')
    assert grammars._child.ask(json.dumps({"grammar": special})) == {"error": ""}
    with pytest.raises(RequestError, match="^grammar: in GBNF, longer than 16384 characters"):
        forms.of_grammar("root ::= " + " " * 17_000)


def test_one_that_needs_much_stack_ends_its_own_process_alone(make_engine: MakeEngine) -> None:
    """Rules within rules: the library calls itself for each. A thread has 2 MiB where the stack is unlimited."""
    grammars = make_engine(cache=PAGES).grammars
    assert grammars is not None

    def nested(depth: int) -> str:
        rules = "\n".join(f't{level}: "a" t{level + 1}' for level in range(depth))
        return forms.of_lark(f'start: t0\n{rules}\nt{depth}: "b"')

    with pytest.raises(RequestError, match="^grammar: compiling it ended its process with exit code -11"):
        grammars.check(nested(600))
    grammars.check(nested(200))


def test_tool_markers_say_why_an_answer_ended(make_engine: MakeEngine) -> None:
    engine = make_engine(cache=PAGES)
    called = replace(WARM, grammar=forms.of_choice(["<call>x"]), tool_markers=("<call>",))
    [answer] = serve(engine, prompts([20]), called)
    assert answer.finish_reason == "tool_calls"
    [answer] = serve(engine, prompts([20]), replace(called, grammar=forms.of_choice(["<cal>x"])))
    assert answer.finish_reason == "stop"
    [answer] = serve(engine, prompts([20]), replace(called, max_new_tokens=1))
    assert answer.finish_reason == "length"
