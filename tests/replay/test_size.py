"""`hiradix size`: how many agents a machine carries, and what a model's config says of its KV."""

from __future__ import annotations

import itertools
import json
import lzma
from dataclasses import replace
from pathlib import Path

import pytest

from hiradix.apps.engine.api import Scope
from hiradix.apps.replay.capacity import Memory, Question, carried, shown
from hiradix.apps.replay.closed_loop import ClosedLoop, ServerRates
from hiradix.apps.replay.closed_report import ClosedCell, Late, most_agents
from hiradix.apps.replay.kv_bytes import kv_bytes
from hiradix.apps.replay.simulated_cache import Tiers
from hiradix.apps.replay.timing import Machine
from hiradix.apps.server.recorder import TraceRecorder
from hiradix.apps.traces.crowd import LEAST_TURNS, Crowd, fitting, repeated
from hiradix.apps.traces.readers import read_trace
from hiradix.apps.traces.records import open_records
from hiradix.apps.traces.sessions import BLOCK, SAMPLE, SessionFile, read_sessions
from hiradix.cli import main as hiradix
from hiradix.errors import ConfigError
from tests.replay.test_closed_loop import SERVER, file_of
from tests.replay.test_sessions import AGENTS, request, session, written

GIB = 1 << 30
QUESTION = Question(
    Memory(60 * BLOCK * 1000 / GIB), SERVER, Crowd(1, 10, 5.0, shares_heads=False), p95_s=1.0,
    eviction="lru", most=40,
)  # fmt: skip


def ask(question: Question, file: SessionFile, now_s: object = None) -> list[dict]:
    ticks = itertools.repeat(0.0) if now_s is None else now_s
    return carried(question, file, lambda: next(ticks), lambda *told: None)


def test_a_run_that_gives_up_is_one_whose_p95_is_too_long() -> None:
    file, cell = file_of(24), ClosedCell(Crowd(24, 10, 5.0), "lru", Tiers(60 * BLOCK), "fcfs", SERVER)
    whole = cell.play(file)
    p95_s = whole.waits()["p95"]
    for bound_s, gives_up in ((p95_s * 0.9, True), (p95_s * 1.0001, False)):
        late = Late(bound_s, lambda: True)
        found = cell.play(file, gives_up=late.gives_up)
        assert late.gave_up == gives_up == (len(found.wait_s) < len(whole.wait_s))
    assert not gives_up and found.decisions == whole.decisions


def test_the_answer_is_the_most_agents_whose_p95_is_in_bounds() -> None:
    file = file_of(40)
    told: list[tuple[str, int, bool]] = []
    rows = carried(QUESTION, file, lambda: 0.0, lambda *one: told.append(one))
    assert [r["schedule_policy"] for r in rows] == ["cached", "fcfs"]
    for r in rows:
        cell = ClosedCell(QUESTION.crowd, "lru", Tiers(60 * BLOCK), r["schedule_policy"], SERVER)
        waits = [
            replace(cell, crowd=replace(cell.crowd, agents=n)).play(file).waits()["p95"]
            for n in (r["most_agents"], r["most_agents"] + 1)
        ]
        assert waits[0] <= 1.0 < waits[1] and r["ended_by"] == "p95"
        assert r["agents_per_gib"] == pytest.approx(r["most_agents"] / QUESTION.memory.device_gib, abs=1e-4)
        assert most_agents(cell, file, 1.0) == r["most_agents"]
    assert {(name, good) for name, _, good in told} == set(
        itertools.product(("cached", "fcfs"), (True, False))
    )


def test_gib_become_tokens_of_whole_blocks() -> None:
    assert Memory(1, 2, 4).tiers(131_072) == Tiers(8192, 16_384, 32_768)
    assert Memory(1.01).tiers(131_072) == Tiers(8192)
    with pytest.raises(ConfigError, match="--device-gib 0.01: less than a block"):
        Memory(0.01).tiers(131_072)


def test_a_search_ends_when_its_time_is_over_and_says_so() -> None:
    file = file_of(40)
    (whole, _), (first, second) = ask(QUESTION, file), ask(QUESTION, file, itertools.count(0.0, 1.0))
    assert 0 < first["most_agents"] < whole["most_agents"] and second["ended_by"] == "time"
    assert first["ended_by"] == "time" and "at least: out of --minutes" in shown([first], SERVER)


