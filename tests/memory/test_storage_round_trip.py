"""Device, host, a real store, another host pool, another device: every byte of every kind in every layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hiradix.memory import LAYOUTS, CacheShape, KVShape, SlotManifest, TorchTransport
from hiradix.storage import PageFingerprint, StorageContext, open_storage
from tests.memory.pool_cases import DTYPES, PAGE_SIZE, SHAPES, contents, device_pool, host_pool

SIZES: dict[str, dict[str, object]] = {
    "file": {},
    "disk": {"max_size": "8MiB", "segment_size": "2MiB", "min_free_space": 0},
}
KEYS = [f"{number:064x}" for number in range(3)]
KINDS: dict[str, CacheShape] = {
    **SHAPES,
    **{str(dtype).removeprefix("torch."): KVShape(2, 2, 16, 16, dtype) for dtype in DTYPES},
}


@pytest.mark.parametrize("backend", ["file", "disk"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_pages_come_back_as_they_were(kind: str, layout: str, backend: str, tmp_path: Path) -> None:
    shape = KINDS[kind]
    device, host = device_pool(shape, 5, seed=1), host_pool(shape, 4, layout, seed=2)
    assert host.page_bytes == SlotManifest.of(shape, PAGE_SIZE).page_bytes
    copy, taken = TorchTransport().copy_pages, np.array([5, 2, 3])
    copy(device, host, taken, np.array([1, 3, 0]), None)
    fingerprint = PageFingerprint(
        model_id="m", dtype=str(shape.dtype), layout=layout, page_size=PAGE_SIZE, shape=shape.numbers()
    )
    options = {f"{backend}_storage_path": str(tmp_path), "deadline_s": 30.0} | SIZES[backend]
    other = host_pool(shape, 4, layout, seed=3)
    for step in ("put", "get"):  # each by an instance of its own, as after a restart
        with_storage = open_storage(backend, StorageContext(fingerprint, options, host.page_bytes))
        try:
            if step == "put":
                assert with_storage.put(KEYS, [host.page_views(page) for page in (1, 3, 0)]) == [True] * 3
            else:
                assert with_storage.get(KEYS, [other.page_views(page) for page in (2, 0, 1)]) == [True] * 3
        finally:
            with_storage.close()
    back = device_pool(shape, 5, seed=4)
    copy(other, back, np.array([2, 0, 1]), np.array([1, 4, 2]), None)
    for before, after in zip(contents(device), contents(back), strict=True):
        assert torch.equal(before[:, taken], after[:, [1, 4, 2]])
