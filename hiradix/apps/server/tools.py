"""Tool calls as models write them: a table of families, a reader of growing answers, grammars that force calls.

A family is known by its chat template, or named by `--tool-call-parser`. Where a template has no place for
tools, they are described in a system message, and calls are written as Hermes models write them.
"""

from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hiradix.apps.engine.api import is_text
from hiradix.apps.engine.markers import overlap

Calls = list[tuple[str, str]]
"""Names and arguments, these as JSON."""
PLAIN_STARTS = "{["
PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of an answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """More of a tool call: the first of one has `id` and `name`, each more of the arguments' JSON."""

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""


Delta = TextDelta | CallDelta


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The way a family of models writes calls.

    begin, end: texts before and behind a call, or a list of them; begin "": the answer is calls where it starts
    like them. parse: reads what is between, None for JSON objects of `name` and `arguments`, which are read as
    they grow. signs: texts of a chat template that say so. is_special: begin is a special token, which an
    answer's text does not show otherwise; of some models in any family, so that the server asks. markers: by
    which the engine knows an answer that calls.
    """

    name: str
    begin: str
    end: str
    signs: tuple[str, ...]
    markers: tuple[str, ...]
    arguments: str = "arguments"
    parse: Callable[[str], Calls] | None = None
    is_special: bool = False
    id_chars: int = 24
    opening: str = ""
    closing: str = ""

    @property
    def forced(self) -> ToolFormat:
        """The form that a grammar writes a call in: this one where it is JSON, else plain JSON."""
        return self if self.parse is None else replace(PLAIN, id_chars=self.id_chars)


# -- what is between the marks -------------------------------------------------------------


def _python(text: str) -> Calls:
    """Calls of a Python list, `[get(city="Bonn"), now()]`: constants only. ValueError."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(str(error)) from error
    calls: Calls = []
    for node in tree.elts if isinstance(tree, ast.List) else [tree]:
        if not isinstance(node, ast.Call) or node.args or any(word.arg is None for word in node.keywords):
            raise ValueError("not a list of calls by keyword")
        values = {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
        calls.append((ast.unparse(node.func), _json(values)))
    if not calls:
        raise ValueError("no call")
    return calls


_XML_CALL = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*|\Z)", re.DOTALL)
_XML_VALUE = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _xml(text: str) -> Calls:
    """`<function=NAME><parameter=KEY>VALUE</parameter>...</function>`; values that are JSON are read as such."""
    calls: Calls = []
    for name, body in _XML_CALL.findall(text):
        values = {key.strip(): _json_or_text(value) for key, value in _XML_VALUE.findall(body)}
        calls.append((name.strip(), _json(values)))
    if not calls:
        raise ValueError("no call")
    return calls


