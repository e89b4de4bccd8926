"""The ladder: one model in one engine through seven arms, each judged by the answers without a cache.

An arm is a way of having been computed before. In each all needles are asked, and two things are held: no
answer has a wrong token by the identity rule, and every hit came from the arm's tier and reached over the
fact, by the figures of that tier.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.identity import Identity, judged_by_logprobs
from tests.ladder.needles import NUM_NEEDLES, Needle, least_apart, needles
from tests.ladder.store import FAULTS, fault_file
from tests.puppet import Puppet

FAMILIES = ("full", "window", "latent", "gated delta", "mamba 2")
MAX_TOKENS = 6
CROWD_TOKENS = 24  # so many that requests outgrow what there was room for when they began
LEAST_APART = 30.0
KEEP = 3
ABORT_STEPS = 6  # of an engine's steps, from one abort of a crowd to the next
WRITTEN_S = 120.0
TIERS = ("device", "host", "storage")
Answers = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Run:
    """How an engine runs a family.

    write: its checkpoint, into a folder. page: tokens of a page. engine: the engine's own settings; crowded:
    those of a life with so little memory that requests give theirs up. own_hits: the engine computes otherwise
    behind a hit, whoever had it: hits are judged by those of its own prefix cache. alone: why it computes one
    request at a time, so that none is preempted.
    """

    write: Callable[[Path], object]
    page: int
    engine: Mapping[str, Any] = field(default_factory=dict)
    crowded: Mapping[str, Any] = field(default_factory=dict)
    own_hits: bool = False
    alone: str = ""


class Life(ABC):
    """One life of an engine, which begins when it is made. Answers are as `judged_by_logprobs` takes them, with
    cached prompt tokens by tier beside."""

    @abstractmethod
    def answer(self, prompts: Sequence[list[int]], num_tokens: int = MAX_TOKENS) -> Answers:
        """One after the other."""

    @abstractmethod
    def crowd(self, prompts: Sequence[list[int]]) -> dict[int, dict[str, Any]]:
        """All at once; of those that are not aborted, which are every `KEEP`-th, the answers by number."""

    @abstractmethod
    def begin_crowd(self, prompts: Sequence[list[int]]) -> None:
        """All at once, and nobody waits for them."""

    @abstractmethod
    def settle(self) -> None:
        """Until all that was computed is where it will be."""

    @abstractmethod
    def forget(self, host: bool = False) -> None:
        """Empty the device, and the host if told so."""

    @abstractmethod
    def num_preempted(self) -> int:
        """How often a running request gave its memory up."""

    @abstractmethod
    def kill(self) -> None:
        """kill -9."""

    @abstractmethod
    def stop(self) -> None:
        """End it in order: storage has all that it was given."""


class PuppetLife(Life):
    """A life in a process that does as it is told."""

    def __init__(self, puppet: Puppet) -> None:
        self._puppet = puppet

    def answer(self, prompts: Sequence[list[int]], num_tokens: int = MAX_TOKENS) -> Answers:
        answers: Answers = self._puppet.ask("answer", prompts=prompts, max_tokens=num_tokens)
        return answers

    def crowd(self, prompts: Sequence[list[int]]) -> dict[int, dict[str, Any]]:
        kept = self._puppet.ask("crowd", prompts=prompts, max_tokens=CROWD_TOKENS, keep=KEEP)
        return {int(number): answer for number, answer in kept.items()}

    def begin_crowd(self, prompts: Sequence[list[int]]) -> None:
        self._puppet.tell("crowd", prompts=prompts, max_tokens=CROWD_TOKENS, keep=1)

    def settle(self) -> None:
        self._puppet.ask("settle")

    def forget(self, host: bool = False) -> None:
        self._puppet.ask("forget", host=host)

    def num_preempted(self) -> int:
        return int(self._puppet.ask("preempted"))

    def kill(self) -> None:
        self._puppet.kill()

    def stop(self) -> None:
        self._puppet.stop()


@dataclass(frozen=True)
class Start:
    """What a life is to begin with.

    pages: the store's folder; None: neither cache nor tiers. is_new: in a new interpreter. fault: the file that
    says which fault is planted. settings: what the run's own are changed by.
    """

    pages: Path | None
    fault: Path
    log: Path
    is_new: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    layout: str = ""


class LadderEngine(ABC):
    """An engine: how it runs which families, and how it begins to live. reasons: why it does not run others."""

    name: str
    runs: Mapping[str, Run]
    reasons: Mapping[str, str] = {}

    @abstractmethod
    def start(self, run: Run, model: Path, start: Start) -> Life: ...


@dataclass(frozen=True)
class Row:
    """What an arm has shown. proven: hits that reached over their facts, of `wanted`, from the arm's tier."""

    engine: str
    family: str
    arm: str
    answers: int
    wrong: int
    ties: int
    proven: int
    wanted: int
    seconds: float
    tokens: Mapping[str, int]
    note: str = ""