def test_an_answer_that_is_bounded_by_what_was_tried_says_so() -> None:
    (one, *_) = ask(replace(QUESTION, most=2), file_of(40))
    assert (one["most_agents"], one["ended_by"]) == (2, "most") and "at least" in shown([one], SERVER)


def test_more_agents_than_sessions_are_the_same_ones_with_other_contents() -> None:
    file = file_of(3)
    more = repeated(file, 8)
    assert len({s.name for s in more.sessions}) == 9 and more.sessions[:3] == file.sessions
    agents = Crowd(9, 10, shares_heads=False).drawn(more)
    blocks = [set(turn.blocks.tolist()) for agent in agents for turn in agent.turns[-1:]]
    assert len(set.union(*blocks)) == sum(map(len, blocks)), "no two share a block"
    known = file._replace(sessions=tuple(s._replace(is_local=False) for s in file.sessions))
    assert repeated(known, 8) == known, "copies would be the same contents"
    (one, *_) = ask(replace(QUESTION, p95_s=1e6), known)
    assert (one["most_agents"], one["ended_by"]) == (3, "most")


def test_sessions_too_long_for_the_device_are_left_out_and_counted() -> None:
    short, long = file_of(3, turns=11), file_of(2, turns=30)
    file = short._replace(sessions=(*short.sessions, *(s._replace(name=s.name * 9) for s in long.sessions)))
    longest = max(-(-r.prompt_tokens // BLOCK) * BLOCK for r in short.sessions[0].turns) + BLOCK
    assert fitting(file, longest).sessions == short.sessions and fitting(file, 2 * BLOCK).sessions == ()
    (one, *_) = ask(replace(QUESTION, context_tokens=longest, most=3), file)
    assert (one["sessions"], one["of"], one["longest_tokens"]) == (3, 5, longest)
    with pytest.raises(ConfigError, match="of 5 sessions long enough none stays within 1024.*--device-gib"):
        ask(replace(QUESTION, memory=Memory(2 * BLOCK * 1000 / GIB)), file)


def test_the_sessions_in_the_package_are_of_those_in_the_repository() -> None:
    def known(path: Path) -> dict[str, dict]:
        with lzma.open(path, "rt") as lines:
            return {one["id"]: one for one in map(json.loads, lines)}

    whole, sample = known(AGENTS), known(SAMPLE)
    for name, one in sample.items():
        own = [r for r in whole[name]["requests"] if r.get("type") != "subagent"]
        assert [{key: r[key] for key in mine} for r, mine in zip(own, one["requests"], strict=True)] == one[
            "requests"
        ]
    file = read_sessions(open_records(SAMPLE))
    assert len(file.sessions) == 102 and all(len(s.turns) >= LEAST_TURNS for s in file.sessions)
    assert (SAMPLE.parent / "NOTICE.md").is_file()


# -- a model's config -----------------------------------------------------------------------

GROUPED = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
LATENT = {**GROUPED, "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}


@pytest.mark.parametrize(
    "config, element_bytes, expected",
    [
        ({**GROUPED, "torch_dtype": "bfloat16"}, None, 131_072),
        ({**GROUPED, "dtype": "float32"}, None, 262_144),
        ({**GROUPED, "head_dim": 64}, None, 65_536),
        ({**GROUPED, "num_key_value_heads": None}, None, 524_288),
        (GROUPED, 1, 65_536),
        (LATENT, None, 61 * 576 * 2),
        ({**GROUPED, "sliding_window": 4096, "use_sliding_window": False}, None, 131_072),
        ({**GROUPED, "layer_types": ["full_attention"] * 32}, None, 131_072),
    ],
)
def test_bytes_per_token_of_a_model(config: dict, element_bytes: int | None, expected: int) -> None:
    found = kv_bytes(config, element_bytes)
    assert found.per_token == found.most_per_token == expected


WINDOWED = {**GROUPED, "sliding_window": 1024}
OF_LAYER = 4096  # bytes of a token
CHUNKED = ["chunked_attention"] * 24 + ["full_attention"] * 8


@pytest.mark.parametrize(
    "config, full, window",
    [
        (WINDOWED, 0, 32),
        ({**WINDOWED, "use_sliding_window": True, "max_window_layers": 28}, 28, 4),
        ({**WINDOWED, "sliding_window_pattern": 6}, 5, 27),
        ({**WINDOWED, "model_type": "gemma2"}, 16, 16),
        ({**WINDOWED, "layer_types": ["sliding_attention", "full_attention"] * 16}, 16, 16),
        ({**GROUPED, "attention_chunk_size": 1024, "layer_types": CHUNKED},
         8, 24),
    ],
)  # fmt: skip
def test_layers_with_a_window_keep_no_more(config: dict, full: int, window: int) -> None:
    found = kv_bytes(config)
    assert (found.per_token, found.per_window_token) == (full * OF_LAYER, window * OF_LAYER)
    assert found.window == 1024 and found.most_per_token == 131_072


DELTA = {
    "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_num_value_heads": 4, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    "fields, full, state",
    [
        ({"full_attention_interval": 4, **DELTA}, 8, 24 * ((2 * 16 + 32) * 3 * 2 + 32 * 8 * 4)),
        ({"layer_types": ["conv"] * 30 + ["full_attention"] * 2, "conv_L_cache": 3}, 2, 30 * 4096 * 2 * 2),
        ({"hybrid_override_pattern": "M-M*E"}, 1, None),
        ({"attn_layer_period": 8, "attn_layer_offset": 4}, 4, None),
        ({"linear_attn_config": {"full_attn_layers": [4, 8]}}, 2, None),
        ({"attn_layer_indices": [3, 9, 27]}, 3, None),
    ],
)
def test_recurrent_layers_keep_a_state(fields: dict, full: int, state: int | None) -> None:
    found = kv_bytes({**GROUPED, **fields})
    assert (found.per_token, found.per_state, found.window) == (full * OF_LAYER, state, 0)


def test_the_checkpoint_says_the_type_of_its_cache() -> None:
    for quantised in ({"kv_cache_scheme": {"num_bits": 8}}, {"kv_cache_quant_algo": "FP8"}):
        assert kv_bytes({**GROUPED, "quantization_config": quantised}).per_token == 65_536
    assert kv_bytes({**LATENT, "index_head_dim": 128}).per_token == 61 * (576 * 2 + 132)


@pytest.mark.parametrize(
    "config, said",
    [
        ({}, "no num_hidden_layers"),
        ({**GROUPED, "num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({**GROUPED, "num_hidden_layers": "x"}, "num_hidden_layers is x"),
        ({**GROUPED, "torch_dtype": "int3"}, "--kv-element-bytes"),
        ({**GROUPED, "layer_types": ["full_attention", "hologram"]}, "layer_types has hologram"),
        ({**GROUPED, "hybrid_override_pattern": "M*X"}, "hybrid_override_pattern"),
        ({**GROUPED, "state_size": 4}, "state_size"),
        ({**GROUPED, "layer_types": ["sliding_attention"] * 32}, "no attention_chunk_size"),
        ([], "is no object"),
    ],
)
def test_a_config_that_does_not_say_it_is_refused(
    config: object, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert hiradix(["size", "--device-gib", "1", "--model", str(tmp_path)]) == 2
    shown = capsys.readouterr().err
    assert f"--model {tmp_path / 'config.json'}" in shown and said in shown


# -- the command ----------------------------------------------------------------------------


def sessions_in(folder: Path) -> str:
    made = [session(f"s{i}", *(request(9.0 * k, *range(16 + 8 * k)) for k in range(12))) for i in range(4)]
    return str(written(folder, *made))


def test_the_command_answers_for_a_file_and_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": GROUPED}))
    out = tmp_path / "rows.json"
    flags = f"--device-gib 4 --host-gib 8 --model {tmp_path} --most 6 --p95 60 --schedule-policy lpm,fcfs"
    assert hiradix(["size", sessions_in(tmp_path), *flags.split(), "--json", str(out)]) == 0
    said = capsys.readouterr()
    rows = json.loads(out.read_text())["rows"]
    assert [(r["schedule_policy"], r["device_tokens"], r["host_tokens"]) for r in rows] == [
        (name, 32_768, 65_536) for name in ("lpm", "fcfs")
    ]
    assert all(r["agents_per_gib"] == round(r["most_agents"] / 12, 4) for r in rows)
    assert "4 of 4 sessions" in said.out and "per GiB" in said.out and "A model:" in said.out
    assert "lpm: 1 fit" in said.err and "fcfs: 1 fit" in said.err


def test_a_models_folder_tells_what_its_cache_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixed = {**WINDOWED, "layer_types": ["sliding_attention"] * 24 + ["full_attention"] * 8}
    (tmp_path / "config.json").write_text(json.dumps(mixed))
    assert hiradix(["size", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "32768 bytes per token, in 8 layers" in lines[1] and "the last 1024" in lines[2]
    assert lines[-1] == "  a GiB holds 8192 tokens (2 bytes a number)"
    assert hiradix(["size", str(tmp_path), "--kv-element-bytes", "1"]) == 0
    assert "a GiB holds 16384 tokens" in capsys.readouterr().out


def test_a_recording_says_its_bytes_per_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    recorder = TraceRecorder(path)
    recorder.describe(50_000_000)
    for k in range(40):
        recorder.record(list(range(k % 4, 640 + k % 4)), 1, Scope())
    recorder.close()
    assert read_trace(path).bytes_per_token == 50_000_000
    shown = []
    for more in ([], ["--bytes-per-token", "100000000"]):
        assert hiradix(["size", str(path), "--processes", "1", *more]) == 0
        shown.append(
            [float(line.split("|")[1].split()[0]) for line in capsys.readouterr().out.splitlines()[2:]]
        )
    assert shown[1] == [2 * size for size in shown[0]] and any(shown[0])


def test_without_a_file_it_plays_the_sessions_in_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert hiradix(["size", "--device-gib", "60", "--most", "2", "--turns", "3"]) == 0
    assert "of 102 sessions stay within 0.492M tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, said",
    [
        ("", "a TRACE is needed, or --device-gib"),
        ("--device-gib 0", "--device-gib"),
        ("--device-gib nan", "--device-gib"),
        ("--device-gib 4 --host-gib -1", "--host-gib"),
        ("--device-gib 4 --storage-gib 1", "--storage-gib needs --host-gib"),
        ("--device-gib 4 --p95 0", "--p95"),
        ("--device-gib 4 --most 0", "--most"),
        ("--device-gib 4 --minutes 0", "--minutes"),
        ("--device-gib 4 --context 0", "--context"),
        ("--device-gib 4 --turns 0", "--turns"),
        ("--device-gib 4 --schedule-policy best", "--schedule-policy: 'best'"),
        ("--device-gib 4 --radix-eviction-policy best", "best"),
        ("--device-gib 4 --prefill-rate 0", "--prefill-rate"),
        ("--device-gib 4 --bytes-per-token 0", "--bytes-per-token"),
        ("--device-gib 4 --kv-element-bytes 2", "--kv-element-bytes needs --model"),
        ("--device-gib 4 --model x --bytes-per-token 5", "--model and --bytes-per-token"),
        ("--device-gib 4 --model /nowhere", "--model /nowhere: cannot be read"),
        ("synthetic:chat --host-gib 4", "--host-gib needs --device-gib"),
        ("synthetic:chat --device-tokens -1", "--device-tokens"),
    ],
)
def test_a_bad_flag_is_named(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert hiradix(["size", *flags.split()]) == 2
    assert said in capsys.readouterr().err


def test_a_trace_without_sessions_carries_no_agents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n')
    assert hiradix(["size", str(path), "--device-gib", "4"]) == 2
    assert "--device-gib needs sessions" in capsys.readouterr().err


def test_a_loop_tells_what_it_has_to_play() -> None:
    file = file_of(4)
    seen: list[int] = []

    def note(loop: ClosedLoop) -> bool:
        seen.append(len(loop.waits))
        return loop.num_turns == 40 and len(loop.waits) == 5

    server = ServerRates(Machine(5_000.0, 1000.0))
    found = ClosedCell(Crowd(4, 10, 5.0), "lru", Tiers(400 * BLOCK), "cached", server).play(file, None, note)
    assert len(found.wait_s) == 5 and sorted(seen) == seen
