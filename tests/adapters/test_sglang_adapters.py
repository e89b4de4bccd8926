"""Adapters of `--lora-paths`, whose ids say where they lie and nothing of their weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

import pytest

from hiradix.adapters.sglang.lora_adapters import NO_ADAPTERS, LoraAdapters, apart
from hiradix.tree.key import ADAPTER


@dataclass
class LoRARef:
    """SGLang's record of one."""

    lora_name: str
    lora_path: str

    @property
    def lora_id(self) -> str:
        return uuid5(NAMESPACE_URL, f"{self.lora_name}\0{self.lora_path}").hex


def trained(folder: Path, weights: bytes) -> LoRARef:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return LoRARef("l", str(folder))


def test_an_adapter_trained_further_in_its_folder_has_another_name(tmp_path: Path) -> None:
    first = trained(tmp_path / "l", b"first")
    before = LoraAdapters.given([first])
    again = trained(tmp_path / "l", b"again")
    after = LoraAdapters.given([again])
    assert first.lora_id == again.lora_id, "as SGLang has it"
    for extra in ("", "tenant"):
        key = extra + first.lora_id
        assert len({key, before.named(key), after.named(key)}) == 3
        assert before.named(key) == LoraAdapters.given([trained(tmp_path / "l", b"first")]).named(key)
        trained(tmp_path / "l", b"again")


@pytest.mark.parametrize(
    "key", [None, "", "tenant", "0" * 32, "tenant@", "@", "x@" + "0" * 32, "\0", "\0client:x"]
)
def test_other_keys_stay_as_they_are(tmp_path: Path, key: str | None) -> None:
    one = trained(tmp_path / "l", b"w")
    adapters = LoraAdapters.given([one, LoRARef("hub", "org/adapter")])
    for known in (adapters, NO_ADAPTERS):
        assert known.plain(known.named(key)) == key
        assert known.named(key) == (f"\0client:{key}" if key and key[0] == "\0" else key)
    assert adapters.plain(adapters.named("a" + one.lora_id)) == "a" + one.lora_id


def test_an_adapter_is_known_where_elastic_ranks_are_told_behind_its_id(tmp_path: Path) -> None:
    """As SGLang does with --elastic-ep-backend, when it has made the request."""
    one = trained(tmp_path / "l", b"w")
    known = LoraAdapters.given([one])
    for client in ("", "tenant"):
        key = f"{client}{one.lora_id}|elastic_ep_size=8"
        name = known.named(key)
        assert name is not None and name.startswith(ADAPTER) and known.plain(name) == key
        assert known.of(key) == known.of(name) == one.lora_id
        for other in (key, client + one.lora_id):
            foreign = f"{apart(other)}|elastic_ep_size=8"
            assert known.of(foreign) == known.of(apart(other)) == ""
            assert not (known.named(foreign) or "").startswith(ADAPTER)
    assert apart("|elastic_ep_size=8") == "|elastic_ep_size=8"


def test_no_client_names_an_adapters_namespace(tmp_path: Path) -> None:
    """Not by its id, nor by what an adapter's pages are called: here, or in a server with the same store."""
    one = trained(tmp_path / "l", b"w")
    adapters = LoraAdapters.given([one])
    for text in ("", "tenant", "\0", ADAPTER):
        own = adapters.named(text + one.lora_id)
        assert own is not None and own.startswith(ADAPTER)
        for client in (text + one.lora_id, own, f"\0client:{own}", text + one.lora_id + "\0"):
            for known in (adapters, NO_ADAPTERS):
                assert known.named(apart(client)) != own
                assert known.of(known.named(apart(client))) == ""


def test_clients_keys_are_apart_from_each_other() -> None:
    lora = "0f" * 16
    keys = ["", "x", lora, lora + "\0", lora + "\0\0", "\0", "x" + lora, lora[1:], lora.upper(), lora + "\n"]
    assert len({NO_ADAPTERS.named(apart(key)) for key in keys}) == len(keys)
    assert [apart(key) for key in ("", "x", lora[1:], "org/model")] == ["", "x", lora[1:], "org/model"]


def test_an_adapter_by_a_hubs_name_is_its_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repository, one, names = tmp_path / "models--org--l", LoRARef("l", "org/l"), []
    for commit, weights in (("c1", b"first"), ("c2", b"first"), ("c3", b"third")):
        (repository / "snapshots").mkdir(parents=True, exist_ok=True)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(commit)
        trained(repository / "snapshots" / commit, weights)
        names.append(LoraAdapters.given([one]).named(one.lora_id))
    assert len(set(names)) == 3 and one.lora_id not in names
    (repository / "snapshots" / "c3" / "adapter_config.json").write_text('{"lora_alpha": 2}')
    assert LoraAdapters.given([one]).named(one.lora_id) not in names


def test_none_are_given() -> None:
    assert LoraAdapters.given(None) == LoraAdapters.given([]) == NO_ADAPTERS
