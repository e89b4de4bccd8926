"""Renders a chat template in a process of its own, which ends where that takes too long. Run by its path.

A template comes with a model, and is a program: a power, a repetition or a comparison in it may be one call
in C that nothing in its process can interrupt, and take all memory. Needs jinja2 alone: it starts in 0.1 s.

Reads a line of JSON: {"template", "variables", "limits"}. Then, for each line {"messages", ...}, writes one:
{"text"} or {"error"}. Ends with its input, or by SIGPROF in the midst of what takes too long.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_TOLD = 1000  # characters of an error, which the template may have written


class GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training; its body is rendered as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def environment() -> ImmutableSandboxedEnvironment:
    """The environment that chat templates expect: whitespace, tags, filters and functions as in transformers."""
    found = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    found.filters["tojson"] = _to_json
    found.globals |= {"raise_exception": _raise, "strftime_now": _now}
    return found


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _error(text: str) -> str:
    """The answer that says it; half a surrogate pair, which a client cannot be sent, is escaped."""
    text = text.encode(errors="backslashreplace").decode()
    return json.dumps({"error": text if len(text) <= MOST_TOLD else f"{text[:MOST_TOLD]}..."})


def main() -> None:
    """Answer requests from the standard input until it ends."""
    given = json.loads(sys.stdin.readline())
    limits = given["limits"]
    resource.setrlimit(resource.RLIMIT_AS, (limits["bytes"], limits["bytes"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    template: Template | None = None
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, limits["seconds"])
        try:
            template = template or environment().from_string(given["template"])
            text = template.render({**given["variables"], **json.loads(line)})
            if len(text) > limits["chars"]:
                raise TemplateError(f"a text of {len(text)} characters, at most {limits['chars']}")
            answer = json.dumps({"text": text})
        except TemplateError as error:
            answer = _error(str(error))
        except MemoryError:
            answer = _error(f"it needs more than {limits['bytes'] >> 20} MiB")
        except Exception as error:  # it may divide by zero, or call itself for ever
            answer = _error(f"{type(error).__name__}: {error}")
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
