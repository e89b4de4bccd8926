"""The least number of tokens of a text: never above what the tokenizer makes of it."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from hiradix.apps.engine import RequestError
from hiradix.apps.engine import tokenizer as engine_tokenizer
from hiradix.apps.engine.api import ChatPrompt
from hiradix.apps.engine.token_bound import TokenBound
from tests.engine.checkpoints import Reference

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SPACES = "\u0120" * 16
MARKED = "\u2581"
BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}


def byte_level(*, lost: int = 0, **fields: object) -> Tokenizer:
    """Byte-level BPE whose longest token is 16 spaces; `lost` bytes have no token."""
    names = [*ALPHABET[lost:], *("\u0120" * 2**n for n in range(1, 5))]
    merges = [("\u0120" * 2**n, "\u0120" * 2**n) for n in range(4)]
    made = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges if lost < 100 else []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def fallback(**fields: object) -> Tokenizer:
    """BPE over characters, a few known, other ones as bytes."""
    names = [*BYTES, MARKED, "a", "b", "ab", MARKED + "ab", "\u00e9", "<unk>"]
    merges = [("a", "b"), (MARKED, "ab")]
    vocab = {name: i for i, name in enumerate(names)}
    model = models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    made = Tokenizer(model)
    made.normalizer = normalizers.Sequence([normalizers.Prepend(MARKED), normalizers.Replace(" ", MARKED)])
    made.decoder = decoders.ByteFallback()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def split(behavior: str, pattern: object = " ") -> pre_tokenizers.PreTokenizer:
    """What splits by a pattern, and then takes bytes."""
    last = pre_tokenizers.ByteLevel(False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, behavior), last])


def with_token(made: Tokenizer, token: AddedToken) -> Tokenizer:
    made.add_tokens([token])
    return made


KNOWN = {
    "byte level": byte_level(),
    "nfc": byte_level(normalizer=normalizers.NFC()),
    "split": byte_level(pre_tokenizer=split("isolated", Regex(r"\s+"))),
    "fallback": fallback(),
    "metaspace": fallback(normalizer=None, pre_tokenizer=pre_tokenizers.Metaspace()),
    "dropped bytes": byte_level(lost=50),
    "dropped bytes, nfc": byte_level(lost=50, normalizer=normalizers.NFC()),
    "long added": with_token(byte_level(), AddedToken("<a long one of forty characters, or so>")),
}
SOME = st.sampled_from("ab \n<x\u00e9e\u0301\u212a\u1fef\u0344\U0001f600\u4e2d")
TEXT = st.text(SOME, max_size=60) | st.text()


@pytest.mark.parametrize("name", KNOWN)
@example("\u1fef" * 200)
@example("\u212a" * 200)
@example("\u03b1\u0313\u0300\u0345" * 50)
@example(" !#'()*+,-./0123456789" * 9)
@example(" " * 1000)
@example("<a long one of forty characters, or so>" * 20)
@example(MARKED + "ab" * 50)
@given(TEXT)
def test_no_encoding_has_fewer_tokens(name: str, text: str) -> None:
    made = KNOWN[name]
    bound = TokenBound(made.to_str())
    assert bound.least("~" * 10_000) >= 10_000 // 40
    assert bound.least(text) <= len(made.encode(text, add_special_tokens=False).ids)


def test_the_bound_is_met_by_the_longest_token() -> None:
    made = KNOWN["byte level"]
    assert TokenBound(made.to_str()).least(" " * 160) == len(made.encode(" " * 160).ids) == 10


def test_no_normal_form_shrinks_a_character_more_than_is_reckoned_with() -> None:
    for code in range(0x110000):
        if not 0xD800 <= code < 0xE000:
            text = chr(code)
            composed, parts = unicodedata.normalize("NFC", text), unicodedata.normalize("NFD", text)
            assert len(text.encode()) <= 3 * len(composed.encode())
            assert len(parts.encode()) <= 3 * len(composed.encode())


UNKNOWN = {
    "nfkc": byte_level(normalizer=normalizers.NFKC()),
    "strip": byte_level(normalizer=normalizers.Strip()),
    "nested": byte_level(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])),
    "shorter": byte_level(normalizer=normalizers.Replace("  ", " ")),
    "a pattern": byte_level(normalizer=normalizers.Replace(Regex(" +"), " ")),
    "removed": byte_level(pre_tokenizer=split("removed")),
    "whitespace": fallback(pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
    "all dropped": byte_level(lost=len(ALPHABET) - 1, normalizer=normalizers.Replace("a", "b")),
    "greedy added": with_token(byte_level(), AddedToken("<x>", lstrip=True)),
    "words": Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")),
    "unknown in one": Tokenizer(models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True)),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_nothing_is_said_of_tokenizers_that_drop_text(name: str) -> None:
    assert TokenBound(UNKNOWN[name].to_str()).least("  <x>" * 10_000) == 0


@pytest.fixture
def tokenizer(llama: Reference) -> engine_tokenizer.Tokenizer:
    return engine_tokenizer.Tokenizer(str(llama.path))


ENCODE: dict[str, Callable[[engine_tokenizer.Tokenizer, str, int], list[int]]] = {
    "text": lambda tokenizer, text, most: tokenizer.encode(text, most),
    "chat": lambda tokenizer, text, most: tokenizer.apply_chat(
        ChatPrompt([{"role": "user", "content": text}]), most
    ),
}


@pytest.mark.parametrize("kind", ENCODE)
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    kind: str, tokenizer: engine_tokenizer.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = ENCODE[kind]
    assert len(encode(tokenizer, "slots and pages " * 60, 100_000)) > 100

    def never(*_: object, **__: object) -> list[int]:
        raise AssertionError("tokenised")

    monkeypatch.setattr(tokenizer._tokenizer, "encode", never)
    with pytest.raises(RequestError, match=r"^the prompt has at least \d+ tokens, .* context length is 100 "):
        encode(tokenizer, "slots and pages " * 3000, 100)
