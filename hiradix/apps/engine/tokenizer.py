"""Text in and out: the model directory's tokenizer, incremental detokenisation, stop strings."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hiradix.apps.engine.api import ChatPrompt, RequestError
from hiradix.apps.engine.chat_template import ChatTemplate, TemplateError
from hiradix.apps.engine.grammar import Grammars
from hiradix.apps.engine.markers import overlap
from hiradix.apps.engine.token_bound import TokenBound
from hiradix.errors import ConfigError, Misuse

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_UNFINISHED = "\ufffd"
MOST_PENDING = 32  # tokens of an answer that show nothing yet and are decoded again with each further one
CHARACTER_TOKENS = 4  # at most, of one character: a byte each


class Tokenizer:
    """A transformers tokenizer from a local directory; safe to use from several threads for encoding."""

    def __init__(self, path: str):
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"model path {path!r}: cannot load the tokenizer: {error}") from error
        is_fast = getattr(self._tokenizer, "is_fast", False)
        self._bound = TokenBound(self._tokenizer.backend_tokenizer.to_str()) if is_fast else None
        self._template = _template_of(self._tokenizer)

    @staticmethod
    def find(path: str) -> Tokenizer | None:
        """The tokenizer of a model directory, None where the directory has none."""
        if not any((Path(path) / name).is_file() for name in _TOKENIZER_FILES):
            return None
        return Tokenizer(path)

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat` can be used."""
        return self._template is not None

    def encode(
        self, text: str, context_length: int | None = None, *, add_special_tokens: bool = True
    ) -> list[int]:
        """Token ids of a prompt, with the special tokens the model wants at its start, or without.

        RequestError where the text has half a surrogate pair, which JSON can carry and no tokenizer takes,
        and where its length alone says that it does not fit `context_length` tokens: before it is tokenised.
        """
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise RequestError(f"half a character at {error.start} of the text") from error
        least = 0 if self._bound is None or context_length is None else self._bound.least(text)
        if context_length is not None and 0 < context_length <= least:
            raise RequestError(
                f"the prompt has at least {least} tokens, but the context length is {context_length} tokens "
                "including at least one of the answer"
            )
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids` without special tokens; an unfinished character shows as U+FFFD."""
        return self._decode(list(token_ids), skip_special=True)

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """`decode` with special tokens shown."""
        return self._decode(list(token_ids), skip_special=False)

    def token_text(self, token_id: int) -> str:
        """One token by itself, special tokens shown, as logprob listings want it."""
        return self._decode([token_id], skip_special=False)

    def grammars(self, end_token_ids: Collection[int], vocab_size: int) -> Grammars:
        """Grammars of answers in this tokenizer's tokens."""
        return Grammars(self._tokenizer, end_token_ids, vocab_size)

    def _decode(self, token_ids: list[int], *, skip_special: bool) -> str:
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )
        return text

    @property
    def chat_template(self) -> str:
        """The text of the chat template, "" where there is none."""
        return "" if self._template is None else self._template.template

    def apply_chat(self, conversation: ChatPrompt, context_length: int | None = None) -> list[int]:
        """Token ids of a conversation.

        RequestError where the model has no chat template, where the template fails or does not end in time,
        and where `encode` refuses its text.
        """
        if self._template is None:
            raise RequestError("the model has no chat template; use completions")
        try:
            text = self._template.render(conversation.messages, conversation.variables())
        except TemplateError as error:
            raise RequestError(f"messages: the chat template {error}") from error
        if conversation.continues_last:
            text = _up_to_the_end_of(conversation.messages[-1], text)
        return self.encode(text, context_length, add_special_tokens=conversation.add_special_tokens)


def _template_of(tokenizer: Any) -> ChatTemplate | None:
    """The chat template that transformers would take; None without one, or with several and no default."""
    if not tokenizer.chat_template:
        return None
    try:
        template = tokenizer.get_chat_template()
    except ValueError:
        return None
    variables = {"tools": None, "documents": None}
    return ChatTemplate(template, variables | tokenizer.special_tokens_map)


def _up_to_the_end_of(message: Mapping[str, Any], text: str) -> str:
    """A rendered conversation without what the template puts behind its last message."""
    content = str(message.get("content") or "").strip()
    start = text.rfind(content)
    if not content or start < 0:
        raise RequestError(
            "continue_final_message: the chat template does not show the last message as it is"
        )
    return text[: start + len(content)]


class TextStream:
    """The text of one growing answer: pieces that are final, cut before the first stop string, or behind it.

    Text is held back while it may be part of an unfinished character or the beginning of a stop string.
    Cost per token: the tokens since the last finished piece, at most about `MOST_PENDING`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        includes_stop: bool = False,
        shows_special: bool = False,
    ):
        self._decode = tokenizer.decode_all if shows_special else tokenizer.decode
        self._stop = tuple(stop)
        self._includes_stop = includes_stop
        self._token_ids: list[int] = []
        self._before = 0  # tokens [before, shown) give the context that tokens from shown on are decoded in
        self._shown = 0
        self._held = ""
        self.stopped = False
        self.matched: str | None = None  # the stop string that is complete

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """New final text after one more token; sets `stopped` when a stop string is complete, if it may."""
        if self.stopped:
            raise Misuse("a token after a stop string")
        self._token_ids.append(token_id)
        piece = self._decode_new(final=False)
        if not may_stop:
            text, self._held = self._held + piece, ""
            return text
        return self._release(piece) if piece else ""

    def finish(self) -> str:
        """The text held back, at the end of the answer; nothing after a stop string."""
        if self.stopped:
            return ""
        text = self._release(self._decode_new(final=True))
        if self.stopped:
            return text
        text, self._held = text + self._held, ""
        return text

    def _decode_new(self, final: bool) -> str:
        old = self._decode(self._token_ids[self._before : self._shown])
        new = self._decode(self._token_ids[self._before :])
        if not final and (len(new) <= len(old) or new.endswith(_UNFINISHED)):
            return self._cut_short(old) if len(self._token_ids) - self._shown >= MOST_PENDING else ""
        self._before, self._shown = self._shown, len(self._token_ids)
        return new[len(old) :]

    def _cut_short(self, old: str) -> str:
        """The final part of a long run that shows no text yet.

        First, tokens without text, such as special ones, are dropped (a space by itself may decode to nothing,
        two do not). Otherwise the run ends in an unfinished character: it is cut a few tokens earlier, behind
        the last finished one. If there is none, the bytes are no text and are shown as U+FFFD, but for the
        last, which may begin a character.
        """
        pending = self._token_ids[self._shown :]
        kept = [token for token in pending if self._decode([token, token])]
        if len(kept) < len(pending):
            self._token_ids[self._shown :] = kept
            return ""
        end = len(self._token_ids)
        for stop in range(end - 1, end - 1 - CHARACTER_TOKENS, -1):
            new = self._decode(self._token_ids[self._before : stop])
            if not new.endswith(_UNFINISHED):
                break
        if len(new) <= len(old):
            del self._token_ids[self._shown : stop]
            return ""
        self._before, self._shown = self._shown, stop
        return new[len(old) :]

    def _release(self, piece: str) -> str:
        text = self._held + piece
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            at = min(found)
            self.matched = min((stop for stop in self._stop if text.startswith(stop, at)), key=len)
            return text[: at + len(self.matched) if self._includes_stop else at]
        keep = max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]