def _json(value: Any) -> str:
    """The value as JSON; half a surrogate pair, which UTF-8 has no bytes for, stays escaped. ValueError for
    numbers that JSON has not: NaN and infinities."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if is_text(text) else json.dumps(value)


def _json_or_text(text: str) -> Any:
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return text
    return value


_DEEPSEEK_CALL = re.compile(
    r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?([^\n<]+?)(?:\n```json\n|<｜tool▁sep｜>)(.*?)(?:\n```)?\s*<｜tool▁call▁end｜>",
    re.DOTALL,
)


def _deepseek(text: str) -> Calls:
    return _checked(_DEEPSEEK_CALL.findall(text))


_NAMED_CALL = re.compile(
    r"\s*(?:\[TOOL_CALLS\])?\s*([\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\](.*?)(?=\[TOOL_CALLS\]|\Z)", re.DOTALL
)


def _named(text: str) -> Calls:
    return _checked(_NAMED_CALL.findall(text))


def _checked(calls: Calls) -> Calls:
    found = [(name.strip(), text.strip()) for name, text in calls]
    if not found or not all(isinstance(json.loads(text), dict) for _, text in found):
        raise ValueError("no call")
    return found


PLAIN = ToolFormat("json", "", "", (), ('{"name"', '"name":'))
FORMATS: Mapping[str, ToolFormat] = {
    one.name: one
    for one in (
        ToolFormat("qwen3_coder", "<tool_call>", "</tool_call>", ("<function=",), ("<tool_call>",), parse=_xml),
        ToolFormat("hermes", "<tool_call>", "</tool_call>", ("<tool_call>",), ("<tool_call>",)),
        ToolFormat("mistral_args", "[TOOL_CALLS]", "", ("[ARGS]",), ("[TOOL_CALLS]",), parse=_named,
                   is_special=True, id_chars=9),
        ToolFormat("mistral", "[TOOL_CALLS]", "", ("[TOOL_CALLS]",), ("[TOOL_CALLS]",), is_special=True,
                   id_chars=9, opening="[", closing="]"),
        ToolFormat("lfm2", "<|tool_call_start|>", "<|tool_call_end|>", ("<|tool_call_start|>",),
                   ("<|tool_call_start|>",), parse=_python, is_special=True),
        ToolFormat("deepseek_v3", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", ("<｜tool▁calls▁begin｜>",),
                   ("<｜tool▁calls▁begin｜>",), parse=_deepseek, is_special=True),
        ToolFormat("granite", "<|tool_call|>", "", ("<|tool_call|>",), ("<|tool_call|>",), is_special=True,
                   opening="[", closing="]"),
        ToolFormat("llama3_json", "", "", ("<|python_tag|>", '"parameters":'), ('{"name"', "<|python_tag|>"),
                   arguments="parameters", is_special=True),
        ToolFormat("pythonic", "", "", ("[func_name1(",), (")]",), parse=_python),
        PLAIN,
    )
}  # fmt: skip
"""The families, the more special first: of two that fit a template the first is it."""


def format_of(template: str) -> ToolFormat:
    """The family whose signs a chat template has; Hermes' where it has none, as `described` asks for."""
    if "tools" in template:
        for one in FORMATS.values():
            if any(sign in template for sign in one.signs):
                return one
        return PLAIN
    return FORMATS["hermes"]


# -- templates without tools ---------------------------------------------------------------


def described(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Messages that say in words what a template without a place for tools cannot show."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = (
        f"You may call these functions:\n<tools>\n{listed}\n</tools>\nTo call one, answer with "
        '<tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call>'
    )
    shown = [_in_words(message) for message in messages]
    if not tools:
        return shown
    if shown and shown[0]["role"] == "system":
        return [{"role": "system", "content": f"{shown[0]['content']}\n\n{text}"}, *shown[1:]]
    return [{"role": "system", "content": text}, *shown]


def _in_words(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        for call in message.get("tool_calls") or ()
    ]
    return {"role": message["role"], "content": "\n".join([content] * bool(content) + calls)}


# -- grammars ------------------------------------------------------------------------------


def calls_rules(
    form: ToolFormat, tools: Sequence[Mapping[str, Any]], most_one: bool, special: Callable[[str], int | None]
) -> str:
    """Rules of a Lark grammar whose `calls` are calls of these functions, one or (unless most_one) more.

    special: the id of the special token of a text, None where it is plain text.
    """
    numbers = range(len(tools))
    rules = [f"call: {' | '.join(f'call_{number}' for number in numbers)}"]
    for number, tool in enumerate(tools):
        function = tool["function"]
        head = f'{{"name": {json.dumps(function["name"])}, "{form.arguments}": '
        schema = function.get("parameters") or {"type": "object"}
        rules += [
            f"call_{number}: {json.dumps(head)} args_{number} {json.dumps('}')}",
            f"args_{number}: %json {json.dumps(schema)}",
        ]
    begin, end = _mark(form.begin, special), _mark(form.end, special)
    if form.end:
        unit, separator, opening, closing = f'{begin} "\\n" call "\\n" {end}', "\\n", "", ""
    else:
        unit, separator = "call", ", " if form.opening else "; "
        opening, closing = f"{begin} {_literal(form.opening)}", _literal(form.closing)
    more = "" if most_one else f'("{separator}" unit)*'
    return "\n".join([f"calls: {opening} unit {more} {closing}", f"unit: {unit}", *rules])


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


