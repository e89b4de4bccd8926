"""The prompts of a run: running text with facts far back in it, and a question about one of them.

A fact is a number behind a name. A model that can copy answers with it, so an answer can be true or not; a
model that cannot still answers from all of the prompt, so a page that is not its own changes the answer.
Every prompt is drawn from the run's name and its own, and begins with both: no other run has sent it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

_WORDS = (
    "water stone light river house garden window morning evening summer winter market bridge letter engine "
    "paper copper silver forest island harbour village mountain valley meadow orchard kitchen cellar ladder "
    "hammer needle thread basket bottle candle mirror pillow blanket carpet curtain the a of and to in on at "
    "by from with under over near behind before after between through small large quiet heavy narrow broad "
    "early late warm cold dry empty open closed old new slow quick gentle bright dark walks stands turns "
    "carries brings leaves keeps holds opens closes finds loses builds mends paints washes counts reads "
    "writes sings waits sleeps wakes grows falls rises moves stays"
).split()
_COLOURS = "red blue green white black grey brown yellow purple orange pink golden".split()
_ANIMALS = "heron otter badger falcon lynx marten weasel raven beaver hare stoat owl".split()
FACT_EVERY = 60
"""Words from one fact of a prompt to the next."""


@dataclass(frozen=True)
class Prompt:
    """One prompt. turns: user and assistant in turn; one text where the API knows no turns.

    truth: what a model that copies says; name: what tables and files call it.
    """

    name: str
    turns: tuple[str, ...]
    truth: str = ""

    @property
    def text(self) -> str:
        """All turns as one text to be continued."""
        return "".join(self.turns)


@dataclass(frozen=True)
class Passage:
    """Running text word by word, and where its facts end: (number of words up to there, name, number)."""

    name: str
    words: tuple[str, ...]
    facts: tuple[tuple[int, str, str], ...]

    def cut(self, num_words: int) -> Passage:
        """A passage of the first `num_words` words, with the facts that lie whole in them."""
        facts = tuple(fact for fact in self.facts if fact[0] <= num_words)
        return Passage(self.name, self.words[:num_words], facts)

    def then(self, other: Passage) -> Passage:
        """This, and `other` behind it."""
        moved = tuple((at + len(self.words), who, number) for at, who, number in other.facts)
        return Passage(f"{self.name}+{other.name}", self.words + other.words, self.facts + moved)

    def asked(self, fact: int = 0) -> Prompt:
        """The text and a question for one of its facts, by default the first: the one farthest back."""
        text = " ".join(self.words)
        if not self.facts:
            return Prompt(self.name, (f"{text} . And then",))
        _, who, number = self.facts[fact]
        question = f"Question: what is the number of {who}? The number of {who} is"
        return Prompt(self.name, (f"{text} . {question}",), number)


class Writer:
    """Draws passages for one run; equal runs and names draw equal passages."""

    def __init__(self, run: str) -> None:
        self.run = run

    def passage(self, name: str, num_words: int, *, is_start: bool = True) -> Passage:
        """Text of that many words. is_start: nothing stands before it, so it begins with run and name."""
        draw = random.Random(f"{self.run}/{name}")
        words: list[str] = []
        facts: list[tuple[int, str, str]] = []
        if is_start:
            words += [f"{draw.getrandbits(40):010x}", "of", self.run, name, "."]
        names = [f"the {colour} {animal}" for colour in _COLOURS for animal in _ANIMALS]
        draw.shuffle(names)
        next_fact = len(words) + 4
        while len(words) < num_words:
            if len(words) >= next_fact and len(words) + 10 <= num_words and names:
                who, number = names.pop(), str(draw.randrange(10_000, 100_000))
                words += [*"The number of".split(), *who.split(), "is", number, "."]
                facts.append((len(words), who, number))
                next_fact = len(words) + FACT_EVERY
            else:
                words.append(draw.choice(_WORDS))
        return Passage(name, tuple(words[:num_words]), tuple(facts))
