"""The copy kernel, interpreted, against plain indexing: random strides, gaps, orders, skips and tiles."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from hiradix.triton_kernels import page_copy
from hiradix.triton_kernels.page_copy import INTERPRETED, launch, make_tables
from hiradix.triton_kernels.sides import PlannedCopy, Side, Tile, pick_tile


@dataclass(frozen=True)
class Memory:
    """Random bytes with a strided view [planes, pages, rows, row bytes] into them."""

    flat: torch.Tensor
    view: torch.Tensor

    def side(self) -> Side:
        planes, _, rows, row_bytes = self.view.shape
        plane, page, row, _ = self.view.stride()
        bases = tuple(self.view.data_ptr() + index * plane for index in range(planes))
        return Side(bases, page, row, rows, row_bytes)


def memory(sizes: tuple[int, int, int, int], row_gap: int, page_gap: int, seed: int) -> Memory:
    """Rows and pages apart by so many extra 16-byte vectors; the bytes between are random too."""
    planes, pages, rows, row_bytes = sizes
    row = row_bytes + 16 * row_gap
    page = rows * row + 16 * page_gap
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randint(0, 256, (planes * pages * page + 64,), dtype=torch.uint8, generator=generator)
    flat = flat[(-flat.data_ptr()) % 16 :]
    return Memory(flat, flat.as_strided(sizes, (pages * page, page, row, 1)))


@dataclass(frozen=True)
class Case:
    dst: Memory
    src: Memory
    dst_idx: list[int]
    src_idx: list[int]
    per_layer: int
    layers: range


@st.composite
def cases(draw: st.DrawFn) -> Case:
    per_layer, num_layers = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    rows, vectors = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    dst_pages, src_pages = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    gaps = st.integers(0, 2)
    sizes = (per_layer * num_layers, dst_pages, rows, vectors * 16)
    dst = memory(sizes, draw(gaps), draw(gaps), seed=1)
    src = memory((sizes[0], src_pages, *sizes[2:]), draw(gaps), draw(gaps), seed=2)
    targets = draw(st.lists(st.integers(0, dst_pages - 1), unique=True))
    sources = [draw(st.integers(-1, src_pages - 1)) for _ in targets]
    if targets and draw(st.booleans()):
        targets[draw(st.integers(0, len(targets) - 1))] = -1
    first = draw(st.integers(0, num_layers))
    return Case(dst, src, targets, sources, per_layer, range(first, draw(st.integers(first, num_layers))))


def expected(case: Case) -> torch.Tensor:
    """All of the target's bytes, gaps included, after the copy."""
    flat = case.dst.flat.clone()
    view = flat.as_strided(case.dst.view.shape, case.dst.view.stride())
    for target, source in zip(case.dst_idx, case.src_idx, strict=True):
        if target < 0 or source < 0:
            continue
        for plane in range(case.layers.start * case.per_layer, case.layers.stop * case.per_layer):
            view[plane, target] = case.src.view[plane, source]
    return flat


def run(case: Case, tile: Tile | None, num_programs: int, index: torch.dtype) -> None:
    plan = PlannedCopy(case.src.side(), case.dst.side(), case.per_layer)
    pages = torch.tensor([case.dst_idx, case.src_idx], dtype=index)
    tables = make_tables(plan, torch.device("cpu"))
    launch(tables, pages, case.layers, num_programs, tile)