def _mark(text: str, special: Callable[[str], int | None]) -> str:
    token = special(text) if text else None
    return _literal(text) if token is None else f"<[{token}]>"


# -- growing answers -----------------------------------------------------------------------

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


class CallReader:
    """Reads one growing answer: text, and calls as they come. `push` its pieces, then `finish`.

    Arguments of JSON are handed on as they are written; of other forms a call at a time. What begins like a call
    and is none stays text.
    """

    def __init__(self, form: ToolFormat, most: int | None = None):
        self._form = form
        self._most = most
        self._rest = ""
        self._in_calls = False
        self._before: str | None = ""  # what may be of calls that have not come; None: one has
        self._begun = False
        self._is_behind = False  # of a call: spaces there are not text
        self._object: _GrowingObject | None = None
        self.num_calls = 0

    def push(self, piece: str) -> list[Delta]:
        """Read a further piece of the answer; the text and parts of calls that are certain by now."""
        self._rest += piece
        return self._read(final=False)

    def finish(self) -> list[Delta]:
        """End the answer; the text and parts of calls that were held back."""
        return self._read(final=True)

    def _read(self, final: bool) -> list[Delta]:
        found: list[Delta] = []
        while True:
            before = (len(self._rest), self._in_calls, self._object is None)
            found += self._step(final)
            if (len(self._rest), self._in_calls, self._object is None) == before:
                break
        if final and self._rest:
            found.append(TextDelta(self._rest))
            self._rest = ""
        return found

    def _step(self, final: bool) -> list[Delta]:
        if self._object is not None:
            return self._grow_object(final)
        if self._in_calls:
            return self._next_call(final) if self._form.parse is None else self._next_group(final)
        return self._text(final)

    def _text(self, final: bool) -> list[Delta]:
        form = self._form
        if not form.begin:
            return self._bare(final)
        if self._is_behind:
            self._rest = self._rest.lstrip()
            self._is_behind = not self._rest
        at = self._rest.find(form.begin)
        if at >= 0:
            text, self._rest = self._rest[:at], self._rest[at + len(form.begin) :]
            self._in_calls, self._before = True, form.begin
            return [TextDelta(text)] if text else []
        keep = 0 if final else overlap(self._rest, form.begin)
        text, self._rest = self._rest[: len(self._rest) - keep], self._rest[len(self._rest) - keep :]
        return [TextDelta(text)] if text else []

    def _bare(self, final: bool) -> list[Delta]:
        """A form without a mark: calls from the answer's beginning, or none at all."""
        if not self._begun:
            stripped = self._rest.lstrip()
            call = stripped.removeprefix(PYTHON_TAG).lstrip()
            if not final and (not call or PYTHON_TAG.startswith(stripped)):
                return []
            self._begun = True
            if call and call[0] in PLAIN_STARTS:
                self._before = self._rest[: len(self._rest) - len(call)]
                self._rest, self._in_calls = call, True
                return []
        text, self._rest = self._rest, ""
        return [TextDelta(text)] if text else []

    def _next_call(self, final: bool) -> list[Delta]:
        rest, end = self._rest.lstrip(" \t\r\n[],;"), self._form.end
        if self._before is not None:
            self._before += self._rest[: len(self._rest) - len(rest)]
        self._rest = rest
        if rest.startswith("{"):
            self._object = _GrowingObject()
        elif self._before is None and end and rest.startswith(end):
            self._rest, self._in_calls, self._is_behind = rest[len(end) :], False, True
        elif final or (rest and not (rest != end and end.startswith(rest))):
            return self._no_call("")
        return []

    def _no_call(self, text: str) -> list[Delta]:
        """Treat `text` as such, as it is no call; with what is in front of it, unless a call followed that.
        The rest is looked at anew."""
        text = (self._before or "") + text
        self._in_calls, self._begun = False, True
        return [TextDelta(text)] if text else []

    def _grow_object(self, final: bool) -> list[Delta]:
        grown = self._object
        assert grown is not None
        self._rest = grown.push(self._rest)
        found: list[Delta] = []
        if grown.name is None and grown.is_whole:
            call = _call_of(grown.text, self._form)
            if call is None:
                self._object = None
                return self._no_call(grown.text)
            found += self._called([call])
        elif grown.name is not None:
            new = grown.take()
            if not grown.is_told:
                grown.is_told = True
                found += self._called([(grown.name, new)])
            elif new and not self._is_over:
                found.append(CallDelta(self.num_calls - 1, new))
        if grown.is_whole:
            self._object = None
        elif final:
            self._object = None
            if grown.name is None:
                found += self._no_call(grown.text)
        return found

    @property
    def _is_over(self) -> bool:
        return self._most is not None and self.num_calls > self._most

    def _next_group(self, final: bool) -> list[Delta]:
        form = self._form
        at = self._rest.find(form.end) if form.end else -1
        if at < 0 and not final:
            return []
        body, rest = (self._rest, "") if at < 0 else (self._rest[:at], self._rest[at + len(form.end) :])
        assert form.parse is not None
        try:
            calls = form.parse(body)
            if not all(name and is_text(name) for name, _ in calls):
                raise ValueError("a call without a name")
        except (ValueError, TypeError, RecursionError):
            self._rest = rest
            return self._no_call(body + (form.end if at >= 0 else ""))
        self._rest, self._in_calls, self._is_behind = rest, False, True
        return self._called(calls)

    def _called(self, calls: Calls) -> list[Delta]:
        found: list[Delta] = []
        self._before = None
        for name, arguments in calls:
            self.num_calls += 1
            if not self._is_over:
                call_id = new_call_id(self._form)
                found.append(CallDelta(self.num_calls - 1, arguments, call_id, name))
        return found


