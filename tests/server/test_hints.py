"""end_of_session and keep_alive from the request to the tree; --record-trace from the server to the lab."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from hiradix.apps.engine.api import EngineStopped, Output, SamplingParams, Scope
from hiradix.apps.server.engine_service import EngineService
from hiradix.apps.server.recorder import BLOCK_TOKENS, MAX_WAITING, TraceRecorder
from hiradix.apps.server.service import Generation
from hiradix.apps.traces.readers import read_trace
from hiradix.errors import ConfigError
from tests.e2e.tiny_model import write_tiny_model
from tests.server.scripted import ScriptedService, application, piece
from tests.server.test_real_engine import flags, real_application

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine what waits to be written is written late."""
    monkeypatch.setattr(TraceRecorder.close, "__defaults__", (60.0,))


@pytest.mark.parametrize("hint", ["end_of_session", "keep_alive"])
@pytest.mark.parametrize(
    "path, body", [("chat/completions", {"messages": USER}), ("completions", {"prompt": "x"})]
)
def test_a_request_carries_its_hint(hint: str, path: str, body: dict) -> None:
    service = ScriptedService()
    with TestClient(application(service)) as client:
        assert client.post(f"/v1/{path}", json={**body, hint: True}).status_code == 200
        assert client.post(f"/v1/{path}", json={**body, hint: False}).status_code == 200
    assert [generation.scope.hint for generation in service.requests] == [hint, None]


@pytest.mark.parametrize(
    "path, body", [("chat/completions", {"messages": USER}), ("completions", {"prompt": "x"})]
)
def test_a_request_names_its_session_in_its_body_or_else_its_header(path: str, body: dict) -> None:
    service, header = ScriptedService(), {"X-Session-Id": "of the header"}
    with TestClient(application(service)) as client:
        for more, headers in (({"session_id": "of the body"}, header), ({}, header), ({}, {})):
            assert client.post(f"/v1/{path}", json={**body, **more}, headers=headers).status_code == 200
        long = client.post(f"/v1/{path}", json=body, headers={"X-Session-Id": "x" * 257})
        assert long.status_code == 400 and long.json()["error"]["param"] == "x-session-id"
        long = client.post(f"/v1/{path}", json={**body, "session_id": "x" * 257})
        assert long.status_code == 400 and long.json()["error"]["param"] == "session_id"
        client.post("/v1/end_of_session", json={"prompt": "ab"}, headers=header)
    assert [generation.scope.session for generation in service.requests] == [
        "of the body",
        "of the header",
        "",
    ]
    assert service.calls[0][1].session == "of the header"