class Climb:
    """One family in one engine. count: needles an arm; is_quick: lives are forked, where the engine can."""

    def __init__(
        self, engine: LadderEngine, family: str, folder: Path, count: int, is_quick: bool = False
    ) -> None:
        self.engine, self.family, self.folder = engine, family, folder
        self.run = engine.runs[family]
        self.model = folder / "model"
        self.needles = needles(count, self.run.page, "needles")
        self.others = needles(count, self.run.page, "others")  # for crowds
        self.pages, self.fault = folder / "pages", folder / "planted"
        self.expected: Answers = ()
        self.others_expected: Answers = ()
        self.unseen_expected: Answers = ()
        self.life: Life | None = None
        self.preempted = 0  # by the crowd
        self._is_quick, self._num_lives = is_quick, 0
        folder.mkdir(parents=True, exist_ok=True)
        self.run.write(self.model)

    # -- lives ----------------------------------------------------------------------------

    def begin(self, is_new: bool = False, pages: Path | None = None, **changes: Any) -> Life:
        """The next life, which has all tiers; the one before has ended."""
        self._end()
        self.life = self._start(pages or self.pages, is_new and not self._is_quick, changes)
        return self.life

    def _start(self, pages: Path | None, is_new: bool = False, changes: Mapping[str, Any] = {}) -> Life:
        self._num_lives += 1
        layout = changes.get("layout", "")
        settings = {name: value for name, value in changes.items() if name != "layout"}
        log = self.folder / f"log{self._num_lives}"
        return self.engine.start(
            self.run, self.model, Start(pages, self.fault, log, is_new, settings, layout)
        )

    def _end(self) -> None:
        if self.life is not None:
            life, self.life = self.life, None
            life.stop()

    @contextmanager
    def plain(self) -> Iterator[Life]:
        """A life without a cache, or with the engine's own where answers are judged by that one's."""
        life = self._start(None)
        try:
            yield life
        finally:
            life.kill()

    def close(self) -> None:
        """Nothing lives on."""
        if self.life is not None:
            life, self.life = self.life, None
            life.kill()

    @property
    def living(self) -> Life:
        assert self.life is not None
        return self.life

    @property
    def prompts(self) -> list[list[int]]:
        return [needle.prompt for needle in self.needles]

    def misbehave(self, fault: str) -> None:
        """Have the store do so from its next call on."""
        fault_file(self.pages).write_text(fault)

    def plant(self, fault: str) -> None:
        """Have copies go wrong from the next one on."""
        self.fault.write_text(fault)

    @property
    def unseen(self) -> list[list[int]]:
        """Prompts that nobody has asked for."""
        return [needle.prompt for needle in needles(len(self.needles), self.run.page, "unseen")]

    # -- judging --------------------------------------------------------------------------

    def row(self, arm: str, begin_s: float, judged: Sequence[Judged], note: str = "") -> Row:
        identities = [one.identity for one in judged]
        hits = [hit for one in judged for hit in one.hits]
        all_answers = [answer for one in judged for answer in one.answers]
        return Row(
            self.engine.name, self.family, arm, sum(one.num_answers for one in identities),
            sum(len(one.different) for one in identities), sum(len(one.flagged) for one in identities),
            sum(hits), len(hits), round(time.monotonic() - begin_s, 1),
            {tier: sum(answer[tier] for answer in all_answers) for tier in TIERS}, note,
        )  # fmt: skip


@dataclass(frozen=True)
class Judged:
    """Answers beside those expected. hits: of each that was to hit, whether it did."""

    answers: Answers
    identity: Identity
    hits: Sequence[bool] = ()

    @staticmethod
    def of(
        expected: Answers, answers: Answers, asked: Sequence[Needle] = (), tiers: Sequence[str] = ()
    ) -> Judged:
        """Of answers that are longer the beginning is expected. tiers: where a hit was to be found, which
        reaches over the fact of each that was asked."""
        found = [sum(answer[tier] for tier in tiers) for answer in answers]
        hits = [tokens >= needle.fact_end for tokens, needle in zip(found, asked)] if tiers else []
        cut = [
            {name: want[name][: len(have["tokens"])] for name in ("tokens", "logprobs")}
            for want, have in zip(expected, answers, strict=True)
        ]
        return Judged(answers, judged_by_logprobs(cut, answers), hits)


# -- the arms ----------------------------------------------------------------------------------


def cache_off(climb: Climb) -> list[Judged]:
    """What all others are judged by: computed from nothing, twice the same, and different within each pair."""
    with climb.plain() as life:
        cold = life.answer(climb.prompts, CROWD_TOKENS)
        again = life.answer(climb.prompts, CROWD_TOKENS if climb.run.own_hits else MAX_TOKENS)
        third = life.answer(climb.prompts) if climb.run.own_hits else None
        others = [needle.prompt for needle in climb.others]
        cold_others = life.answer(others, CROWD_TOKENS)
        if climb.run.own_hits:
            cold_others = life.answer(others, CROWD_TOKENS)
        climb.unseen_expected = life.answer(climb.unseen)
    assert sum(answer[tier] for answer in cold for tier in TIERS) == 0
    assert least_apart(cold) > LEAST_APART, f"answers know of the fact: {least_apart(cold)}"
    climb.expected, climb.others_expected = again if climb.run.own_hits else cold, cold_others
    return [Judged.of(climb.expected, again if third is None else third)]


