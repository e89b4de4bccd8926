"""Compiles grammars in a process of its own, which ends where that takes too long. Run by its path.

A grammar comes with a request, and some are small and take the library minutes, all memory or all of the
stack, in one call that nothing in its process can interrupt. Needs llguidance alone: it starts in half a second.

Reads a line of JSON: {"vocab_size", "special", "ends", "limits"}; `special`: texts of tokens by their ids.
Then, for each line {"grammar"}, writes one, {"error"}: "" or what is wrong with it. Ends with its input, or by
SIGPROF in the midst of what takes too long.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper


class BytesVocabulary:
    """A model's special tokens, the others of its tokens empty, and behind them one for each byte."""

    bos_token_id = None

    def __init__(self, given: dict[str, Any]) -> None:
        self.tokens = [b""] * given["vocab_size"] + [bytes([byte]) for byte in range(256)]
        special = {int(token): text.encode() for token, text in given["special"].items()}
        for token, text in special.items():
            self.tokens[token] = text
        self.special_token_ids = sorted(special)
        self.eos_token_id = given["ends"][0]

    def __call__(self, text: bytes | str) -> list[int]:
        first = len(self.tokens) - 256
        return [first + byte for byte in (text if isinstance(text, bytes) else text.encode())]


def main() -> None:
    """Answer requests from the standard input until it ends."""
    given = json.loads(sys.stdin.readline())
    limits = given["limits"]
    resource.setrlimit(resource.RLIMIT_AS, (limits["bytes"], limits["bytes"]))
    resource.setrlimit(resource.RLIMIT_STACK, (limits["stack"], limits["stack"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    tokenizer = LLTokenizer(TokenizerWrapper(BytesVocabulary(given)), eos_token=given["ends"], slices=[])
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, limits["seconds"])
        matcher = LLMatcher(tokenizer, json.loads(line)["grammar"], log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps({"error": matcher.get_error()}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
