"""The admin API on a live server: SGLang's words and codes, and storage attached, detached and swapped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.sglang.conftest import LENGTH, PAGE_SIZE, WHOLE
from tests.sglang.prompts import prompts, tokens
from tests.sglang.server import PATIENT, Answer, Reference, Server, until

PATH = "/hicache/storage-backend"


def keys(folder: Path, **more: object) -> str:
    own = {"file_storage_path": str(folder), "prefetch_threshold": PAGE_SIZE}
    return json.dumps(PATIENT | own | more)


def put(server: Server, name: str, extra: str | None = None, **fields: object) -> tuple[int, str]:
    body = {"hicache_storage_backend": name, "hicache_storage_backend_extra_config_json": extra} | fields
    reply = server.admin("PUT", PATH, **body)
    return reply.status_code, reply.text


def test_attach_and_detach_sequence(ours: Server, reference: Reference, tmp_path: Path) -> None:
    """The order of SGLang's own test of runtime attach and detach."""
    refused = reference.server.admin("PUT", PATH, key=None, hicache_storage_backend="file")
    assert refused.status_code == 400 and "admin-api-key" in refused.text
    assert ours.admin("GET", PATH, key="wrong").status_code == 401
    assert ours.admin("GET", PATH).json()["hicache_storage_backend"] is None
    extra = keys(tmp_path)
    until(lambda: put(ours, "file", extra, hicache_storage_prefetch_policy="wait_complete")[0] == 200)
    assert ours.admin("GET", PATH).json()["hicache_storage_backend"] == "file"
    assert ours.admin("GET", PATH).json()["hicache_storage_backend_extra_config"] == extra
    code, text = put(ours, "file", extra)
    assert code == 200 and "already enabled with same backend; policies updated" in text
    code, text = put(ours, "disk", "{}")
    assert code == 400 and "Cannot attach different backend 'disk'. Detach first." in text
    prompt = tokens(LENGTH, "attach")
    first = ours.ask(prompt)
    for _ in range(2):  # the second time there is nothing to detach
        ours.detach()
    assert ours.admin("GET", PATH).json()["hicache_storage_backend"] is None
    ours.attach("file", extra)
    ours.flush()
    again = ours.ask(prompt)
    assert again.tier("storage") == WHOLE
    reference.assert_same([first, again])


def test_what_cannot_be_attached_says_why_and_changes_nothing(ours: Server, tmp_path: Path) -> None:
    for name, extra, reason in (
        ("nowhere", None, "hicache_storage_backend: not allowed over HTTP"),
        ("file", "@/etc/passwd", "@file is not allowed over HTTP"),
        ("file", json.dumps({"file_storage_path": "/etc"}), "file_storage_path: not allowed over HTTP"),
        ("file", keys(tmp_path, no_such_key=1), "no_such_key"),
        ("file", "{", "hicache_storage_backend_extra_config_json: not valid JSON"),
        ("dynamic", "{}", "hicache_storage_backend: not allowed over HTTP"),
    ):
        told: list[tuple[int, str]] = []

        def refused(name: str = name, extra: str | None = extra, told: list[tuple[int, str]] = told) -> bool:
            told.append(put(ours, name, extra))
            return "not idle" not in told[-1][1]

        until(refused)
        assert told[-1][0] == 400 and reason in told[-1][1], told[-1]
        assert ours.admin("GET", PATH).json()["hicache_storage_backend"] is None
    code, text = put(ours, "file", keys(tmp_path), hicache_write_policy="sometimes")
    assert code == 400 and "hicache_write_policy" in text


def test_a_busy_server_refuses_to_attach(ours: Server, tmp_path: Path) -> None:
    with ours.paused([tokens(40, "busy")], 1500):
        code, text = put(ours, "file", keys(tmp_path))
    assert code == 400 and text.startswith("Failed to attach HiCache storage backend.") and "Reject" in text


def test_storage_swapped_between_requests(ours: Server, reference: Reference, tmp_path: Path) -> None:
    """Each backend has what was computed while it was attached, and nothing else."""
    asked = prompts(2, LENGTH, "swap")
    answers = []
    for prompt, name in zip(asked, ("one", "two")):
        ours.attach("file", keys(tmp_path / name), hicache_storage_prefetch_policy="wait_complete")
        answers.append(ours.ask(prompt))
        ours.detach()
    for name, found in (("one", [WHOLE, 0]), ("two", [0, WHOLE])):
        ours.flush()
        ours.attach("file", keys(tmp_path / name), hicache_storage_prefetch_policy="wait_complete")
        again = [ours.ask(p) for p in asked]
        assert [a.tier("storage") for a in again] == found
        answers += again
        ours.detach()
    reference.assert_same(answers)