class _GrowingObject:
    """A JSON object as it comes: its end, and of `{"name": ..., "arguments": {` what is behind that."""

    def __init__(self) -> None:
        self.text = ""
        self.name: str | None = None
        self.is_whole = False
        self.is_told = False
        self._depth = 0
        self._in_text = self._is_escaped = False
        self._from = self._taken = 0
        self._to: int | None = None

    def push(self, piece: str) -> str:
        """Take what belongs to it; the rest."""
        for at, char in enumerate(piece):
            if self._in_text:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == '"':
                    self._in_text = False
            elif char == '"':
                self._in_text = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 1 and self.name is not None and self._to is None:
                    self._to = len(self.text) + at + 1
                if self._depth == 0:
                    self.text += piece[: at + 1]
                    self.is_whole = True
                    return piece[at + 1 :]
            if self._depth == 2 and char == "{" and self.name is None and not self._in_text:
                self._find_name(piece[: at + 1])
        self.text += piece
        return ""

    def _find_name(self, more: str) -> None:
        """more: of the text, which is not put to it yet."""
        if head := _HEAD.match(self.text + more):
            try:
                name = json.loads(head[1], strict=False)
            except ValueError:  # an escape that JSON has not
                return
            if name and is_text(name):
                self.name, self._from = name, head.end()
                self._taken = self._from

    def take(self) -> str:
        """The part of the arguments that is new since the last call."""
        end = len(self.text) if self._to is None else self._to
        new, self._taken = self.text[self._taken : end], max(self._taken, end)
        return new


def _call_of(text: str, form: ToolFormat) -> tuple[str, str] | None:
    """The call that a whole JSON object is, None where it is none."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not name or not isinstance(arguments, dict | str):
        return None
    try:
        text = arguments if isinstance(arguments, str) else _json(arguments)
    except (ValueError, RecursionError):
        return None
    return (name, text) if is_text(name) and is_text(text) else None


def new_call_id(form: ToolFormat) -> str:
    """A name for a call; Mistral's templates ask for nine letters and digits."""
    text = uuid.uuid4().hex[: form.id_chars]
    return text if form.id_chars == 9 else f"call_{text}"
