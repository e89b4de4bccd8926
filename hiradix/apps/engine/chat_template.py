"""A model's chat template: a program by whoever made the model, run in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hiradix.apps.engine.child_process import ChildError, LimitedChild

SECONDS = 5.0  # of the processor, for one conversation, which takes a millisecond
MEMORY_BYTES = 1 << 30  # of addresses, in all
MOST_CHARS = 1 << 24  # of one conversation's text


class TemplateError(Exception):
    """A template that fails on these messages, or runs for too long. Its text says which."""


class ChatTemplate:
    """Thread-safe: renders one conversation after the other.

    variables: what it can name beside the messages, as JSON has it. The process is started with the first
    conversation, and again after one that ended it.
    """

    def __init__(
        self,
        template: str,
        variables: Mapping[str, Any],
        seconds: float = SECONDS,
        memory_bytes: int = MEMORY_BYTES,
        most_chars: int = MOST_CHARS,
    ) -> None:
        self.template = template
        limits = {"seconds": seconds, "bytes": memory_bytes, "chars": most_chars}
        given = {"template": template, "variables": dict(variables), "limits": limits}
        self._child = LimitedChild("template_child.py", given, seconds)

    def render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None
    ) -> str:
        """The conversation's text. `variables` go before those of the template. Raises TemplateError."""
        given = {**(variables or {}), "messages": [dict(message) for message in messages]}
        try:
            line = json.dumps(given)
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateError(f"takes what JSON can say: {error}") from error
        try:
            answer = self._child.ask(line)
        except ChildError as error:
            raise TemplateError(str(error)) from error
        if "error" in answer:
            raise TemplateError(f"refused them: {answer['error']}")
        text: str = answer["text"]
        return text

    def close(self) -> None:
        """End the process. Another conversation starts another."""
        self._child.close()