def test_clear_takes_the_stored_pages(ours: Server, reference: Reference, tmp_path: Path) -> None:
    ours.attach("file", keys(tmp_path), hicache_storage_prefetch_policy="wait_complete")
    prompt = tokens(LENGTH, "clear")
    answers = [ours.ask(prompt)]
    ours.flush()
    answers.append(ours.ask(prompt))
    assert answers[-1].tier("storage") == WHOLE
    ours.flush()
    reply = ours.admin("POST", f"{PATH}/clear")
    assert reply.status_code == 200 and reply.text == "Hierarchical cache storage backend cleared.\n"
    answers.append(ours.ask(prompt))
    assert answers[-1].cached == 0
    reference.assert_same(answers)


def test_flush_forgets_device_and_host(ours: Server, reference: Reference) -> None:
    prompt = tokens(LENGTH, "flush")
    answers = [ours.ask(prompt), ours.ask(prompt)]
    ours.flush()
    answers.append(ours.ask(prompt))
    assert [a.cached for a in answers] == [0, WHOLE, 0]
    reference.assert_same(answers)


def other_weights(model: Path, folder: Path) -> Path:
    """A copy of a model with the numbers of each of its weights in another order."""
    shutil.copytree(model, folder)
    (weights,) = folder.glob("*.safetensors")
    save_file({name: tensor.flip(-1).contiguous() for name, tensor in load_file(weights).items()}, weights)
    return folder


def test_other_weights_find_nothing_of_the_first_in_any_tier(
    ours: Server, reference: Reference, model: Path, tmp_path: Path
) -> None:
    """Put in by SGLang's own call, and the first ones again; storage keeps those of each apart."""
    other = other_weights(model, tmp_path / "other")
    ours.attach("file", keys(tmp_path / "pages"), hicache_storage_prefetch_policy="wait_complete")
    prompt = tokens(LENGTH, "weights")

    def asked() -> Answer:
        answer = ours.ask(prompt)
        until(lambda: ours.admin("POST", "/flush_cache").status_code == 200)
        return answer

    def put_in(folder: Path) -> None:
        for server in (ours, reference.server):
            body = {"model_path": str(folder), "flush_cache": True}

            def done(server: Server = server, body: dict[str, object] = body) -> bool:
                return server.admin("POST", "/update_weights_from_disk", **body).status_code == 200

            until(done)

    first = [asked(), asked()]
    try:
        put_in(other)
        second, expected = [asked(), asked()], reference.server.ask(prompt)
    finally:
        put_in(model)
    assert [a.tier("storage") for a in (*first, *second)] == [0, WHOLE, 0, WHOLE]
    assert {a.tokens for a in second} == {expected.tokens} != {a.tokens for a in first}
    compared, again = asked(), asked()
    assert (compared.tier("storage"), again.tier("storage")) == (0, WHOLE), "compared again"
    reference.assert_same([*first, compared, again])


def test_weights_put_in_while_requests_are_paused(
    ours: Server, reference: Reference, model: Path, tmp_path: Path
) -> None:
    """In place, so SGLang does not flush: what is computed until it does is never found again."""
    other = other_weights(model, tmp_path / "other")
    ours.attach("file", keys(tmp_path / "pages"), hicache_storage_prefetch_policy="wait_complete")
    asked = prompts(4, LENGTH, "paused")
    body = {"model_path": str(other), "flush_cache": True}
    try:
        with ours.paused(asked[:2], 600):
            reply = ours.admin("POST", "/update_weights_from_disk", **body)
        assert reply.status_code == 400 and "the cache was not flushed" in reply.text
        for prompt in asked:
            ours.ask(prompt)
        ours.flush()
    finally:
        body["model_path"] = str(model)
        until(lambda: ours.admin("POST", "/update_weights_from_disk", **body).status_code == 200)
    answers = [ours.ask(prompt) for prompt in asked]
    assert [a.tier("storage") for a in answers[2:]] == [0, 0]
    reference.assert_same(answers)