@settings(max_examples=150)
@given(
    cases(),
    st.sampled_from([None, 1, 2, 4, 8, 16, 64]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([torch.int64, torch.int32]),
)
def test_copies_what_is_asked_and_touches_nothing_else(
    case: Case, block: int | None, num_programs: int, stages: int, index: torch.dtype
) -> None:
    want, source = expected(case), case.src.flat.clone()
    if block is not None:
        vectors = case.src.view.shape[2] * case.src.view.shape[3] // 16
        event("one index per tile" if vectors % block == 0 else "one index per vector")
    run(case, None if block is None else Tile(block, 4, stages), num_programs, index)
    assert torch.equal(case.dst.flat, want)
    assert torch.equal(case.src.flat, source)


@pytest.mark.parametrize("block", [8, 32])
def test_both_index_modes(block: int) -> None:
    """12 vectors per page: 4 divides it, 8 and 32 do not; pinned so that no seed can skip a mode."""
    for size in (block, 4):
        dst, src = memory((2, 4, 3, 64), 1, 1, 1), memory((2, 4, 3, 64), 0, 2, 2)
        case = Case(dst, src, [3, 0, 1], [0, 3, 3], 1, range(1, 2))
        want = expected(case)
        run(case, Tile(size, 4, 2), 2, torch.int64)
        assert torch.equal(dst.flat, want)


def test_strides_beyond_32_bits() -> None:
    """Pages 5 GiB apart: index times stride must be computed in 64 bits, for int32 ids too."""
    far = 5 << 30
    flat = torch.empty(far + 64, dtype=torch.uint8)  # only the pages touched become resident
    start = (-flat.data_ptr()) % 16
    pages = flat.as_strided((1, 2, 1, 16), (0, far, 16, 1), start)
    src = memory((1, 2, 1, 16), 0, 0, 2)
    plan = PlannedCopy(src.side(), Side((flat.data_ptr() + start,), far, 16, 1, 16), 1)
    pages_of = torch.tensor([[1], [1]], dtype=torch.int32)
    launch(make_tables(plan, torch.device("cpu")), pages_of, range(1), 1)
    assert torch.equal(pages[0, 1, 0], src.view[0, 1, 0])


def test_rows_beyond_32_bits() -> None:
    """Rows of a page 5 GiB apart on one side: so is a head's row number times its stride."""
    far = 5 << 30
    flat = torch.empty(far + 64, dtype=torch.uint8)
    start = (-flat.data_ptr()) % 16
    src = memory((1, 1, 2, 16), 0, 0, 2)
    plan = PlannedCopy(src.side(), Side((flat.data_ptr() + start,), 16, far, 2, 16), 1)
    launch(make_tables(plan, torch.device("cpu")), torch.tensor([[0], [0]]), range(1), 1)
    assert torch.equal(flat.as_strided((2, 16), (far, 1), start), src.view[0, 0])


class Launched:
    """A kernel that only counts its launches."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Launched:
        self.grids.append(grid)
        return self

    def __call__(self, *args: object, **kwargs: object) -> None:
        assert args


def test_no_more_than_the_kernel_can_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: the last tile's end may be past 2^31 where the last vector is not; it wraps, and is copied."""
    kernel = Launched()
    monkeypatch.setattr(page_copy, "page_copy_kernel", kernel)
    vectors, tile = 1 << 20, Tile(2048, 8, 3)
    side = Side((0,), vectors * 16, vectors * 16, 1, vectors * 16)
    tables = make_tables(PlannedCopy(side, side, 1), torch.device("cpu"))
    most = (1 << 31) // vectors - 1
    launch(tables, torch.zeros(2, most, dtype=torch.int64), range(1), 4, tile)
    assert kernel.grids == [(4,)]
    odd = Side((0,), 16 * 3, 16 * 3, 1, 16 * 3)
    tables = make_tables(PlannedCopy(odd, odd, 1), torch.device("cpu"))
    for num_pages in ((1 << 31) // 3, (1 << 31) // 3 - 600):
        pages = torch.zeros(1, dtype=torch.int64).expand(2, num_pages)
        with pytest.raises(AssertionError, match="in one copy"):
            launch(tables, pages, range(1), 4, tile)
    launch(tables, torch.zeros(1, dtype=torch.int64).expand(2, num_pages - 200), range(1), 4, tile)


def test_nothing_to_copy_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid of 0 programs is an error on a GPU."""
    kernel = Launched()
    monkeypatch.setattr(page_copy, "page_copy_kernel", kernel)
    side = Side((0, 0), 64, 16, 4, 16)
    tables = make_tables(PlannedCopy(side, side, 1), torch.device("cpu"))
    launch(tables, torch.zeros(2, 0, dtype=torch.int64), range(2), 4)
    launch(tables, torch.zeros(2, 3, dtype=torch.int64), range(1, 1), 4)
    assert kernel.grids == []
    launch(tables, torch.zeros(2, 1, dtype=torch.int64), range(1, 2), 4)
    assert kernel.grids == [(1,)], "never more programs than there are tiles"


def test_contiguous_rows_become_one_row() -> None:
    plan = PlannedCopy(Side((0, 640), 320, 32, 4, 32), Side((0, 64), 128, 32, 4, 32), 2).collapsed()
    assert (plan.src.rows, plan.src.row_bytes, plan.dst.row_bytes, plan.src.page) == (1, 128, 128, 320)
    gap = PlannedCopy(Side((0, 640), 320, 48, 4, 32), Side((0, 64), 128, 32, 4, 32), 2)
    assert gap.collapsed() is gap


@pytest.mark.parametrize(
    ("vectors", "tile"),
    [
        (8192, Tile(2048, 8, 3)),  # 128 KiB page of one layer
        (64 * 72, Tile(512, 4, 3)),  # MLA: 64 rows of 1152 bytes
        (1024, Tile(1024, 4, 3)),
        (128, Tile(1024, 16, 3)),  # one token of 2 KiB: tiles are shared
        (72, Tile(1024, 16, 3)),
    ],
)
def test_tiles_divide_pages_where_they_can(vectors: int, tile: Tile) -> None:
    assert pick_tile(vectors, interpreted=False) == tile


def test_misuse_is_named() -> None:
    dst, src = memory((2, 4, 2, 32), 0, 0, 1), memory((2, 4, 2, 32), 0, 0, 2)
    tables = make_tables(PlannedCopy(src.side(), dst.side(), 1), torch.device("cpu"))
    with pytest.raises(AssertionError, match="needed are targets and sources"):
        launch(tables, torch.tensor([[1, 2]]), range(2), 1)
    with pytest.raises(AssertionError, match="sides differ"):
        PlannedCopy(src.side(), Side((0, 16), 64, 16, 2, 16), 1)
    with pytest.raises(AssertionError, match="16 bytes"):
        make_tables(PlannedCopy(Side((8,), 64, 16, 2, 16), Side((0,), 64, 16, 2, 16), 1), torch.device("cpu"))


def test_interpreted_launches_from_many_threads() -> None:
    """The interpreter is not thread-safe; the lock in `launch` makes it so."""
    assert INTERPRETED
    done, failures = [], []

    def work(seed: int) -> None:
        try:
            for _ in range(8):
                dst, src = memory((1, 3, 1, 32), 0, 0, seed), memory((1, 3, 1, 32), 0, 0, seed + 1)
                case = Case(dst, src, [2, 0], [1, 2], 1, range(1))
                want = expected(case)
                run(case, None, 2, torch.int64)
                assert torch.equal(dst.flat, want)
            done.append(seed)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures and len(done) == 4
