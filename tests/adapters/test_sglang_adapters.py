"""Adapters of `--lora-paths`, whose ids say where they lie and nothing of their weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

import pytest

from hiradix.adapters.sglang.adapters import NO_ADAPTERS, Adapters


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
    before = Adapters.given([first])
    again = trained(tmp_path / "l", b"again")
    after = Adapters.given([again])
    assert first.lora_id == again.lora_id, "as SGLang has it"
    for extra in ("", "tenant"):
        key = extra + first.lora_id
        assert len({key, before.named(key), after.named(key)}) == 3
        assert before.named(key) == Adapters.given([trained(tmp_path / "l", b"first")]).named(key)
        trained(tmp_path / "l", b"again")


@pytest.mark.parametrize("key", [None, "", "tenant", "0" * 32, "tenant@", "@", "x@" + "0" * 32])
def test_other_keys_stay_as_they_are(tmp_path: Path, key: str | None) -> None:
    one = trained(tmp_path / "l", b"w")
    adapters = Adapters.given([one, LoRARef("hub", "org/adapter")])
    assert len(adapters.digests) == 1, "what is no folder has no weights to look at"
    for known in (adapters, NO_ADAPTERS):
        assert known.named(key) == key and known.plain(key) == key
    assert adapters.plain(adapters.named("a" + one.lora_id)) == "a" + one.lora_id
    assert adapters.plain(f"{one.lora_id}@{'0' * 32}") == f"{one.lora_id}@{'0' * 32}"


def test_none_are_given() -> None:
    assert Adapters.given(None) == Adapters.given([]) == NO_ADAPTERS
