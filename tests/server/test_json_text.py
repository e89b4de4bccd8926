"""A body's JSON: counted before it is parsed, and parsed beside the event loop where it is long."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hiradix.apps.server import json_text, schema
from hiradix.apps.server.intake import FREE_BYTES
from tests.server.scripted import ScriptedService, application
from tests.server.test_intake import WAIT_S, Call, run

TEXTS = st.text(st.sampled_from('a\\"[{,]}\né\u2028'), max_size=8)
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def counted(value: Any) -> tuple[int, int]:
    """Lists and objects of `value`, and the commas between their values."""
    if not isinstance(value, list | dict):
        return 0, 0
    within = [counted(one) for one in (value.values() if isinstance(value, dict) else value)]
    nested, commas = (sum(numbers) for numbers in zip(*within, strict=True)) if within else (0, 0)
    return nested + 1, commas + max(0, len(within) - 1)


@given(VALUES, st.booleans())
def test_what_is_counted_is_what_json_has(value: Any, is_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii).encode()
    assert json_text._outside_of_texts(text) == counted(value)
    assert json_text.parse(text) == value


def test_only_values_outside_of_texts_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_text, "MAX_VALUES", 6)
    monkeypatch.setattr(json_text, "MAX_NESTED", 2)
    for allowed in ("[1,2,3,4,5,6]", '["[[[[[,,,,,,,,,,,,\\"[[[[[,"]', '{"a":[],"b":1}'):
        assert json_text.parse(allowed.encode()) == json.loads(allowed)
    for refused in ("[1,2,3,4,5,6,7]", "[[],[]]", '{"a":{"b":[]}}', '["\\\\",1,2,3,4,5,6]'):
        with pytest.raises(ValueError, match="more than 2 lists"):
            json_text.parse(refused.encode())
    assert json_text.parse(b"\xef\xbb\xbf[1]") == [1], "with a byte order mark"
    with pytest.raises(ValueError, match="utf-8"):
        json_text.parse("[1]".encode("utf-16"))


def test_a_body_of_millions_of_values_is_refused_unparsed() -> None:
    async def work() -> None:
        service = ScriptedService()
        for data in (
            b'{"prompt":[' + b"[]," * (1 << 20) + b"1]}",
            b'{"prompt":[' + b"1," * (1 << 20) + b"1]}",
        ):
            call = await Call(application(service)).send(data)
            assert await call.done() == 400 and b"lists and objects" in call.body
        assert not service.requests

    run(work)


def test_a_long_body_is_parsed_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    may, begun, parse = threading.Event(), list[int](), json_text.parse

    def held(data: bytes) -> Any:
        if len(data) > FREE_BYTES:
            begun.append(threading.get_ident())
            assert may.wait(WAIT_S)
        return parse(data)

    monkeypatch.setattr(schema, "parse", held)

    async def work() -> None:
        app = application(ScriptedService())
        long = [await Call(app).send(b'{"prompt":"x"}' + b" " * FREE_BYTES) for _ in range(3)]
        for _ in range(10):
            assert await (await Call(app).ask("short")).done() == 200
        assert len(begun) <= 1, "one at a time"
        may.set()
        assert [await call.done() for call in long] == [200] * 3
        assert len(begun) == 3 and threading.get_ident() not in begun
        bad = await Call(app).send(b'{"prompt":3}' + b" " * FREE_BYTES)
        assert await bad.done() == 400 and b'"param":"prompt"' in bad.body

    asyncio.run(asyncio.wait_for(work(), WAIT_S))


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": [1] * 3000}]},
        {"messages": [{"role": "user", "content": "x", **dict.fromkeys(map(str, range(3000)))}]},
        {"messages": [{"role": "user", "content": "x"}], **dict.fromkeys(map(str, range(3000)))},
    ],
    ids=["parts", "fields of a message", "fields"],
)
def test_thousands_of_errors_are_not_listed(fields: dict[str, Any]) -> None:
    async def work() -> None:
        call = await Call(application(ScriptedService()), "/v1/chat/completions").send(
            json.dumps(fields).encode()
        )
        wanted = b"3001 fields" if len(fields) > 3000 else b"values that are wrong"
        assert await call.done() == 400 and wanted in call.body

    run(work)
