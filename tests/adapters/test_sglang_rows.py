"""SGLang's rows as pages, read as on a CPU and as on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from hiradix.adapters.sglang.engine_views import Rows
from hiradix.prefix_cache.allocator_ports import AllocatorPort
from hiradix.tree.ids_numpy import FEW_PAGES

SIZE = 4


class RowPool:
    """SGLang's ReqToTokenPool, as far as it is looked at: two rows of ten pages."""

    def __init__(self) -> None:
        pages = torch.tensor([[0] * 10, [7, 3, 9, 1, 4, 8, 2, 6, 5, 11]], dtype=torch.int32)
        self.req_to_token = (pages[:, :, None] * SIZE + torch.arange(SIZE)).reshape(2, -1).to(torch.int32)

    def write(self, indices: tuple[int, slice], values: torch.Tensor) -> None:
        assert values.dtype == self.req_to_token.dtype
        self.req_to_token[indices] = values


class SegmentFree:
    """An allocator that frees parts of rows."""

    device, size = "cpu", 30 * SIZE

    def __init__(self) -> None:
        self.freed: list[int] = []

    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        assert start_pos % SIZE == 0
        self.freed += (free_index[::SIZE] // SIZE).tolist()


class PageFree(SegmentFree):
    """One that frees pages too, as SGLang's paged one does."""

    def free_page_ids(self, page_ids: torch.Tensor) -> None:
        assert page_ids.dtype == torch.int64
        self.freed += page_ids.tolist()


def on_cpu(pool: RowPool, allocator: SegmentFree) -> Rows:
    return Rows(pool, AllocatorPort(allocator, SIZE))


def as_on_gpu(pool: RowPool, allocator: SegmentFree) -> Rows:
    rows = on_cpu(pool, allocator)
    rows._slots, rows._frees_pages = None, False
    return rows


Make = Callable[[RowPool, SegmentFree], Rows]


@pytest.fixture(params=[on_cpu, as_on_gpu])
def make(request: pytest.FixtureRequest) -> Make:
    found: Make = request.param
    return found


def test_pages_are_read_and_written_where_they_are(make: Make) -> None:
    pool = RowPool()
    rows = make(pool, PageFree())
    pages = rows.pages(1, 2, 6)
    assert pages.dtype == np.int32 and pages.tolist() == [9, 1, 4, 8] and not pages.flags.writeable
    assert rows.pages(1, 3, 3).tolist() == []
    rows.write(1, 4, np.array([20, 21], np.int32))
    assert rows.pages(1, 0, 10).tolist() == [7, 3, 9, 1, 20, 21, 2, 6, 5, 11]
    assert pool.req_to_token[1, 4 * SIZE : 5 * SIZE].tolist() == [80, 81, 82, 83]
    assert not pool.req_to_token[0, SIZE:].reshape(-1, SIZE)[:, 0].any()


@pytest.mark.parametrize(("start", "end", "pages"), [(8, 9, [9]), (8, 16, [9, 1]), (8, 18, [9, 1, 4])])
@pytest.mark.parametrize("kind", [SegmentFree, PageFree])
def test_a_page_that_is_begun_is_freed_once(
    make: Make, kind: type[SegmentFree], start: int, end: int, pages: list[int]
) -> None:
    allocator = kind()
    make(RowPool(), allocator).free(1, start, end)
    assert allocator.freed == pages


@pytest.mark.parametrize("kind", [SegmentFree, PageFree])
def test_the_last_page_of_a_row_may_be_cut(make: Make, kind: type[SegmentFree]) -> None:
    """SGLang's rows are as long as its context, which is no number of pages."""
    pool, allocator = RowPool(), kind()
    pool.req_to_token = pool.req_to_token[:, : 10 * SIZE - 2].contiguous()
    rows = make(pool, allocator)
    assert rows.pages(0, 0, 10).tolist() == [0] * 10
    rows.free(1, 7 * SIZE, 10 * SIZE - 2)
    assert allocator.freed == [6, 5, 11]


def test_more_pages_than_are_read_one_by_one(make: Make) -> None:
    pool = RowPool()
    named = torch.arange(2 * FEW_PAGES, 0, -1, dtype=torch.int32)
    pool.req_to_token = (named[:, None] * SIZE + torch.arange(SIZE)).reshape(1, -1).to(torch.int32)
    rows = make(pool, PageFree())
    for end in (FEW_PAGES, FEW_PAGES + 1, 2 * FEW_PAGES):
        assert rows.pages(0, 0, end).tolist() == named[:end].tolist()


def test_freeing_from_inside_a_page_is_our_bug(make: Make) -> None:
    with pytest.raises(AssertionError):
        make(RowPool(), PageFree()).free(1, 9, 12)
