"""Storage that misbehaves in every way and phase, under a real engine: no request fails, none differs."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hiradix.apps.engine.api import SamplingParams
from hiradix.apps.server.engine_service import EngineService
from hiradix.apps.server.flags import parse_serve_args
from hiradix.apps.server.serve import build_service
from hiradix.apps.server.service import AdminResult, AttachRequest, Generation
from hiradix.storage import StorageContext, register_storage_backend
from tests.e2e.load import flags
from tests.faults.misbehaving import BEHAVIOUR, KINDS, PHASES
from tests.storage.doubles import MemoryBackend

PAGE = 16
SEEN = [[(7 * n + i) % 500 + 5 for i in range(90 + 40 * n)] for n in range(4)]
NEW = [[n, *SEEN[n][:70]] for n in range(4)]  # these share no page with the others
WAIT_S = 5.0  # for what hangs
LIMIT_S = 60.0  # for what ends by itself
REQUEST_LIMIT_S = 30.0
EXTRA = json.dumps({"prefetch_threshold": PAGE, "deadline_s": 0.3, "breaker_retry_s": 0.2})


@pytest.fixture(scope="module")
def service(tiny_model: Path) -> Iterator[EngineService]:
    register_storage_backend("misbehaving", "tests.faults.misbehaving:Misbehaving")
    more = ("--enable-hierarchical-cache", "--page-size", str(PAGE), "--max-total-tokens", "1024")
    more += ("--hicache-ratio", "1.5", "--hicache-storage-prefetch-policy", "wait_complete")
    built = build_service(parse_serve_args(flags(tiny_model, *more, "--check-invariants")))
    yield built
    BEHAVIOUR.set(None, None)
    assert built.close(LIMIT_S)


async def answer(service: EngineService, rid: str, prompt: list[int]) -> list[int]:
    generation = Generation(rid, prompt, SamplingParams(max_new_tokens=5, ignore_eos=True))
    tokens: list[int] = []
    async with asyncio.timeout(REQUEST_LIMIT_S):
        async for output in service.generate(generation):
            tokens += output.token_ids
            assert output.finish_reason in (None, "length"), output
    return tokens


Answers = list[list[int]]


async def answers(service: EngineService, name: str, prompts: Answers = SEEN) -> Answers:
    return list(await asyncio.gather(*(answer(service, f"{name}-{i}", p) for i, p in enumerate(prompts))))


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> dict[str, Answers]:
    """What an engine without a cache answers."""
    off = build_service(parse_serve_args(flags(tiny_model, "--disable-radix-cache")))
    try:
        return {
            "seen": asyncio.run(answers(off, "off")),
            "new": asyncio.run(answers(off, "off", NEW)),
        }
    finally:
        assert off.close(LIMIT_S)


async def attach(service: EngineService, place: str = "a", wait_s: float = LIMIT_S) -> AdminResult:
    extra = json.dumps({**json.loads(EXTRA), "place": place})
    return await service.attach(AttachRequest("misbehaving", extra, wait_s=wait_s))


async def emptied(service: EngineService) -> None:
    outcome = await service.flush(LIMIT_S)
    assert outcome.ok, outcome


async def story(service: EngineService, phase: str, kind: str) -> list[tuple[str, Answers]]:
    """A life with storage in which `phase` goes wrong, and all answers of it."""
    told: list[tuple[str, Answers]] = []

    async def ask(when: str, prompts: Answers = SEEN) -> None:
        told.append(("seen" if prompts is SEEN else "new", await answers(service, when, prompts)))

    place = f"{phase} {kind}"
    assert (await attach(service, place)).ok
    await ask("before")  # what is stored here is there to be queried and read
    await emptied(service)
    BEHAVIOUR.set(phase, kind)
    if phase in ("attach", "register", "detach"):
        detaching = asyncio.ensure_future(service.detach(WAIT_S))
        await ask("detaching")
        await detaching
        attaching = asyncio.ensure_future(attach(service, place, WAIT_S / 5))
        await ask("attaching")
        await attaching
    await ask("during")
    await ask("stored", NEW)
    await emptied(service)
    await ask("again")
    assert BEHAVIOUR.num_faults > 0, "the fault never happened"
    BEHAVIOUR.set(None, None)
    assert (await service.detach(LIMIT_S)).ok
    assert (await attach(service, place)).ok, "it recovers without a restart"
    await ask("after")
    assert (await service.detach(LIMIT_S)).ok
    await emptied(service)
    return told


@pytest.mark.timeout(300)
@pytest.mark.parametrize("phase", PHASES)
def test_no_request_fails_or_differs(
    service: EngineService, reference: dict[str, Answers], phase: str
) -> None:
    for kind in KINDS:
        try:
            told = asyncio.run(story(service, phase, kind))
        finally:
            BEHAVIOUR.set(None, None)
        for which, answered in told:
            assert answered == reference[which], (phase, kind)


def test_an_attach_that_hangs_is_given_up_at_its_deadline(service: EngineService) -> None:
    async def hang() -> AdminResult:
        BEHAVIOUR.set("attach", "hang")
        try:
            return await attach(service, wait_s=WAIT_S / 5)
        finally:
            BEHAVIOUR.set(None, None)

    outcome = asyncio.run(hang())
    assert not outcome.ok and "not open within" in outcome.message


class Watched(MemoryBackend):
    """Says when it is opened, and whether it was closed."""

    opened: Callable[[], object]
    num_closed = 0
    closed = threading.Event()
    closer: threading.Thread

    def __init__(self, context: StorageContext):
        super().__init__(context)
        Watched.opened()

    def close(self) -> None:
        super().close()
        Watched.num_closed += 1
        Watched.closer = threading.current_thread()
        Watched.closed.set()


def test_what_was_opened_and_not_taken_in_time_is_closed(
    service: EngineService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `disk` store left open would keep its folder locked from every later attach."""
    register_storage_backend("watched", "tests.faults.test_backends:Watched")
    go_on = threading.Event()

    def engine_is_away() -> None:
        """From here on alone: the steps before an open may take as long as they like."""
        service._thread.submit(lambda engine: go_on.wait(REQUEST_LIMIT_S))
        monkeypatch.setattr("hiradix.apps.server.engine_service.ADMIN_TIMEOUT_S", 0.3)

    Watched.opened, Watched.num_closed = engine_is_away, 0
    try:
        with pytest.raises(TimeoutError):
            asyncio.run(service.attach(AttachRequest("watched", wait_s=LIMIT_S)))
    finally:
        go_on.set()
    assert Watched.num_closed == 1
    assert asyncio.run(service.snapshot()).storage_backend is None


