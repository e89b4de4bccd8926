"""The rungs of a run: the same questions cold, from each tier, parted, streamed, under load, after a restart."""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from hiradix.apps.certify.client import CertifyError, Reply, RequestFailed
from hiradix.apps.certify.examiner import FAST, MIN_TIMED_S, Examiner, OutOfTime
from hiradix.apps.certify.judge import is_drawn, measured
from hiradix.apps.certify.prompts import Prompt
from hiradix.apps.certify.record import Arm, Fault, Seen, State

SPLITS = (
    *(2, 9, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 95, 127, 128, 129, 180, 255, 256, 257),
    *(300, 383, 450, 511),
)
"""Tokens after which prompts part: before, on and behind the end of a page, for each usual size of one."""
NUM_KEPT = 16
PROBES = slice(0, 5)
AFTER_PRESSURE, AFTER_FLUSH, AFTER_RESTART = slice(5, 9), slice(9, 12), slice(12, 16)
NUM_SALTED = 4
NUM_TURNS = 5
NUM_NOISE = 5
FILL_GROWTH = 3
ENOUGH = 1.2
"""So many times the device's capacity in other prompts leaves nothing there that is not in use."""
POLL_S = 0.5


class Ladder:
    """Climbs one server; `arms` has what was seen. tell: called with each arm when it is done."""

    def __init__(self, examiner: Examiner, tell: Callable[[Arm], None] = lambda arm: None) -> None:
        self.examiner = examiner
        self.server = examiner.server
        self.settings = examiner.settings
        self.filled_tokens = 0
        self._tell = tell
        self._draw = random.Random(self.settings.run)
        self._kept = [examiner.passage(f"kept-{i}", 0.6 + 0.05 * (i % 8)) for i in range(NUM_KEPT)]
        self._salted: list[tuple[Prompt, str]] = []
        self._parted: list[Prompt] = []
        self._num_fillers = 0
        rungs: Sequence[tuple[Arm, Callable[[Arm], Awaitable[None]]]] = (
            (Arm("noise", "cold answers again, alone and side by side", needs_hits=False), self._noise),
            (Arm("cold", "prompts that nobody has sent", needs_hits=False), self._cold),
            (Arm("device", "the same again at once"), self._device),
            (Arm("split", "prompts that part inside a page"), self._split),
            (Arm("tail", "a long tail behind a shared part"), self._tail),
            (Arm("stream", "streamed and whole in turn"), self._stream),
            (Arm("turns", "a conversation that grows"), self._turns),
            (Arm("salt", "equal prompts under unlike salts"), self._salt),
            (Arm("abort", "what a client left before its answer", needs_hits=False), self._abort),
            (Arm("overload", "many at once, some of which leave"), self._overload),
            (Arm("pressure", "after other prompts filled the device"), self._pressure),
            (Arm("flush", "after a flush"), self._flush),
            (Arm("restart", "after a restart"), self._restart),
        )
        self._rungs = rungs
        self.arms = {arm.name: arm for arm, _ in rungs}

    async def climb(self) -> None:
        """Every rung in turn, until time is up."""
        is_over = False
        for arm, rung in self._rungs:
            if is_over:
                arm.outcome, arm.note = State.NOT_RUN, "out of time"
            else:
                try:
                    await rung(arm)
                    await self.examiner.settle(arm)
                except OutOfTime:
                    is_over = True
                    arm.unproven = f"out of time: --minutes {self.settings.minutes:g}"
                except CertifyError as error:  # what was found before it still counts
                    if arm.name == "noise":
                        raise
                    arm.failures.append(str(error))
            self.examiner.judge_texts(arm)
            self._tell(arm)

    def _prompt(self, name: str, share: float = 1.0) -> Prompt:
        return self.examiner.passage(name, share).asked()

    # Before anything is judged.

    async def _noise(self, arm: Arm) -> None:
        """The same cold prompts twice alone and twice among others, whose batches are unlike."""
        examiner = self.examiner
        prompts = [self._prompt(f"noise-{i}", 0.4 + 0.2 * i) for i in range(NUM_NOISE)]
        groups: list[list[Reply]] = [[] for _ in prompts]
        is_cold = examiner.reference_by != "first"
        for _ in range(2):
            for group, prompt in zip(groups, prompts, strict=True):
                await self._noise_sample(arm, group, prompt)
        for _ in range(2):
            if examiner.reference_by == "flush":
                await self.server.flush(examiner.flush_path)
            salts = [examiner.new_salt() if examiner.reference_by == "salt" else None for _ in prompts]
            asked = [examiner.send(arm, p, salt=s, alone=False) for p, s in zip(prompts, salts, strict=True)]
            fillers = [self._fill_one(0.3 * (1 + i % 3)) for i in range(4)]
            seen = await _together([*asked, *fillers])
            for group, one in zip(groups, seen, strict=False):
                if one is not None:
                    arm.asked += 1
                    group.append(one.reply)
        noise, gross = measured(groups)
        if any(is_drawn(one, found.at) for *both, found in gross for one in both):
            raise CertifyError(f"{self.server.url}: answers are drawn, not greedy, though temperature is 0")
        examiner.judge = replace(examiner.judge, noise=noise)
        for reference, got, difference in gross:
            examiner.find(arm, Fault.ANSWER, f"two cold answers: {difference.sentence()}", reference, got)
        arm.moved = noise.logprob
        arm.outcome = None if gross or arm.failures else State.RIGHT
        arm.note = f"{noise.logprob:.2g} over {noise.num_tokens} tokens"
        if not is_cold:
            arm.note += ", of repeated answers: nothing makes an answer cold a second time"

    async def _noise_sample(self, arm: Arm, group: list[Reply], prompt: Prompt) -> None:
        examiner = self.examiner
        if examiner.reference_by == "first":
            seen = await examiner.send(arm, prompt)
            reply = None if seen is None else seen.reply
        else:
            reply = await examiner.cold_answer(arm, prompt)
        if reply is not None:
            arm.asked += 1
            group.append(reply)

    # What every engine has.

    async def _cold(self, arm: Arm) -> None:
        for passage in self._kept:
            prompt = passage.asked()
            seen = await self.examiner.send(arm, prompt)
            if seen is None:
                continue
            arm.see(seen, self.examiner.is_hit(seen))
            self.examiner.cold_s.append(seen.reply.wait_s)
            if self.examiner.reference_by != "salt" and self.examiner.is_cold(seen):
                self.examiner.keep(seen.reply)  # it is the reference itself
                arm.outcome, arm.note = State.RIGHT, "these are the answers that others are held against"
            else:
                await self.examiner.hold(arm, prompt, seen.reply)
        self.examiner.steps.append(f"sent {len(self._kept)} prompts that nobody had sent, then each again")

    async def _device(self, arm: Arm) -> None:
        """Each again right after a first time: the device may be too small for all of them."""
        for passage in self._kept:
            prompt = passage.asked()
            await self.examiner.send(arm, prompt)
            await self.examiner.check(arm, prompt)

    async def _split(self, arm: Arm) -> None:
        whole = self.examiner.passage("split")
        first = whole.asked()
        await self.examiner.send(arm, first)
        ends = [
            self.examiner.words(tokens) for tokens in SPLITS if tokens < 0.9 * self.settings.prompt_tokens
        ]
        for i, end in enumerate(dict.fromkeys(ends)):
            tail = self.examiner.text(f"split-tail-{i}", 60, is_start=False)
            prompt = whole.cut(end).then(tail).asked()
            self._parted.append(prompt)
            await self.examiner.check(arm, prompt)
        for prompt in (first, *self._parted[:: max(1, len(self._parted) // 6)]):
            await self.examiner.check(arm, prompt)

    async def _tail(self, arm: Arm) -> None:
        for i, share in enumerate((0.3, 0.7)):
            begin = self.examiner.passage(f"tail-{i}", share)
            await self.examiner.send(arm, begin.asked())
            long = begin.then(self.examiner.passage(f"tail-end-{i}", 2.0, is_start=False)).asked()
            await self.examiner.check(arm, long)
            await self.examiner.check(arm, long)

    async def _stream(self, arm: Arm) -> None:
        for i in range(3):
            prompt = self._prompt(f"stream-{i}", 0.8)
            await self.examiner.check(arm, prompt, stream=i % 2 == 0)
            for stream in (True, False, True):
                await self.examiner.check(arm, prompt, stream=stream)

    async def _turns(self, arm: Arm) -> None:
        """Each turn sends all that was said so far, the answers too."""
        turns: tuple[str, ...] = self._prompt("turns", 0.4).turns
        truth = self._prompt("turns", 0.4).truth
        for turn in range(NUM_TURNS):
            seen = await self.examiner.check(arm, Prompt(f"turn-{turn}", turns, truth))
            if seen is None:
                return
            more = self.examiner.passage(f"turn-more-{turn}", 0.15, is_start=False).asked()
            turns = (*turns, seen.reply.text or " ...", f"\n{more.text}")
            truth = more.truth

    async def _salt(self, arm: Arm) -> None:
        """Under one salt twice, which must hit, then under another and none, which must not; and in turn."""
        if not self.server.able.salts:
            arm.outcome, arm.note = State.NOT_OFFERED, "the server does not read cache_salt"
            return
        for i in range(NUM_SALTED):
            prompt = self._prompt(f"salt-{i}", 0.5)
            mine, others = self.examiner.new_salt(), self.examiner.new_salt()
            order = (None, mine, others) if i % 2 else (mine, others, f"{mine} ", None)
            for at, salt in enumerate(order):
                if at and await self._meets(arm, prompt, salt):
                    continue
                await self.examiner.check(arm, prompt, salt=salt)
                await self.examiner.check(arm, prompt, salt=salt)
            self._salted.append((prompt, mine))

    async def _meets(self, arm: Arm, prompt: Prompt, salt: str | None) -> bool:
        """Whether a prompt that is asked under `salt` for the first time meets what was sent under another."""
        seen = await self.examiner.send(arm, prompt, salt=salt)
        if seen is None:
            return False
        arm.see(seen, False)
        await self.examiner.hold(arm, prompt, seen.reply)
        if self.examiner.is_cold(seen) or arm.findings or self.examiner.lies:
            return False
        if self.examiner.evidence == "time":
            return False  # too weak for that
        said = f"{seen.cached} tokens came from the cache for a prompt that was never sent under this salt"
        self.examiner.find(arm, Fault.SALT, said, None, seen.reply)
        return True

    # Load.

    async def _abort(self, arm: Arm) -> None:
        """Clients leave after more and more of a prompt was worked on; then it is asked for again."""
        cold_s = statistics.median(self.examiner.cold_s) if self.examiner.cold_s else 0.1
        prompts = [self._prompt(f"abort-{i}") for i in range(6)]
        for i, prompt in enumerate(prompts):
            self.examiner.remaining_s()
            self.examiner.note_sent(prompt)
            await self.server.leave_early(prompt, cold_s * (i + 1) / 4)
            await self.examiner.check(arm, prompt)

    async def _overload(self, arm: Arm) -> None:
        """Kept, parted, salted and new prompts at once, with others that leave, in two rounds; then alone."""
        examiner = self.examiner
        before = await self.server.hits() if examiner.evidence == "metrics" else None
        new = [self._prompt(f"load-{i}", 0.5 + 0.1 * i) for i in range(6)]
        wanted: list[tuple[Prompt, str | None]] = [(passage.asked(), None) for passage in self._kept[:9]]
        wanted += [(prompt, None) for prompt in (*self._parted[::2], *new)]
        wanted += list(self._salted)
        gate = asyncio.Semaphore(self.settings.concurrency)

        async def ask(prompt: Prompt, salt: str | None) -> Seen | None:
            async with gate:
                return await examiner.send(
                    arm, prompt, salt=salt, stream=self._draw.random() < 0.3, alone=False
                )

        async def leave(prompt: Prompt) -> None:
            async with gate:
                await self.server.leave_early(prompt, 0.05 + 0.3 * self._draw.random())

        for turn in range(2):
            self._draw.shuffle(wanted)
            left = [leave(self._prompt(f"left-{turn}-{i}")) for i in range(6)]
            left += [leave(passage.asked()) for passage in self._kept[:3]]
            fillers = [self._fill_one(0.5, gate) for _ in range(4)]
            seen = await _together([*(ask(*one) for one in wanted), *left, *fillers])
            for (prompt, _), one in zip(wanted, seen, strict=False):
                if one is not None:
                    arm.see(one, examiner.is_hit(one))
                    await examiner.hold(arm, prompt, one.reply)
        if before is not None and (after := await self.server.hits()) is not None:
            arm.hits += int(sum(after.values()) > sum(before.values()))
        for passage in self._kept[:3]:
            await examiner.check(arm, passage.asked())
        arm.note = f"{arm.refused} refused as too many" if arm.refused else ""
        examiner.steps.append(
            f"{2 * len(wanted)} requests, {self.settings.concurrency} at once, some aborted"
        )

    async def _fill_one(self, share: float, gate: asyncio.Semaphore | None = None) -> None:
        """One prompt of other text; whether it is answered does not matter."""
        self._num_fillers += 1
        prompt = self._prompt(f"filler-{self._num_fillers}", share)
        async with gate or asyncio.Semaphore():
            try:
                reply = await self.server.ask(prompt, max_tokens=1)
            except RequestFailed:
                return
        self.filled_tokens += reply.prompt_tokens or round(share * self.settings.prompt_tokens)

    async def _fill(self, tokens: float) -> None:
        """About so many tokens of other prompts."""
        goal = self.filled_tokens + tokens
        largest = 2.0
        while (missing := goal - self.filled_tokens) > 0:
            self.examiner.remaining_s()
            had = self.filled_tokens
            share = min(largest, max(0.2, missing / self.settings.prompt_tokens))
            num = min(8, max(1, round(missing / (share * self.settings.prompt_tokens))))
            await _together([self._fill_one(share) for _ in range(num)])
            if self.filled_tokens == had:
                return  # the server takes none of them

    # Tiers.

    async def _warm(self, arm: Arm, kept: slice) -> list[tuple[Prompt, str | None]]:
        """Prompts to be asked after something, in the cache now."""
        chosen: list[tuple[Prompt, str | None]] = [(passage.asked(), None) for passage in self._kept[kept]]
        chosen += self._salted[:2]
        if self.examiner.reference_by == "flush":  # which has emptied it
            for prompt, salt in chosen:
                await self.examiner.send(arm, prompt, salt=salt)
        return chosen

    async def _check_below(self, arm: Arm, chosen: Sequence[tuple[Prompt, str | None]]) -> None:
        """Ask after something that emptied the device: a hit is one from below. Salted ones under another
        salt too, which must find nothing."""
        for prompt, salt in chosen:
            await self._check_one_below(arm, prompt, salt)
            if salt is not None:
                await self._meets(arm, prompt, self.examiner.new_salt())

    async def _check_one_below(self, arm: Arm, prompt: Prompt, salt: str | None = None) -> Seen | None:
        hits = arm.hits
        seen = await self.examiner.check(arm, prompt, salt=salt)
        if seen is not None and seen.tiers is not None and not seen.below_device:
            arm.hits = hits
        return seen

    async def _pressure(self, arm: Arm) -> None:
        chosen = await self._warm(arm, AFTER_PRESSURE)
        await asyncio.sleep(self.settings.settle_s)
        has_left = await self._drive_off(arm)
        self.examiner.steps.append(f"about {self.filled_tokens} tokens of other prompts")
        await self._check_below(arm, chosen)
        if not has_left:
            arm.unproven = (
                f"not shown to have left the device after {self.filled_tokens} tokens: --pressure TOKENS"
            )

    async def _drive_off(self, arm: Arm) -> bool:
        """Fill until a prompt has left the device, as its tiers, a miss, or the device's size tell."""
        capacity, given = self.server.able.capacity, self.settings.pressure_tokens
        begin = self.filled_tokens
        if given is not None:
            await self._fill(given)
            return True
        goal = ENOUGH * capacity if capacity else 4 * self.settings.prompt_tokens
        for passage in self._kept[PROBES]:
            await self._fill(goal - (self.filled_tokens - begin))
            seen = await self._check_one_below(arm, passage.asked())
            if seen is not None and (seen.below_device or not self.examiner.is_hit(seen)):
                return True
            if capacity and seen is not None and seen.tiers is None:
                return True
            goal *= FILL_GROWTH if not capacity else 1.5
        return False

    async def _flush(self, arm: Arm) -> None:
        if self.settings.flush == "none":
            arm.outcome, arm.note = State.NOT_OFFERED, "--flush none"
            return
        chosen = await self._warm(arm, AFTER_FLUSH)
        await asyncio.sleep(self.settings.settle_s)
        path = await self.server.flush(self.examiner.flush_path)
        if not path:
            arm.outcome, arm.note = State.NOT_OFFERED, "no path to flush with is known: --flush URL"
            return
        arm.note = f"POST {path}"
        self.examiner.steps.append(arm.note)
        await self._check_below(arm, chosen)

    async def _restart(self, arm: Arm) -> None:
        if self.settings.restart is None:
            arm.outcome, arm.note = State.NOT_OFFERED, "needs --restart COMMAND"
            return
        chosen = await self._warm(arm, AFTER_RESTART)
        await asyncio.sleep(self.settings.settle_s)
        try:
            await self._run_restart(self.settings.restart)
        except CertifyError as error:
            arm.failures.append(str(error))
            return
        self.examiner.steps.append("restarted by --restart")  # which may have keys in it
        await self._check_below(arm, chosen)

    async def _run_restart(self, command: str) -> None:
        """Run the command to its end and wait for the model. CertifyError past the deadline."""
        limit_s = min(self.settings.restart_timeout_s, self.examiner.remaining_s())
        with tempfile.TemporaryFile() as output:
            process = await asyncio.create_subprocess_shell(
                command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output
            )
            try:
                async with asyncio.timeout(limit_s):
                    status = await process.wait()
                    while status == 0 and not await self.server.is_up():
                        await asyncio.sleep(POLL_S)
            except TimeoutError:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
                raise CertifyError(f"--restart: the server is not back after {limit_s:.0f} s") from None
            if status != 0:
                output.seek(0)
                said = output.read()[-500:].decode("utf-8", "replace").strip()
                raise CertifyError(f"--restart: exit status {status}: {said}")


async def _together(work: Sequence[Awaitable[Seen | None]]) -> list[Seen | None]:
    """Results of all, in order; the first error of one, when all have ended."""
    results = await asyncio.gather(*work, return_exceptions=True)
    out: list[Seen | None] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        out.append(result)
    return out


async def begun(examiner: Examiner) -> None:
    """Learn the server: its API, what it tells, how long a token is, and what makes an answer cold."""
    server = examiner.server
    await server.connect()
    arm = Arm("begin", "to learn what the server tells", needs_hits=False)
    await server.probe(examiner.text("probe-first", 120).asked())
    few = await _answer(examiner, arm, Prompt("probe-few", ("so",)))
    many = await _answer(examiner, arm, examiner.text("probe-many", 200).asked())
    if few.reply.prompt_tokens and many.reply.prompt_tokens:
        own = many.reply.prompt_tokens - few.reply.prompt_tokens + 1
        examiner.words_a_token = (many.reply.prompt.text.count(" ") + 1) / max(1, own)
        examiner.overhead = few.reply.prompt_tokens - 1
    _fit(examiner)
    await _find_evidence(examiner, arm)
    await _find_reference(examiner, arm)


def _fit(examiner: Examiner) -> None:
    """Prompts so long that the longest, with its tail and its turns, fits the model's context."""
    context = examiner.server.able.context
    if context is None:
        return
    most = (context - examiner.overhead - 4 * examiner.server.max_tokens) / 3.2
    if most < 64:
        raise CertifyError(f"the model's context of {context} tokens is too short to be judged")
    examiner.settings = replace(
        examiner.settings, prompt_tokens=int(min(most, examiner.settings.prompt_tokens))
    )


async def _answer(examiner: Examiner, arm: Arm, prompt: Prompt, salt: str | None = None) -> Seen:
    seen = await examiner.send(arm, prompt, salt=salt)
    if seen is None:
        raise CertifyError(f"{examiner.server.url}: {arm.failures[-1] if arm.failures else 'it is too busy'}")
    return seen


async def _find_evidence(examiner: Examiner, arm: Arm) -> None:
    """Usage, else the metrics of known servers, else time: whatever moves when a prompt is sent again."""
    examiner.has_metrics = await examiner.server.hits() is not None
    cold, again = [], []
    for i in range(3):
        prompt = examiner.passage(f"probe-again-{i}").asked()
        cold.append(await _answer(examiner, arm, prompt))
        again.append(await _answer(examiner, arm, prompt))
    slow, fast = (statistics.median(seen.reply.wait_s for seen in row) for row in (cold, again))
    if any(seen.reply.cached for seen in again):
        examiner.evidence = "usage"
    elif any(sum((seen.tiers or {}).values()) > 0 for seen in again):
        examiner.evidence = "metrics"
    elif slow >= MIN_TIMED_S and fast < FAST * slow:
        examiner.evidence = "time"
    examiner.cold_s = [seen.reply.wait_s for seen in cold] if examiner.evidence == "time" else []


async def _find_reference(examiner: Examiner, arm: Arm) -> None:
    """A salt of its own, else a flush: whatever makes a prompt cold again that was just asked."""
    prompt = examiner.passage("probe-again-0").asked()
    ways = [("salt", examiner.server.able.salts), ("flush", examiner.settings.flush != "none")]
    for way, is_possible in ways:
        if not is_possible or not examiner.evidence:
            continue
        await _answer(examiner, arm, prompt)
        if way == "flush" and not await examiner.server.flush(examiner.flush_path):
            continue
        seen = await _answer(examiner, arm, prompt, examiner.new_salt() if way == "salt" else None)
        if examiner.is_cold(seen):
            examiner.reference_by = way
            return
