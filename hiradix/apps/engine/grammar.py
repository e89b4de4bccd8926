"""Answers of a given form: JSON of a schema, a regular expression, a choice, a grammar, by `llguidance`.

A form is compiled once to the library's own text, which is what a request carries and every rank reads.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch

from hiradix.apps.engine.api import RequestError
from hiradix.apps.engine.child_process import ChildError, LimitedChild

INSTALL_HINT = "needs pip install 'hiradix[structured]'"
MAX_KEPT = 64
MAX_KEPT_CHARS = 4 << 20  # of their texts: one of a million may take 100 MB compiled
MAX_CHARS = 1 << 20  # of one form's text
MAX_GBNF_CHARS = 1 << 14  # which is translated first, in a time that grows with its square
MEMORY_BYTES = 2 << 30  # of addresses, of the process that compiles first
STACK_BYTES = 1 << 20  # of that process; threads of this one, which compile it again, have 2 MiB at least
MAX_COMPILE_S = 5.0  # of the processor: the engine may have to do it again, and its other ranks do


class Matcher:
    """The progress of one answer in its grammar. The engine's thread."""

    def __init__(self, matcher: Any):
        self._matcher = matcher

    @property
    def failure(self) -> str | None:
        """The library's reason why the grammar can be followed no further; None while it can."""
        if not self._matcher.is_error():
            return None
        return f"the answer's form cannot be followed: {self._matcher.get_error()[:500]}"

    @property
    def is_complete(self) -> bool:
        """Whether nothing but the end may follow."""
        return bool(self._matcher.is_stopped())

    def mask(self, logits: torch.Tensor) -> None:
        """Forbid, in place, what may not follow; nothing once it has failed."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self.failure is not None:
            return
        allowed = np.zeros(len(logits), np.bool_)
        known = np.unpackbits(bits, bitorder="little")[: len(logits)]
        allowed[: len(known)] = known
        logits.masked_fill_(torch.from_numpy(~allowed).to(logits.device), -torch.inf)

    def accept(self, token_id: int) -> None:
        """Advance by a token that was drawn."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)


class Grammars:
    """Compiled grammars of one model, the least recently used of them forgotten. Safe to use from any thread.

    tokenizer: of transformers. The first use costs a second of a large vocabulary.
    """

    def __init__(self, tokenizer: Any, end_token_ids: Collection[int], vocab_size: int):
        self._tokenizer = tokenizer
        self._ends = sorted(end_token_ids)
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._vocabulary_lock = threading.Lock()
        self._vocabulary: Any = None
        self._known: OrderedDict[str, Any] = OrderedDict()
        self._child: LimitedChild | None = None

    def check(self, grammar: str) -> None:
        """Compile it, for `matcher` to find. RequestError where it is none, or the library is not there, or it
        takes more than MAX_COMPILE_S: first in a process that ends then, as nothing ends it in this one."""
        self._vocabulary_once()
        if not self.knows(grammar):
            self._try(grammar)
        start_s = time.thread_time()
        self.matcher(grammar)
        if time.thread_time() - start_s > MAX_COMPILE_S:
            with self._lock:
                self._known.pop(grammar, None)
            raise RequestError(f"grammar: takes more than {MAX_COMPILE_S:g} s to compile")

    def knows(self, grammar: str) -> bool:
        """Whether it is compiled; then it counts as used."""
        with self._lock:
            is_known = grammar in self._known
            if is_known:
                self._known.move_to_end(grammar)
        return is_known

    def matcher(self, grammar: str) -> Matcher:
        """A matcher at the beginning of `grammar`. RequestError. While one is compiled others are found."""
        with self._lock:
            known = self._known.get(grammar)
        if known is None:
            known = self._compiled(grammar)
        with self._lock:
            self._known[grammar] = known
            self._known.move_to_end(grammar)
            while len(self._known) > MAX_KEPT or (
                len(self._known) > 1 and sum(map(len, self._known)) > MAX_KEPT_CHARS
            ):
                self._known.popitem(last=False)
            return Matcher(known.deep_copy())

    def special_token(self, text: str) -> int | None:
        """The id of the special token that is written so, None where that is plain text."""
        found: int | None = self._tokenizer.convert_tokens_to_ids(text)
        return found if found is not None and found in self._tokenizer.all_special_ids else None

    def _try(self, grammar: str) -> None:
        with self._vocabulary_lock:
            if self._child is None:
                self._child = LimitedChild("grammar_child.py", self._for_child(), MAX_COMPILE_S)
        try:
            self._child.ask(json.dumps({"grammar": grammar}))
        except ChildError as error:
            raise RequestError(f"grammar: compiling it {error}") from error

    def _for_child(self) -> dict[str, Any]:
        size = max(self._vocab_size, len(self._tokenizer))
        added = self._tokenizer.added_tokens_decoder.items()
        special = {token: str(text) for token, text in added if token < size}
        limits = {"seconds": MAX_COMPILE_S, "bytes": MEMORY_BYTES, "stack": STACK_BYTES}
        ends = [token for token in self._ends if token < size] or [size - 1]
        return {"vocab_size": size, "special": special, "ends": ends, "limits": limits}

    def _compiled(self, grammar: str) -> Any:
        matcher = _library().LLMatcher(self._vocabulary_once(), grammar, log_level=0)
        if matcher.is_error():
            raise RequestError(f"grammar: {matcher.get_error()[:500]}")
        return matcher

    def _vocabulary_once(self) -> Any:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            return self._vocabulary

    def _make_vocabulary(self) -> Any:
        _library()
        from llguidance.hf import from_tokenizer

        if not getattr(self._tokenizer, "is_fast", False):
            raise RequestError("grammar: this model's tokenizer is none that answers can be constrained with")
        ends = [token for token in self._ends if token < self._vocab_size] or None
        size = max(self._vocab_size, len(self._tokenizer))
        return from_tokenizer(self._tokenizer, n_vocab=size, eos_token=ends)


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise RequestError(f"grammar: structured output {INSTALL_HINT}") from error
    return llguidance