def test_what_is_open_after_the_deadline_is_closed(service: EngineService) -> None:
    register_storage_backend("watched", "tests.faults.test_backends:Watched")
    go_on = threading.Event()
    Watched.opened = lambda: go_on.wait(REQUEST_LIMIT_S)
    Watched.closed.clear()

    async def late() -> AdminResult:
        outcome = await service.attach(AttachRequest("watched", wait_s=0.1))
        assert not Watched.closed.is_set()
        go_on.set()
        assert await asyncio.to_thread(Watched.closed.wait, REQUEST_LIMIT_S)
        return outcome

    outcome = asyncio.run(late())
    assert not outcome.ok and "not open within" in outcome.message
    assert Watched.closer is not threading.current_thread(), "a close that hangs would stop the event loop"


def test_without_wait_a_busy_engine_refuses(service: EngineService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests stay where they are until it has refused: however slow this machine, none ends before."""
    engine = service._thread._engine
    step, go_on = engine.step, threading.Event()
    monkeypatch.setattr(
        engine, "step", lambda: step() if go_on.is_set() or not engine.info().num_running else []
    )

    async def busy() -> list[AdminResult]:
        running = asyncio.ensure_future(answers(service, "busy"))
        while (await service.snapshot()).engine.num_running == 0:
            await asyncio.sleep(0)
        refused = [await service.attach(AttachRequest("misbehaving", EXTRA)), await service.detach()]
        go_on.set()
        await running
        return refused

    try:
        refused = asyncio.run(busy())
    finally:
        go_on.set()
    for outcome in refused:
        assert not outcome.ok and "scheduler is not idle" in outcome.message
