"""Asks a server and holds each answer against a cold one.

A cold answer comes from a prompt that nobody has sent yet, or under a salt that nobody has used, or after a
flush, and only counts as cold where the server's own account says so. A hit counts as one only where usage,
metrics or the time to the first token say so.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hiradix.apps.certify.client import Reply, RequestFailed, ServerUnderTest
from hiradix.apps.certify.judge import GROSS, AnswerDifference, Judge, Likeness, Noise, compared
from hiradix.apps.certify.prompts import Passage, Prompt, Writer
from hiradix.apps.certify.record import Arm, Fault, Finding, Seen

FAST = 0.5
"""Where only time tells, a hit takes less than this share of the cold time."""
MIN_TIMED_S = 0.1
MIN_COPIED = 12
SLACK_TOKENS = 2
NUM_SECOND = 3
"""Cold answers that a wrong one is held against."""
MOST_DOUBTED = 4
"""Wrong answers of an arm that are not believed at once."""
COUNT_S = (0.05, 0.2)
"""How long to wait for counters, again and again."""


class OutOfTime(Exception):
    """The run's own deadline is over."""


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run. flush: a path, "none", or None to try the known ones; pressure_tokens: the
    number of tokens of other prompts that drives a prompt off the device, None to find it out."""

    run: str
    minutes: float = 10.0
    prompt_tokens: int = 640
    concurrency: int = 16
    pressure_tokens: int | None = None
    flush: str | None = None
    restart: str | None = None
    restart_timeout_s: float = 300.0
    settle_s: float = 2.0
    factor: float = 5.0


class Examiner:
    """One run's view of a server. evidence: what tells of hits, "" if nothing does; reference_by: what makes
    an answer cold: "salt", "flush", or "first" where only what nobody has sent is."""

    def __init__(self, server: ServerUnderTest, settings: RunSettings) -> None:
        self.server = server
        self.settings = settings
        self.evidence = ""
        self.reference_by = "first"
        self.judge = Judge(Noise(), settings.factor)
        self.references: dict[str, Reply] = {}
        self.steps: list[str] = []
        self.cold_s: list[float] = []
        self.has_metrics = False
        self.texts_vary = False  # cold answers to one prompt do
        self.lies = False  # what it says of cached tokens is not to be believed
        self.words_a_token = 0.6
        self.overhead = 0
        self._writer = Writer(settings.run)
        self._until = server.clock() + 60 * settings.minutes
        self._sent: dict[str | None, dict[str, None]] = {}
        self._pending: list[tuple[Arm, Prompt, Reply]] = []
        self._num_salts = 0
        self._num_asked = 0
        self._num_copied = 0

    def remaining_s(self) -> float:
        """Seconds that the run has left; OutOfTime if it has none."""
        remaining_s = self._until - self.server.clock()
        if remaining_s <= 0:
            raise OutOfTime
        return remaining_s

    def passage(self, name: str, share: float = 1.0, *, is_start: bool = True) -> Passage:
        """Text of about that share of `prompt_tokens`."""
        return self.text(name, share * self.settings.prompt_tokens, is_start=is_start)

    def text(self, name: str, tokens: float, *, is_start: bool = True) -> Passage:
        """Text of about so many tokens."""
        return self._writer.passage(name, self.words(tokens), is_start=is_start)

    def words(self, tokens: float) -> int:
        """About how many words make so many tokens."""
        return max(1, round(tokens * self.words_a_token))

    def new_salt(self) -> str:
        """A salt that nobody has used."""
        self._num_salts += 1
        return f"{self.settings.run}-{self._num_salts}"

    async def check(
        self, arm: Arm, prompt: Prompt, *, salt: str | None = None, stream: bool = False
    ) -> Seen | None:
        """Ask, and hold the answer against a cold one."""
        seen = await self.send(arm, prompt, salt=salt, stream=stream)
        if seen is None:
            return None
        arm.see(seen, self.is_hit(seen))
        if self.reference_by == "first" and prompt.text not in self.references and self.is_cold(seen):
            self.keep(seen.reply)
        else:
            await self.hold(arm, prompt, seen.reply)
        return seen

    async def send(
        self, arm: Arm, prompt: Prompt, *, salt: str | None = None, stream: bool = False, alone: bool = True
    ) -> Seen | None:
        """One answer, and what of its prompt came from the cache; None if there is none, which the arm counts.

        alone: no other request of ours runs, so the server's counters tell of this one. To call more cached
        than was ever sent is a fault of its own.
        """
        remaining_s = self.remaining_s()
        before = await self.server.hits() if alone and self.has_metrics else None
        known = self._num_common(prompt, salt)
        self.note_sent(prompt, salt)
        try:
            async with asyncio.timeout(remaining_s + 1):
                ask = self.server.ask_patiently if alone else self.server.ask
                reply = await ask(prompt, salt=salt, stream=stream)
        except RequestFailed as error:
            arm.refused += error.is_busy
            if not error.is_busy:
                arm.failures.append(f"{prompt.name}: {error}")
            return None
        except TimeoutError as error:
            raise OutOfTime from error
        self._sent[salt][prompt.text + reply.text] = None
        seen = await self._accounted(reply, before)
        if alone:
            self._check_claim(arm, seen, known, salt)
        return seen

    def note_sent(self, prompt: Prompt, salt: str | None = None) -> None:
        """Note that the beginning of a prompt may be cached from now on."""
        self._sent.setdefault(salt, {})[prompt.text] = None

    async def _accounted(self, reply: Reply, before: Mapping[str, int] | None) -> Seen:
        """Cached tokens by the answer's own usage, else by the server's counters."""
        tiers, cached = reply.tiers, reply.cached
        if before is not None and (tiers is None or cached is None):
            after = await self._counters_after(before, reply)
            delta = {tier: after[tier] - before.get(tier, 0) for tier in after}
            tiers = delta if tiers is None else tiers
            if cached is None and self.evidence != "usage":
                cached = sum(delta.values())
        if cached is None and self.evidence in ("usage", "metrics"):
            cached = 0
        return Seen(reply, cached, tiers)

    async def _counters_after(self, before: Mapping[str, int], reply: Reply) -> Mapping[str, int]:
        """The counters once they have moved; a server may count a moment after it has answered."""
        for wait_s in (0.0, *(() if reply.cached == 0 else COUNT_S)):
            await asyncio.sleep(wait_s)
            after = await self.server.hits()
            if after is not None and after != before:
                return after
        return before

    def _num_common(self, prompt: Prompt, salt: str | None) -> int:
        """Characters of the prompt that were sent before under this salt."""
        return max((_common(prompt.text, other) for other in self._sent.get(salt, ())), default=0)

    def _check_claim(self, arm: Arm, seen: Seen, num_common: int, salt: str | None) -> None:
        reply, text = seen.reply, seen.reply.prompt.text
        if self.evidence != "usage" or seen.cached is None or reply.prompt_tokens is None:
            return
        own = reply.prompt_tokens - self.overhead
        by_length = self.overhead + SLACK_TOKENS + int(1.3 * own * num_common / len(text))
        by_words = reply.prompt_tokens - max(
            0, text[num_common:].count(" ") - 1
        )  # no word is less than a token
        most = min(by_length, by_words)
        if seen.cached <= most:
            return
        said = (
            f"{seen.cached} of {reply.prompt_tokens} tokens are called cached, at most {most} had been sent"
        )
        others = (text for other, texts in self._sent.items() if other != salt for text in texts)
        is_leak = any(_common(text, other) > num_common for other in others)
        if is_leak and not self.lies:
            self.find(arm, Fault.SALT, f"{said} under {'this' if salt else 'no'} salt", None, reply)
        else:
            self.lies = True
            self.find(arm, Fault.CLAIM, said, None, reply)

    def is_hit(self, seen: Seen) -> bool:
        """Whether it is shown that more than the template came from the cache."""
        if seen.cached is not None:
            return seen.cached > self.overhead + SLACK_TOKENS
        if self.evidence != "time" or not self.cold_s:
            return False
        return seen.reply.wait_s < FAST * statistics.median(self.cold_s)

    def is_cold(self, seen: Seen) -> bool:
        """Whether nothing of the prompt itself came from the cache; by time only if it took as long as cold."""
        if seen.cached is not None:
            return seen.cached <= self.overhead + SLACK_TOKENS
        return self.evidence != "" and not self.is_hit(seen)

    async def hold(self, arm: Arm, prompt: Prompt, reply: Reply) -> None:
        """Compare with a cold answer; where only a flush makes one, later, in `settle`."""
        reference = self.references.get(prompt.text)
        if reference is None and self.reference_by == "salt":
            reference = await self.cold_answer(arm, prompt)
        if reference is None:
            self._pending.append((arm, prompt, reply))
        else:
            await self._compare(arm, prompt, reference, reply)

    async def settle(self, arm: Arm) -> None:
        """Give the answers that wait for a cold one theirs; where there can be none the fact decides."""
        pending, self._pending = self._pending, []
        for owner, prompt, reply in pending:
            reference = self.references.get(prompt.text)
            if reference is None and self.reference_by == "flush":
                reference = await self.cold_answer(arm, prompt)
            if reference is not None:
                await self._compare(owner, prompt, reference, reply)
            elif self.copies and prompt.truth:
                self._compare_truth(owner, prompt, reply)
            else:
                owner.without += 1

    async def cold_answer(self, arm: Arm, prompt: Prompt) -> Reply | None:
        """Asked under a salt of its own, or after a flush; None where it was not cold. The first is kept."""
        if self.reference_by == "first":
            return None
        if self.reference_by == "flush":
            await self.server.flush(self.flush_path)
        salt = self.new_salt() if self.reference_by == "salt" else None
        seen = await self.send(arm, prompt, salt=salt)
        if seen is None or not self.is_cold(seen):
            return None
        self.keep(seen.reply)
        return seen.reply

    def keep(self, reply: Reply) -> None:
        """Make a cold answer the one that others are held against, unless there is one."""
        if reply.prompt.text not in self.references:
            self.references[reply.prompt.text] = reply
            self._num_asked += bool(reply.prompt.truth)
            self._num_copied += bool(reply.prompt.truth) and reply.prompt.truth in reply.text

    @property
    def copied(self) -> tuple[int, int]:
        """The number of facts the model was asked for cold, and the number it copied."""
        return self._num_asked, self._num_copied

    @property
    def copies(self) -> bool:
        """Whether the model has copied every fact that it was asked for cold."""
        return self._num_asked >= MIN_COPIED and self._num_copied == self._num_asked

    @property
    def flush_path(self) -> str | None:
        """The path to flush with, None to try the known ones."""
        return None if self.settings.flush in (None, "none") else self.settings.flush

    def _compare_truth(self, arm: Arm, prompt: Prompt, reply: Reply) -> None:
        is_true = prompt.truth in reply.text
        arm.add(AnswerDifference(Likeness.EQUAL if is_true else Likeness.WRONG))
        if not is_true:
            said = f"the fact is {prompt.truth}, the answer {reply.text[:40]!r}; cold all were copied"
            self.find(arm, Fault.ANSWER, said, None, reply)

    async def _compare(self, arm: Arm, prompt: Prompt, reference: Reply, reply: Reply) -> None:
        """Compare a suspect answer with further cold answers before it is called wrong."""
        found = self.judge.compare(reference, reply)
        is_lost = prompt.truth in reference.text and prompt.truth not in reply.text
        is_wrong = found.kind in (Likeness.WRONG, Likeness.DRIFT) or (
            found.kind is Likeness.TEXT and self.copies and is_lost
        )
        if (is_wrong or found.kind is Likeness.TEXT) and len(arm.findings) < MOST_DOUBTED:
            for _ in range(NUM_SECOND):
                if (second := await self.cold_answer(arm, prompt)) is None:
                    continue
                self.texts_vary |= second.text != reference.text
                if self.judge.compare(second, reply).kind not in (Likeness.EQUAL, Likeness.TIE):
                    continue
                if is_wrong:
                    self._blame(arm, second, reference)
                found, is_wrong = AnswerDifference(Likeness.TIE, moved=found.moved), False
                break
        arm.add(found)
        if found.kind is Likeness.TEXT:
            arm.texts.append((reference, reply))
        if is_wrong:
            self.find(arm, Fault.ANSWER, found.sentence(), reference, reply)

    def _blame(self, arm: Arm, second: Reply, first: Reply) -> None:
        """Two cold answers differ by more than the noise: that is more noise, or the first was wrong."""
        apart = compared(second, first)
        if max(apart.gap, apart.moved) > GROSS or apart.kind is Likeness.TEXT:
            self.find(arm, Fault.ANSWER, f"a cold answer: {apart.sentence()}", second, first)
            self.references[first.prompt.text] = second
        else:
            noise = replace(self.judge.noise, logprob=max(self.judge.noise.logprob, apart.gap, apart.moved))
            self.judge = replace(self.judge, noise=noise)

    def find(self, arm: Arm, fault: Fault, sentence: str, reference: Reply | None, got: Reply) -> None:
        """Note what is wrong, with what had been done until then."""
        steps = (*self.steps, f"{arm.name}: {arm.what}")
        arm.findings.append(Finding(arm.name, fault, got.prompt.name, sentence, steps, reference, got))

    def judge_texts(self, arm: Arm) -> None:
        """Other texts without log probabilities are wrong where they are more than cold answers have."""
        count, noise = arm.kinds[Likeness.TEXT], self.judge.noise
        if not count or arm.findings:
            return
        if self.judge.is_more_than_chance(count, arm.num_compared):
            said = (
                f"{count} of {arm.num_compared} texts differ from cold ones, {noise.num_texts} of "
                f"{noise.num_answers} cold ones do; {compared(*arm.texts[0]).sentence()}"
            )
            self.find(arm, Fault.ANSWER, said, *arm.texts[0])
        elif noise.num_texts or self.texts_vary:
            arm.note = f"{count} texts differ, as cold ones do"
        else:
            arm.unproven = f"{count} texts differ, and without logprobs that may be noise"


def _common(text: str, other: str) -> int:
    """Length of the common beginning."""
    if other.startswith(text):
        return len(text)
    for at, (a, b) in enumerate(zip(text, other, strict=False)):
        if a != b:
            return at
    return min(len(text), len(other))