def _bounded(text: str) -> str:
    if len(text) > MAX_CHARS:
        raise RequestError(f"grammar: longer than {MAX_CHARS} characters")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"grammar: half a character at {error.start} of the text") from error
    return text


def of_json_schema(schema: Any) -> str:
    """The grammar of JSON that a schema allows; {} is any value, {"type": "object"} any object."""
    library = _library()
    try:
        text = json.dumps(schema)
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(f"grammar: no JSON schema: {error}") from error
    try:
        grammar: str = library.LLMatcher.grammar_from_json_schema(_bounded(text))
    except ValueError as error:
        raise RequestError(f"grammar: no JSON schema: {error}") from error
    return grammar


def of_json_text(schema: Any) -> str:
    """`of_json_schema` of a schema that may be written as text."""
    if isinstance(schema, str):
        text = _bounded(schema)
        try:
            schema = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"grammar: no JSON schema: {error}") from error
    return of_json_schema(schema)


def of_regex(pattern: str) -> str:
    """The grammar of what a regular expression matches as a whole."""
    grammar: str = _library().LLMatcher.grammar_from_regex(_bounded(pattern))
    return grammar


def of_choice(texts: Sequence[str]) -> str:
    """The grammar of exactly one of some texts."""
    return of_lark("start: " + " | ".join(json.dumps(text) for text in texts))


def of_lark(text: str) -> str:
    """The grammar that a text in Lark's notation describes."""
    grammar: str = _library().LLMatcher.grammar_from_lark(_bounded(text))
    return grammar


def of_grammar(text: str) -> str:
    """The grammar that a text in Lark's notation or, where it has `::=` in it, in GBNF describes."""
    if "::=" in text:
        _library()
        from llguidance.gbnf_to_lark import any_to_lark

        if len(text) > MAX_GBNF_CHARS:
            raise RequestError(f"grammar: in GBNF, longer than {MAX_GBNF_CHARS} characters")
        text = _bounded(text)
        try:
            text = any_to_lark(text)
        except Exception as error:  # it raises what it likes
            raise RequestError(f"grammar: {error}") from error
    return of_lark(text)
