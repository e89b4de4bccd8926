"""The demo's conversations: real multi-turn chats, and real long texts that people ask about.

Chats come from the `chitchat-dataset` package (MIT). Long texts are the licence texts of the machine, or
where there are none those of the installed packages. Everything is chosen by a fixed rule, so two runs on one
machine send the same prompts.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hiradix.apps.bench.client import Conversation, Message, Phase
from hiradix.errors import ConfigError

LICENSES = Path("/usr/share/common-licenses")
DOCUMENT_CHARS = 5200  # about 1,080 tokens of such text for SmolLM2
SHARED_CHARS = 1800
HISTORY_TURNS = 4
CHAT_TURNS = 4
QUESTIONS = (
    "What is this text about? Answer in one short sentence.",
    "Who is it written for?",
    "Name one thing that it allows.",
    "Name one thing that it forbids.",
)


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations by name and the phases that visit them."""

    conversations: tuple[Conversation, ...]
    phases: tuple[Phase, ...]

    @property
    def num_requests(self) -> int:
        """Requests in all phases."""
        return sum(len(phase.visits) for phase in self.phases)


@dataclass(frozen=True, slots=True)
class Size:
    """The number of conversations of each kind, and how many of them come back after the restart."""

    num_documents: int = 7
    num_shared: int = 4
    num_own: int = 2
    num_documents_later: int = 3
    num_shared_later: int = 2
    num_own_later: int = 1


def _license_files() -> Iterator[Path]:
    if LICENSES.is_dir():
        yield from sorted(p for p in LICENSES.iterdir() if p.is_file() and not p.is_symlink())
    for dist in sorted(importlib.metadata.distributions(), key=lambda d: d.metadata["Name"] or ""):
        for file in dist.files or ():
            if "LICENSE" in file.name.upper() and file.name.upper().endswith(("LICENSE", ".TXT", ".MD")):
                yield Path(str(file.locate()))


def long_text(num_chars: int) -> str:
    """At least num_chars of real prose with single spaces; ConfigError where the machine has less."""
    parts: list[str] = []
    seen: set[str] = set()
    have = 0
    for path in _license_files():
        try:
            text = " ".join(path.read_text(encoding="utf-8", errors="replace").split())
        except OSError:
            continue
        if len(text) < 2000 or text[:200] in seen:
            continue
        seen.add(text[:200])
        parts.append(text)
        have += len(text) + 1
        if have >= num_chars:
            return " ".join(parts)
    raise ConfigError(
        f"found {have} of {num_chars} characters of long text in {LICENSES} and installed packages"
    )


def _documents(count: int) -> list[Conversation]:
    text = long_text((count + 1) * DOCUMENT_CHARS)
    documents = []
    for i in range(count):
        piece = text[i * DOCUMENT_CHARS : (i + 1) * DOCUMENT_CHARS]
        system = f"You answer questions about text {i + 1}, shortly. The text:\n{piece}"
        turns = QUESTIONS[i % len(QUESTIONS) :] + QUESTIONS[: i % len(QUESTIONS)]
        documents.append(Conversation(f"text-{i + 1}", system, turns))
    return documents


def _dataset() -> Mapping[str, Any]:
    spec = importlib.util.find_spec("chitchat_dataset")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("the conversations are missing: pip install --no-deps chitchat-dataset")
    path = Path(next(iter(spec.submodule_search_locations))) / "dataset.json"
    dataset: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return dataset


def _turns(record: Mapping[str, Any]) -> list[str]:
    """The two people's turns; messages sent in a row are one turn."""
    return [" ".join(m["text"].strip() for m in turn) for turn in record["messages"]]


def _usable(turns: Sequence[str]) -> bool:
    need = HISTORY_TURNS + 2 * CHAT_TURNS
    said = turns[:need]
    return len(said) == need and all(said) and 700 <= sum(map(len, said[:HISTORY_TURNS])) <= 1400


def _chats(count: int) -> Iterator[tuple[str, tuple[Message, ...], tuple[str, ...]]]:
    """Topic, the history both people already wrote, and the first person's next turns."""
    found = 0
    for _, record in sorted(_dataset().items()):
        turns = _turns(record)
        if not _usable(turns):
            continue
        roles = ("user", "assistant")
        history = tuple(Message(roles[i % 2], text) for i, text in enumerate(turns[:HISTORY_TURNS]))
        yield record["prompt"], history, tuple(turns[HISTORY_TURNS::2][:CHAT_TURNS])
        found += 1
        if found == count:
            return
    raise ConfigError(f"chitchat-dataset has {found} usable conversations, {count} are needed")


def _conversations(size: Size) -> tuple[list[Conversation], list[Conversation], list[Conversation]]:
    chats = list(_chats(size.num_shared + size.num_own))
    terms = long_text((size.num_documents + 1) * DOCUMENT_CHARS)[size.num_documents * DOCUMENT_CHARS :]
    shared_system = (
        f"You chat with a stranger. Be kind and short. Terms of this service:\n{terms[:SHARED_CHARS]}"
    )
    shared = [
        Conversation(f"shared-{i + 1}", shared_system, turns, history)
        for i, (_, history, turns) in enumerate(chats[: size.num_shared])
    ]
    own = [
        Conversation(f"own-{i + 1}", f"You chat with a stranger about: {topic}", turns, history)
        for i, (topic, history, turns) in enumerate(chats[size.num_shared :])
    ]
    return _documents(size.num_documents), shared, own


def _mixed(*kinds: Sequence[Conversation]) -> tuple[str, ...]:
    """Names of all conversations, the kinds spread evenly over the sequence."""
    placed = [((i + 0.5) / len(kind), k, c.name) for k, kind in enumerate(kinds) for i, c in enumerate(kind)]
    return tuple(name for _, _, name in sorted(placed))


def make_workload(size: Size | None = None) -> Workload:
    """The conversations and the four phases: first turns, most recent first, restart, and once more.

    Coming back in reverse order meets all tiers: the last few conversations are still on the device, those
    before them on the host, the oldest only in storage.
    """
    size = size or Size()
    documents, shared, own = _conversations(size)
    first = _mixed(documents, shared, own)
    later = _mixed(
        documents[: size.num_documents_later], shared[: size.num_shared_later], own[: size.num_own_later]
    )
    phases = (
        Phase("first turns", first),
        Phase("coming back, latest first", first[::-1]),
        Phase("after the restart", later, restart=True),
        Phase("coming back again", later[::-1]),
    )
    return Workload((*documents, *shared, *own), phases)