def test_both_hints_at_once_are_refused() -> None:
    body = {"messages": USER, "end_of_session": True, "keep_alive": True}
    reply = TestClient(application(ScriptedService())).post("/v1/chat/completions", json=body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "end_of_session"


@pytest.mark.parametrize("hint", ["end_of_session", "keep_alive"])
def test_a_call_names_the_conversation(hint: str) -> None:
    service = ScriptedService()
    client = TestClient(application(service))
    reply = client.post(f"/v1/{hint}", json={"prompt": [1, 2, 3], "cache_salt": "a"})
    assert reply.json() == {"object": hint, "cached_tokens": 3}
    assert client.post(f"/v1/{hint}", json={"prompt": "ab"}).json() == {"object": hint}
    assert service.calls[0] == ([1, 2, 3], Scope(cache_salt="a", hint=hint))


@pytest.mark.parametrize("body", [{"prompt": [7] * 100_000}, {"prompt": "x" * 100_000}])
def test_a_conversation_longer_than_the_context_costs_the_engine_no_more(body: dict) -> None:
    """Nothing of it behind that was ever served, and the engine looks it up between two steps."""
    service = ScriptedService()
    reply = TestClient(application(service)).post("/v1/end_of_session", json=body)
    assert reply.status_code == 200 and len(service.calls[0][0]) == service.context_length


@pytest.mark.parametrize(
    "body", [{}, {"prompt": "x", "messages": USER}, {"prompt": [-1]}, {"prompt": [1 << 40]}]
)
def test_a_call_that_names_none_is_refused(body: dict) -> None:
    service = ScriptedService()
    reply = TestClient(application(service)).post("/v1/end_of_session", json=body)
    assert reply.status_code == 400 and not service.calls


def test_hints_and_records_of_a_real_engine(tmp_path: Path) -> None:
    recorded = tmp_path / "trace.jsonl"
    tables = json.dumps({"tables": str(tmp_path / "tables.npz")})
    more = ["--radix-eviction-policy", "ghd", "--radix-eviction-policy-config", tables]
    model = write_tiny_model(tmp_path / "model")
    with (
        real_application(flags(model, *more, "--record-trace", str(recorded))) as app,
        TestClient(app) as client,
    ):
        prompt = list(range(5, 205))
        for body in ({}, {"end_of_session": True}, {"cache_salt": "other"}):
            asked = {"prompt": prompt, "max_tokens": 3, **body}
            assert client.post("/v1/completions", json=asked).status_code == 200
        headers = {"Authorization": "Bearer admin"}
        told = client.post("/v1/keep_alive", json={"prompt": prompt}, headers=headers).json()
        assert told == {"object": "keep_alive", "cached_tokens": 192}
    assert (tmp_path / "tables.npz").exists()
    trace = read_trace(recorded)
    first, second, other = (call.blocks.tolist() for call in trace.calls)
    assert first == second and len(first) == 200 // BLOCK_TOKENS and not set(first) & set(other)
    assert [call.hint for call in trace.calls] == [None, "end_of_session", None]
    assert [call.prompt_tokens for call in trace.calls] == [200] * 3
    assert recorded.stat().st_mode & 0o077 == 0


def test_no_content_and_no_key_is_in_the_file(tmp_path: Path) -> None:
    one, two = (TraceRecorder(tmp_path / name) for name in ("one", "two"))
    prompt = list(range(BLOCK_TOKENS))
    assert one.names(prompt, Scope()) != two.names(prompt, Scope()), "names of two files can be compared"
    one.record(prompt, 3, Scope(cache_salt="secret", extra_key="adapter"))
    one.close()
    text = (tmp_path / "one").read_text()
    assert "secret" not in text and "adapter" not in text and one._key.hex() not in text
    (line,) = [json.loads(line) for line in text.splitlines()[1:]]
    assert set(line) == {"time_s", "prompt_tokens", "output_tokens", "block_tokens", "blocks"}


def test_a_full_file_ends_the_recording_and_not_the_server(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "trace", max_bytes=2000)
    for _ in range(100):
        recorder.record(list(range(200)), 1, Scope())
    assert (tmp_path / "trace").stat().st_size <= 2000
    assert len(read_trace(tmp_path / "trace").calls) > 5


def test_a_recording_that_has_stopped_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = TraceRecorder(tmp_path / "trace", max_bytes=100)
    recorder.record(list(range(200)), 1, Scope())
    named: list[int] = []
    monkeypatch.setattr(recorder, "names", lambda prompt_ids, scope: named.append(len(prompt_ids)))
    recorder.record(list(range(200)), 1, Scope())
    recorder.later(list(range(200)), 1, Scope())
    recorder.close()
    assert named == [] and recorder.num_lost == 0


@pytest.fixture
def on_a_full_disk(tmp_path: Path) -> TraceRecorder:
    """What was written stays in a buffer, and closing the file tries that again."""
    recorder = TraceRecorder(tmp_path / "trace")
    recorder._file.close()
    recorder._file = open("/dev/full", "wb")
    return recorder


def test_a_full_disk_ends_the_recording_and_not_a_request(on_a_full_disk: TraceRecorder) -> None:
    for _ in range(3):
        on_a_full_disk.record(list(range(200)), 1, Scope())
    assert on_a_full_disk._file.closed


def test_a_full_disk_does_not_keep_the_server_from_ending(on_a_full_disk: TraceRecorder) -> None:
    on_a_full_disk._file.write(b"in the buffer")
    on_a_full_disk.close()
    assert on_a_full_disk._file.closed


def test_a_disk_that_hangs_holds_up_no_request(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "trace")
    reading, writing = os.pipe()  # nobody reads: it takes 64 KiB
    recorder._file = open(writing, "wb")
    for _ in range(1000):
        recorder.later(list(range(200 * BLOCK_TOKENS)), 1, Scope())
    assert recorder.num_lost >= 1000 - MAX_WAITING - 64

    class Answers:
        async def generate(self, *_: object) -> AsyncIterator[Output]:
            yield piece("!", "stop")

    async def ask() -> list[Output]:
        service = EngineService(None, Answers(), recorder)  # type: ignore[arg-type]
        return [output async for output in service.generate(Generation("a", [1], SamplingParams()))]

    assert [output.finish_reason for output in asyncio.run(asyncio.wait_for(ask(), 60.0))] == ["stop"]
    recorder.close(0.01)
    os.close(reading)


def test_what_is_recorded_later_is_in_the_file_at_the_end(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "trace", clock=iter(range(100)).__next__)
    for number in range(20):
        recorder.later(list(range(number)), 1, Scope())
    recorder.close()
    calls = read_trace(tmp_path / "trace").calls
    assert [(call.time_s, call.prompt_tokens) for call in calls] == [(n + 1, n) for n in range(20)]


def test_a_thread_that_cannot_be_started_costs_a_line_and_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    recorder = TraceRecorder(tmp_path / "trace")
    with monkeypatch.context() as few:
        few.setattr(threading.Thread, "start", refuse)
        recorder.later([1], 1, Scope())
    recorder.later([1, 2], 1, Scope())
    recorder.close()
    assert recorder.num_lost == 1
    assert [call.prompt_tokens for call in read_trace(tmp_path / "trace").calls] == [2]


def test_the_services_end_is_the_recordings(tmp_path: Path) -> None:
    """What waits to be written is, and no file stays open."""
    recorder = TraceRecorder(tmp_path / "trace")

    class Stopped:
        def call(self, *_: object) -> bool:
            raise EngineStopped("before")

        def close(self, timeout_s: float) -> None: ...

    service = EngineService(None, Stopped(), recorder)  # type: ignore[arg-type]
    for number in range(1, 21):
        recorder.later(list(range(number * BLOCK_TOKENS)), 1, Scope())
    service.close(0.0)
    assert recorder._file.closed
    assert len(read_trace(tmp_path / "trace").calls) == 20
    recorder.later([1], 1, Scope())
    assert recorder.num_lost == 1


@pytest.mark.parametrize("torn", ["", '{"hiradix_tr', '{"hiradix_trace": 1}\n{"time_s'])
def test_a_restarted_server_records_beside_what_it_recorded(tmp_path: Path, torn: str) -> None:
    """Its names have another key and its clock begins anew: one file of both would be wrong in both."""
    asked = tmp_path / "day.trace.jsonl"
    asked.write_text(torn)
    for number in range(1, 4):
        recorder = TraceRecorder(asked)
        recorder.record(list(range(number)), 1, Scope())
        recorder.close()
        written = tmp_path / f"day.trace.{number}.jsonl"
        assert [call.prompt_tokens for call in read_trace(written).calls] == [number]
        assert written.stat().st_mode & 0o077 == 0
    assert asked.read_text() == torn
    TraceRecorder(asked).discard()
    assert len(list(tmp_path.iterdir())) == 4


def test_recordings_beside_each_other_have_a_cap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hiradix.apps.server.recorder.MAX_FILES", 3)
    for _ in range(3):
        TraceRecorder(tmp_path / "trace").close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace", "trace.1", "trace.2"]
    with pytest.raises(ConfigError, match="--record-trace .*: 3 recordings"):
        TraceRecorder(tmp_path / "trace")


@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
def test_what_is_no_file_is_not_recorded_beside(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "trace"
    make = {"folder": path.mkdir, "link": lambda: path.symlink_to("nowhere"), "pipe": lambda: os.mkfifo(path)}
    make[kind]()
    with pytest.raises(ConfigError, match="--record-trace"):
        TraceRecorder(path)
    assert list(tmp_path.iterdir()) == [path]


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("mine")
    with pytest.raises(ConfigError, match="--record-trace"):
        TraceRecorder(tmp_path / "trace")
    assert (tmp_path / "trace").read_text() == "mine"


@pytest.mark.parametrize("suffix", [".xz", ".bz2", ".zip"])
def test_a_recording_is_not_named_as_what_it_is_not(suffix: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--record-trace .*without {suffix}"):
        TraceRecorder(tmp_path / f"trace.jsonl{suffix}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_recording_is_read_up_to_its_last_line(suffix: str, tmp_path: Path) -> None:
    """A server that is killed ends no file, and what comes last may be torn."""
    asked, torn = tmp_path / f"trace.jsonl{suffix}", tmp_path / f"torn.jsonl{suffix}"
    recorder, sizes = TraceRecorder(asked), []
    for number in range(1, 6):
        recorder.record(list(range(64 * number)), 1, Scope())
        data = asked.read_bytes()
        sizes.append(len(data))
        assert data[:2] == {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5"}[suffix]
        assert [call.prompt_tokens // 64 for call in read_trace(asked).calls] == [*range(1, number + 1)]
    for size in range(sizes[1], sizes[-1]):
        torn.write_bytes(data[:size])
        assert len(read_trace(torn).calls) >= sum(whole <= size for whole in sizes)
    TraceRecorder(asked).close()
    assert (tmp_path / f"trace.jsonl.1{suffix}").exists()
    recorder.close()
    assert len(read_trace(asked).calls) == 5


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("max_bytes", [300, 1 << 20], ids=["full", "closed"])
def test_a_recording_that_was_ended_is_whole_to_other_programs(
    suffix: str, max_bytes: int, tmp_path: Path
) -> None:
    path = tmp_path / f"trace.jsonl{suffix}"
    recorder = TraceRecorder(path, max_bytes)
    for number in range(5):
        recorder.record(list(range(64)), number, Scope())
    recorder.close()
    if suffix == ".gz":
        text = gzip.decompress(path.read_bytes())
    else:
        unpacked = pytest.importorskip("zstandard").ZstdDecompressor().decompressobj()
        text = unpacked.decompress(path.read_bytes())
        assert unpacked.eof
    assert text.count(b"\n") == 1 + len(read_trace(path).calls) and text.endswith(b"\n")


def test_a_compressed_file_of_another_kind_is_not_overwritten(tmp_path: Path) -> None:
    for data in (gzip.compress(b"mine"), b"mine"):
        (tmp_path / "trace.gz").write_bytes(data)
        with pytest.raises(ConfigError, match="--record-trace"):
            TraceRecorder(tmp_path / "trace.gz")
        assert (tmp_path / "trace.gz").read_bytes() == data
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b'{"input_length": 1}\n' * 1000)[:-9])
    with pytest.raises(ConfigError, match="it ends in the middle"):
        read_trace(tmp_path / "cut.gz")
