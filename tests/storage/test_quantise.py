"""Pages stored as fp8 codes: how far off they come back, and that nobody takes them for exact ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hiradix.apps.storage_tools import main as tools
from hiradix.errors import ConfigError
from hiradix.memory import HostPool
from hiradix.memory.shape import CacheShape, KVShape, MLAShape, ScaledKVShape, SparseMLAShape, StateShape
from hiradix.prefix_cache.identity import ModelIdentity, stored_pages
from hiradix.storage import PageFingerprint, StorageContext, open_storage, open_stores
from hiradix.storage.wrappers.quantise import CODEC, ELEMENTS, QuantisedStorage, coded_bytes, decode, encode
from tests.contracts.storage import keys_of
from tests.storage.doubles import MemoryBackend

NUM = 1000  # values of a page: its last block is not whole
FINGERPRINT = PageFingerprint("a/model", "rev1", "bfloat16", "page_first", 4, shape=(1, 1, 1))
CODED = dataclasses.replace(FINGERPRINT, codec=CODEC)


def values_of(seed: int, dtype: torch.dtype = torch.bfloat16, num: int = NUM) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    spread = 2.0 ** torch.randint(-20, 15, (num,), generator=random)
    return (torch.randn(num, generator=random) * spread).clamp(-60000, 60000).to(dtype)


def page_of(values: torch.Tensor) -> list[memoryview]:
    """In two buffers."""
    data = values.contiguous().view(torch.uint8).numpy()
    return [memoryview(data[:100]), memoryview(data[100:])]


def blank(values: torch.Tensor) -> tuple[torch.Tensor, list[memoryview]]:
    empty = torch.zeros_like(values)
    return empty, page_of(empty)


def through(values: torch.Tensor) -> torch.Tensor:
    name = str(values.dtype).removeprefix("torch.")
    coded = encode(page_of(values), name)
    num_bytes = values.numel() * values.element_size()
    assert len(coded) == coded_bytes(num_bytes, name)
    return torch.frombuffer(bytearray(decode(memoryview(coded), name, num_bytes)), dtype=values.dtype)


def test_the_bound_is_no_wider_than_it_must_be() -> None:
    """Half of it would be exceeded: else the tests below could not fail."""
    values = 1 + torch.rand(4000, generator=torch.Generator().manual_seed(11))
    off = (values - through(values)).abs() / values
    assert 1 / 32 < float(off.max()) <= 1 / 16


def assert_within(values: torch.Tensor, found: torch.Tensor) -> None:
    """The bound that docs state, for finite values."""
    own, came = values.double(), found.double()
    padded = torch.nn.functional.pad(own.abs(), (0, -len(own) % 32)).view(-1, 32)
    largest = padded.amax(dim=1).repeat_interleave(32)[: len(own)]
    bound = torch.maximum(own.abs() / 16, largest / 200_000)
    if values.dtype is torch.float16:
        bound = bound.clamp_min(2.0**-24)
    off = (own - came).abs()
    assert bool((off <= bound).all()), f"{own[off > bound]} came as {came[off > bound]}"


@pytest.mark.parametrize("name", ELEMENTS)
@given(seed=st.integers(0, 1 << 30), num=st.integers(60, 400))
def test_values_come_back_within_the_bound(name: str, seed: int, num: int) -> None:
    values = values_of(seed, getattr(torch, name), num)
    assert_within(values, through(values))


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("at", ["zeros", "max", "tiny", "one large"])
def test_values_at_the_ends_of_a_type(name: str, at: str) -> None:
    dtype = getattr(torch, name)
    info = torch.finfo(dtype)
    values = {
        "zeros": torch.zeros(70, dtype=dtype),
        "max": torch.tensor([info.max, -info.max, 1.0] * 30, dtype=dtype),
        "tiny": torch.tensor([info.smallest_normal, -info.smallest_normal] * 40, dtype=dtype),
        "one large": torch.tensor([30000.0] + [0.01] * 99, dtype=dtype),
    }[at]
    found = through(values)
    assert bool(torch.isfinite(found).all())
    if at != "tiny" or dtype is torch.float16:  # scales end at the smallest normal number of float32
        assert_within(values, found)


def test_what_is_no_number_stays_in_its_place() -> None:
    values = values_of(1)
    values[5], values[40], values[41] = float("nan"), float("inf"), float("-inf")
    found = through(values)
    assert found.isnan().nonzero().flatten().tolist() == [5]
    assert found[40] > 0 > found[41] and bool(torch.isfinite(found[40:42]).all())
    rest = torch.ones(NUM, dtype=torch.bool)
    rest[[5, 40, 41]] = False
    clean = values.clone()
    clean[~rest] = 0
    assert torch.equal(found[rest], through(clean)[rest]), "others' scale changed with it"


@pytest.mark.parametrize("name", ELEMENTS)
def test_what_was_stored_once_comes_back_exactly(name: str) -> None:
    """Pages that are loaded and stored again do not drift."""
    once = through(values_of(7, getattr(torch, name)))
    assert torch.equal(once, through(once))


def plainly_encoded(values: torch.Tensor) -> bytes:
    """What stores hold already: codes by their definition, each step over every value."""
    rows = torch.nn.functional.pad(values.float(), (0, -len(values) % 32)).view(-1, 32)
    largest = torch.where(torch.isfinite(rows), rows.abs(), 0.0).amax(dim=1)
    bits = (largest * (1.0 / 448)).view(torch.int32)
    scales = ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32).clamp_min(2.0**-126)
    codes = (rows / scales[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).flatten()
    exponents = (scales.view(torch.int32) >> 23).to(torch.uint8)
    return bytes(torch.cat([codes[: len(values)], exponents]).numpy())


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("num", [1, 32, 1000, 1024, (1 << 17) + 1000])
@pytest.mark.parametrize("foreign", [(), (float("nan"),), (float("inf"), -float("inf")), (-float("nan"),)])
def test_codes_are_those_of_before(name: str, num: int, foreign: tuple[float, ...]) -> None:
    """Pages that are stored already must go on meaning what they meant, and equal ones stay equal bytes."""
    bits = torch.randint(-(2**31), 2**31, (num,), generator=torch.Generator().manual_seed(num))
    wild = bits.to(torch.int32).view(torch.float32)
    for values in (values_of(num, num=num), torch.where(wild.isfinite(), wild, 0.0)):
        own = values.to(getattr(torch, name))
        own = torch.where(own.isfinite(), own, 0)
        own[: len(foreign)] = torch.tensor(foreign[:num])
        assert bytes(encode(page_of(own), name)) == plainly_encoded(own)


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("with_nan", [True, False])
def test_every_code_of_every_scale_means_what_it_meant(name: str, with_nan: bool) -> None:
    known = torch.tensor([code for code in range(256) if with_nan or code & 0x7F != 0x7F], dtype=torch.uint8)
    blocks = torch.nn.functional.pad(known, (0, -len(known) % 32)).repeat(3)  # more than one piece
    exponents = torch.arange(256, dtype=torch.uint8).repeat_interleave(len(blocks) // 32)
    codes = blocks.repeat(256)
    dtype = getattr(torch, name)
    scales = (exponents.to(torch.int32) << 23).view(torch.float32).repeat_interleave(32)
    limit = torch.finfo(dtype).max
    expected = (codes.view(torch.float8_e4m3fn).float() * scales).clamp(-limit, limit).to(dtype)
    coded = bytearray(torch.cat([codes, exponents]).numpy())
    found = decode(memoryview(coded), name, len(codes) * dtype.itemsize)
    assert bytes(found) == bytes(expected.view(torch.uint8).numpy())


def test_a_thread_may_leave_the_modes_it_began_in() -> None:
    """What it keeps from page to page is made with the first, where engines may have set both of these."""
    values = values_of(3)

    def inside_then_outside() -> list[torch.Tensor]:
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.inference_mode():
                first = through(values).clone()
        finally:
            torch.set_default_dtype(torch.float32)
        return [first, through(values)]

    with ThreadPoolExecutor(1) as new_thread:
        found = new_thread.submit(inside_then_outside).result()
    assert all(torch.equal(one, through(values)) for one in found)


class Unverifying(MemoryBackend):
    """Checks nothing of what it stores."""


def wrapped(inner: MemoryBackend) -> QuantisedStorage:
    return QuantisedStorage(inner, CODED, "bfloat16")


def memory(places: Any = None) -> MemoryBackend:
    context = StorageContext(CODED, {"place": "p"}, coded_bytes(2 * NUM, "bfloat16"))
    return Unverifying(context, {} if places is None else places)


def put(store: Any, values: Sequence[torch.Tensor]) -> list[bool]:
    return list(store.put(keys_of(len(values)), [page_of(one) for one in values]))


def got(store: Any, values: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    made = [blank(one) for one in values]
    ok = store.get(keys_of(len(values)), [page for _, page in made])
    return [tensor if good else None for good, (tensor, _) in zip(ok, made, strict=True)]


def assert_served(store: Any, values: Sequence[torch.Tensor]) -> None:
    for one, found in zip(values, got(store, values), strict=True):
        assert found is not None and torch.equal(found, through(one))


def test_each_flipped_bit_is_a_miss_where_nobody_else_looks() -> None:
    places: dict[str, Any] = {}
    inner = memory(places)
    store, values = wrapped(inner), [values_of(1), values_of(2)]
    assert store.traits.verifies and not inner.traits.verifies
    assert put(store, values) == [True, True]
    assert_served(store, values)
    (stored,) = places.values()
    name = next(name for name in stored if name.endswith(keys_of(1)[0]))
    whole = stored[name]
    for at in (0, NUM - 1, NUM, len(whole) - 65, len(whole) - 64, len(whole) - 1):
        stored[name] = whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :]
        found = got(store, values)
        assert found[0] is None and found[1] is not None, f"byte {at}"
    assert store.stats()["quantise_damaged"] == 6
    assert put(store, values) == [True, True], "what is damaged is replaced"
    assert_served(store, values)


def test_pages_that_changed_places_are_misses() -> None:
    places: dict[str, Any] = {}
    store, values = wrapped(memory(places)), [values_of(1), values_of(2)]
    put(store, values)
    (stored,) = places.values()
    one, other = stored
    stored[one], stored[other] = stored[other], stored[one]
    assert got(store, values) == [None, None]


STORES: dict[str, tuple[str, dict[str, Any]]] = {
    "file": ("file", {"file_storage_path": "pages"}),
    "disk": ("disk", {"disk_storage_path": "pages", "max_size": "64MiB"}),
    "encrypted": ("file", {"file_storage_path": "pages", "encryption_key_file": "key"}),
    "with quotas": ("file", {"file_storage_path": "pages", "quota": "1MiB", "quota_path": "quotas"}),
}
PATIENT = {"min_free_space": 0, "deadline_s": 30.0}


def keys_at(name: str, folder: Path) -> tuple[str, dict[str, Any]]:
    (folder / "key").write_bytes(bytes(range(32)))
    backend, keys = STORES[name]
    places = ("pages", "key", "quotas")
    found = {key: str(folder / value) if value in places else value for key, value in keys.items()}
    return backend, PATIENT | found


def context(keys: dict[str, Any], **more: Any) -> StorageContext:
    return StorageContext(FINGERPRINT, keys, 2 * NUM, **{"elements": "bfloat16", **more})


@pytest.mark.parametrize("name", STORES)
def test_stores_serve_them_and_exact_ones_apart(tmp_path: Path, name: str) -> None:
    backend, keys = keys_at(name, tmp_path)
    values = [values_of(seed) for seed in range(20)]
    coded = open_storage(backend, context(keys | {"quantise": "fp8"}))
    assert all(put(coded, values))
    assert_served(coded, values)
    coded.close()
    exact = open_storage(backend, context(keys))
    assert got(exact, values) == [None] * 20, "an exact store served pages that are not"
    assert all(put(exact, values[:3]))
    exact.close()
    again = open_storage(backend, context(keys | {"quantise": "fp8"}))
    assert_served(again, values)
    again.clear()
    assert got(again, values) == [None] * 20
    again.close()
    exact = open_storage(backend, context(keys))
    found = got(exact, values[:3])
    assert all(one is not None and torch.equal(one, own) for one, own in zip(found, values[:3], strict=True))
    exact.close()


def test_tools_see_the_pages_as_they_are_stored(tmp_path: Path, capsys: Any) -> None:
    keys = {"file_storage_path": str(tmp_path / "pages"), "quantise": "fp8", **PATIENT}
    store = open_storage("file", context(keys))
    values = [values_of(seed) for seed in range(3)]
    assert all(put(store, values))
    store.close()
    url, target = f"file://{tmp_path}/pages", f"file://{tmp_path}/copy"
    for more in ([], ["--set", "quantise=fp8"]):
        assert tools(["verify", url, *more]) == 0
        assert "3 pages are whole, 0 are not" in capsys.readouterr().out
    assert tools(["copy", url, target]) == 0
    copied = open_storage("file", context(keys | {"file_storage_path": str(tmp_path / "copy")}))
    assert_served(copied, values)
    copied.close()


@pytest.mark.parametrize("elements", ["", "uint8", "float8_e4m3fn"])
def test_pages_of_other_kinds_are_refused(tmp_path: Path, elements: str) -> None:
    keys = {"file_storage_path": str(tmp_path), "quantise": "fp8"}
    with pytest.raises(ConfigError, match="quantise: for pages of bfloat16, float16, float32 alone"):
        open_storage("file", context(keys, elements=elements))


def test_files_that_sglang_reads_are_never_lossy(tmp_path: Path) -> None:
    keys = {"file_storage_path": str(tmp_path), "naming": "sglang", "quantise": "fp8"}
    with pytest.raises(ConfigError, match="quantise: SGLang's file names"):
        open_storage("file", context(keys))


SHAPES: list[tuple[CacheShape, str]] = [
    (KVShape(2, 1, 8, 8, torch.bfloat16), "bfloat16"),
    (KVShape(2, 1, 8, 8, torch.float32), "float32"),
    (KVShape(2, 1, 8, 8, torch.uint8), "uint8"),
    (MLAShape(2, 16, 8, torch.float16), "float16"),
    (SparseMLAShape(2, 16, 8, torch.bfloat16, page_size=64), ""),
    (ScaledKVShape(2, 1, 8, 8, 64), ""),
    (StateShape(2, 8, 4), ""),
]


@pytest.mark.parametrize(("shape", "elements"), SHAPES, ids=lambda value: type(value).__name__)
def test_of_what_pages_are_made(shape: CacheShape, elements: str) -> None:
    pool = HostPool(shape, 2, 1 if isinstance(shape, StateShape) else 64)
    assert stored_pages(ModelIdentity("m"), pool, "page_first").elements == elements


def test_windows_are_quantised_too_and_states_refused(tmp_path: Path) -> None:
    shape = KVShape(2, 1, 16, 16, torch.bfloat16)
    pool = HostPool(shape, 2, 4)
    window = stored_pages(ModelIdentity("m"), pool, "page_first", "window-8")
    keys = {"file_storage_path": str(tmp_path), "quantise": "fp8", **PATIENT}
    full = stored_pages(ModelIdentity("m"), pool, "page_first")
    stores = open_stores("file", keys, [full, window])
    values = [values_of(3, num=full.page_bytes // 2)]
    for part in stores.parts:
        assert put(part, values) == [True]
        assert_served(part, values)
    stores.close()
    state = stored_pages(ModelIdentity("m"), HostPool(StateShape(2, 8, 4), 2, 1), "page_first", "state")
    with pytest.raises(ConfigError, match="quantise: .*recurrent states"):
        open_stores("file", keys, [full, state])
