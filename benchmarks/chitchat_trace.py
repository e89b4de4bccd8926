"""A second real trace: 7,168 conversations of people, as a server would have seen them, for `hiradix replay`.

    python benchmarks/chitchat_trace.py [--out build/bench/chitchat.jsonl.gz] [--quick]
    hiradix replay build/bench/chitchat.jsonl.gz --policies lru,ghd,belady --capacities 4k,8k,16k --warm 0.5

From the package `chitchat-dataset` (MIT; `make demo` installs it): who wrote first is the user, the other the
model. Each turn of the user is a request at the time he sent it: everything said so far, in the chat template
and the tokens of SmolLM2, in blocks of 16. Think times, lengths, who goes on and what overlaps what are real;
that a person answered and not a model is not.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import sys
from array import array
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hiradix.apps.engine.smollm2 import smollm2_path
from hiradix.apps.engine.tokenizer import Tokenizer

BLOCK = 16
OUT = Path("build/bench/chitchat.jsonl.gz")
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # the template's own


def conversations() -> list[list[list[dict[str, str]]]]:
    """The package's conversations: turns, each the messages of one person in a row."""
    spec = find_spec("chitchat_dataset")
    if spec is None or spec.origin is None:
        raise SystemExit("pip install --no-deps chitchat-dataset")
    data = json.loads((Path(spec.origin).parent / "dataset.json").read_text(encoding="utf-8"))
    return [talk["messages"] for talk in data.values() if talk["messages"]]


def seconds(message: dict[str, str]) -> float:
    return datetime.fromisoformat(message["timestamp"].rstrip("Z")).replace(tzinfo=UTC).timestamp()


def requests(talk: list[list[dict[str, str]]], tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """One record for each turn of who wrote first, in the format that `--record-trace` writes."""
    opened = tokenizer.encode("<|im_start|>assistant\n")
    said = array("q", tokenizer.encode(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"))
    turns = []
    for number, turn in enumerate(talk):
        text = "\n".join(message["text"] for message in turn)
        role = "assistant" if number % 2 else "user"
        turns.append(tokenizer.encode(f"<|im_start|>{role}\n{text}<|im_end|>\n"))
    for number, turn in enumerate(turns):
        said.extend(turn)
        if number % 2:
            continue
        prompt = said + array("q", opened)
        answer = len(turns[number + 1]) - len(opened) if number + 1 < len(turns) else 1
        blocks = [prompt[at : at + BLOCK] for at in range(0, len(prompt) // BLOCK * BLOCK, BLOCK)]
        yield {
            "time_s": seconds(talk[number][-1]),
            "prompt_tokens": len(prompt),
            "output_tokens": max(answer, 1),
            "block_tokens": BLOCK,
            "blocks": [hashlib.blake2b(block.tobytes(), digest_size=6).hexdigest() for block in blocks],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help=f"trace to write (default: {OUT})")
    parser.add_argument("--quick", action="store_true", help="the first 10 conversations")
    args = parser.parse_args()
    limit = 10 if args.quick else None
    tokenizer = Tokenizer(str(smollm2_path()))
    records = [record for talk in conversations()[:limit] for record in requests(talk, tokenizer)]
    records.sort(key=lambda record: record["time_s"])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as file:
        for record in records:
            file.write(json.dumps(record).encode() + b"\n")
    tokens = sum(record["prompt_tokens"] for record in records)
    print(f"{args.out}: {len(records)} requests, {tokens} prompt tokens")


if __name__ == "__main__":
    main()
