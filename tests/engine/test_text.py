"""Text of a growing answer: nothing lost, nothing shown too early, cut before stop strings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hiradix.apps.engine import RequestError, SamplingParams
from hiradix.apps.engine.api import ChatPrompt
from hiradix.apps.engine.tokenizer import TextStream, Tokenizer
from tests.engine.checkpoints import Reference, prompts
from tests.engine.conftest import MakeEngine
from tests.engine.driving import serve

ABC = st.text(alphabet="abc", max_size=40)


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8 text."""

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


def stream(stop: tuple[str, ...] = ()) -> TextStream:
    return TextStream(Bytes(), stop)  # type: ignore[arg-type]


def feed(text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    """Pieces shown while the bytes of `text` come in, the held-back end last."""
    growing = stream(stop)
    pieces = []
    for byte in text.encode():
        pieces.append(growing.push(byte))
        if growing.stopped:
            return pieces, growing
    return [*pieces, growing.finish()], growing


@given(st.text(max_size=40))
def test_all_text_comes_out_once_and_characters_whole(text: str) -> None:
    pieces, _ = feed(text)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@given(ABC, st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3))
def test_text_ends_behind_the_first_stop_string_where_that_is_asked_for(text: str, stops: list[str]) -> None:
    growing = TextStream(Bytes(), stops, includes_stop=True)  # type: ignore[arg-type]
    shown = ""
    for byte in text.encode():
        shown += growing.push(byte)
        if growing.stopped:
            break
    shown += growing.finish()
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    first = min((text.find(stop) for stop in stops if stop in text), default=None)
    if first is None:
        assert shown == text
    else:
        assert (
            shown
            == text[
                : min(
                    end
                    for end, stop in zip(ends, [s for s in stops if s in text])
                    if end - len(stop) == first
                )
            ]
        )


def test_a_stop_string_that_comes_too_early_is_text() -> None:
    growing = TextStream(Bytes(), ("ab",))  # type: ignore[arg-type]
    shown = "".join(growing.push(byte, may_stop=at >= 3) for at, byte in enumerate(b"abcab"))
    assert (shown, growing.stopped) == ("abc", True)


@given(ABC, st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    pieces, growing = feed(text, tuple(stops))
    shown = "".join(pieces)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert (shown, growing.stopped) == (text, False)
        return
    complete = text[: min(ends)]  # the stream stops with the first token that completes a stop string
    cut = min(complete.find(stop) for stop in stops if stop in complete)
    assert (shown, growing.stopped) == (text[:cut], True)


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    growing = stream(("STOP",))
    assert [growing.push(byte) for byte in b"a ST"] == ["a", " ", "", ""]
    assert growing.push(ord("x")) == "STx"
    assert growing.finish() == ""


def test_unfinished_character_at_the_end_is_shown_as_such() -> None:
    growing = stream()
    assert growing.push("é".encode()[0]) == ""
    assert growing.finish() == "\ufffd"


def test_engine_text_is_the_decoded_answer(llama: Reference, make_engine: MakeEngine) -> None:
    engine = make_engine()
    asked = prompts([12, 30, 5], seed=4)
    for answer in serve(engine, asked, SamplingParams(max_new_tokens=25)):
        assert answer.text == engine.tokenizer.decode(answer.token_ids)


def test_engine_ends_at_a_stop_string(make_engine: MakeEngine) -> None:
    engine = make_engine()
    asked = prompts([12], seed=4)
    [full] = serve(engine, asked, SamplingParams(max_new_tokens=25))
    stop = full.text[6:9]
    [answer] = serve(engine, asked, SamplingParams(max_new_tokens=25, stop=(stop,)))
    assert answer.text == full.text[: full.text.find(stop)]
    assert answer.finish_reason == "stop"
    assert len(answer.token_ids) < 25


def test_stop_strings_need_a_tokenizer(reference: object, make_engine: MakeEngine) -> None:
    path = reference("qwen2").path  # type: ignore[operator]
    engine = make_engine(model_path=str(path))
    assert engine.tokenizer is None
    with pytest.raises(RequestError, match="stop"):
        engine.add_request("a", [1], SamplingParams(stop=("x",)))


def test_chat_is_rendered_and_encoded(llama: Reference) -> None:
    tokenizer = Tokenizer.find(str(llama.path))
    assert tokenizer is not None and tokenizer.has_chat_template
    ids = tokenizer.apply_chat(ChatPrompt([{"role": "user", "content": "what is a slot"}]))
    assert tokenizer.decode(ids) == "user: what is a slot\nassistant:"
    assert ids == tokenizer.encode("user: what is a slot\nassistant:")


class Counted:
    """Tokens below 256 are bytes, others are special and show nothing; counts the tokens it decodes."""

    num_decoded = 0

    def decode(self, token_ids: list[int]) -> str:
        self.num_decoded += len(token_ids)
        return bytes(token for token in token_ids if token < 256).decode("utf-8", "replace")


@pytest.mark.parametrize(
    "silent", [[300] * 8000, [0x80] * 8000, [0xF0] * 8000, [0xF0, 300] * 4000, [0xF0, 0x9F, 300, 300] * 2000],
    ids=["special", "continuations", "beginnings", "mixed", "halves"],
)  # fmt: skip
def test_a_run_that_shows_nothing_costs_linear_time(silent: list[int]) -> None:
    tokenizer = Counted()
    stream = TextStream(tokenizer)  # type: ignore[arg-type]
    text = "".join(map(stream.push, [*b"before ", *silent, *"after \u20ac".encode()])) + stream.finish()
    assert tokenizer.num_decoded < 300 * len(silent)
    assert text.startswith("before ") and text.endswith("after \u20ac")
    assert "\ufffd" in text or 300 in silent


def test_special_tokens_anywhere_change_no_text() -> None:
    words = "a \u20ac b \U0001f600\U0001f600 c".encode()
    tokenizer, tokens = Counted(), []
    for byte in words:
        tokens += [byte, *[300] * (byte % 50)]
    stream = TextStream(tokenizer)  # type: ignore[arg-type]
    assert "".join(map(stream.push, tokens)) + stream.finish() == words.decode()