def device(climb: Climb) -> list[Judged]:
    """Asked twice in a row: the second one's prefix is still on the device."""
    life, judged = climb.begin(), []
    for needle, expected in zip(climb.needles, climb.expected, strict=True):
        first, second = life.answer([needle.prompt, needle.prompt])
        assert sum(first[tier] for tier in TIERS) == 0
        if not climb.run.own_hits:
            judged.append(Judged.of([expected], [first]))
        judged.append(Judged.of([expected], [second], [needle], ["device"]))
    return judged


def _asked_again(climb: Climb, tier: str) -> Judged:
    answers = climb.living.answer(climb.prompts)
    return Judged.of(climb.expected, answers, climb.needles, [tier])


def host(climb: Climb) -> list[Judged]:
    """The device has lost all of it."""
    climb.living.settle()
    climb.living.forget()
    return [_asked_again(climb, "host")]


def storage(climb: Climb) -> list[Judged]:
    """Device and host have lost all of it."""
    climb.living.settle()
    climb.living.forget(host=True)
    return [_asked_again(climb, "storage")]


def storage_with_faults(climb: Climb) -> list[Judged]:
    """The store damages pages, loses some, fails each call; then it behaves, and hits are there again."""
    life, judged = climb.living, []
    for fault in [*(name for name in FAULTS if name), ""]:
        life.settle()
        climb.misbehave(fault)
        life.forget(host=True)
        answers = life.answer(climb.prompts)
        judged.append(Judged.of(climb.expected, answers))
        if fault in ("damages", "raises"):
            assert sum(answer["storage"] for answer in answers) == 0, fault
    life.settle()  # what the breaker has left out by then is stored now
    life.forget(host=True)
    return [*judged, _asked_again(climb, "storage")]


def storage_in_a_new_process(climb: Climb) -> list[Judged]:
    """What one life has stored, and the next one found."""
    climb.begin(is_new=True)
    return [_asked_again(climb, "storage")]


def concurrency(climb: Climb) -> list[Judged]:
    """Those and as many others twice and at once, in chunks, in little memory, two of three aborted; then
    kill -9 in the middle of writing, and another life over what is left of it."""
    run = climb.run
    life = climb.begin(**run.crowded)
    asked = [*climb.needles, *climb.others] * 2
    right = [*climb.expected, *climb.others_expected] * 2
    kept = life.crowd([needle.prompt for needle in asked])
    assert sorted(kept) == list(range(0, len(asked), KEEP))
    expected = [right[number] for number in kept]
    judged = [Judged.of(expected, list(kept.values()))]
    climb.preempted = life.num_preempted()
    is_whole = len(climb.needles) >= NUM_NEEDLES  # of fewer it depends on how they meet
    assert climb.preempted > 0 or run.alone or not is_whole, "nobody had to give memory up"
    life.settle()
    before = _num_files(climb.pages)
    life.begin_crowd(climb.unseen)
    deadline = time.monotonic() + WRITTEN_S
    while _num_files(climb.pages) < before + 2:
        assert time.monotonic() < deadline, "nothing is written"
        time.sleep(0.01)
    climb.close()
    next_life = climb.begin(is_new=True)
    judged.append(_asked_again(climb, "storage"))
    after = next_life.answer(climb.unseen)
    return [*judged, Judged.of(climb.unseen_expected, after)]


def _num_files(folder: Path) -> int:
    return sum(1 for path in folder.rglob("*") if path.is_file())


ARMS: dict[str, Callable[[Climb], list[Judged]]] = {
    "cache off": cache_off,
    "device": device,
    "host": host,
    "storage, same process": storage,
    "storage with faults": storage_with_faults,
    "storage, new process": storage_in_a_new_process,
    "concurrency, kill -9": concurrency,
}


def climbed(climb: Climb, arms: Sequence[str] = tuple(ARMS)) -> Iterator[Row]:
    """The rows of the arms, one after the other; each needs those before it."""
    try:
        for name in arms:
            begin_s = time.monotonic()
            judged, is_crowd = ARMS[name](climb), ARMS[name] is concurrency
            note = f"{climb.preempted} preempted" if is_crowd and not climb.run.alone else climb.run.alone
            yield climb.row(name, begin_s, judged, note if is_crowd else "")
    finally:
        climb.close()


def assert_right(row: Row) -> None:
    """No wrong token, few ties, and all hits where they were to be."""
    assert row.wrong == 0, row
    assert row.proven == row.wanted, row
