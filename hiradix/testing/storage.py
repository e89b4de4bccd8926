"""The contract of every storage backend: mixins for pytest to inherit, with `open` filled in.

    from hiradix.testing.storage import FINGERPRINT, StorageContract

    class TestMine(StorageContract, BoundedContract, PersistentContract, SharedContract):
        def open(self, place, fingerprint=FINGERPRINT, **config): ...

`place` is a folder of the test's own. `open` makes a new handle on the store that lives there; handles opened
by a test are closed after it. `StorageContract` is for all; the others are for stores with a cap, stores that
outlive their handles, and stores that several handles may use at once.
"""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hiradix.errors import StorageError
from hiradix.storage import Batch, PageFingerprint

PAGE_BYTES = 6000
FINGERPRINT = PageFingerprint("a/model", "rev1", "float32", "page_first", 64, shape=(2, 3, 16))
OTHER = dataclasses.replace(FINGERPRINT, revision="rev2")
HOSTILE_KEYS = [
    "", ".", "..", "../x", "a/b", "/etc/passwd", "a\0b", "a b", "-rf", ".hidden", "k" * 201, "ключ", "a\nb",
    "a\\b", "%2e%2e", "a:b", "*", "~",
]  # fmt: skip
Make = Callable[..., Any]


def key_of(number: int | str) -> str:
    """A page hash: 64 hex digits."""
    return random.Random(f"key {number}").randbytes(32).hex()


def keys_of(count: int, start: int = 0) -> list[str]:
    return [key_of(number) for number in range(start, start + count)]


def bytes_of(key: str, num_bytes: int = PAGE_BYTES) -> bytes:
    """The page stored under `key`, the same wherever it is computed."""
    return random.Random(f"page {key}").randbytes(num_bytes)


def page_of(key: str, num_bytes: int = PAGE_BYTES) -> list[memoryview]:
    return [memoryview(bytearray(bytes_of(key, num_bytes)))]


def blank(num_bytes: int = PAGE_BYTES) -> list[memoryview]:
    return [memoryview(bytearray(num_bytes))]


def content(page: Sequence[memoryview]) -> bytes:
    return b"".join(bytes(view) for view in page)


def put(store: Any, keys: Sequence[str]) -> list[bool]:
    answer: list[bool] = store.put(Batch.of(keys), [page_of(key) for key in keys])
    return answer


def hits(store: Any, keys: Sequence[str]) -> list[bool]:
    """Read `keys`; which of them came back. What came back is right, or this fails."""
    pages = [blank() for _ in keys]
    answer: list[bool] = store.get(Batch.of(keys), pages)
    assert isinstance(answer, list) and len(answer) == len(keys)
    for key, page, ok in zip(keys, pages, answer):
        assert not ok or content(page) == bytes_of(key), f"wrong bytes served for {key}"
    return answer


class Base:
    """Fixtures of all mixins."""

    raises = True  # whether faults raise StorageError; a guard answers with misses

    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> Any:
        raise NotImplementedError

    @pytest.fixture
    def make(self, tmp_path: Path) -> Iterator[Make]:
        opened: list[Any] = []

        def make(*args: Any, **kwargs: Any) -> Any:
            opened.append(self.open(tmp_path, *args, **kwargs))
            return opened[-1]

        yield make
        run_all([store.close for store in opened])

    @pytest.fixture
    def store(self, make: Make) -> Any:
        return make()

    def refused(self, call: Callable[[], Any]) -> None:
        """`call` raises StorageError, or answers with misses only."""
        if self.raises:
            with pytest.raises(StorageError):
                call()
        else:
            assert not any(call() or [])


class StorageContract(Base):
    """Round trips, answers, names, threads, closing."""

    def takes_and_gives(self, store: Any, keys: Sequence[str]) -> None:
        """Check that keys can be put and read after threads have put and deleted them at once."""
        assert all(put(store, keys)) and all(hits(store, keys))

    def test_page_comes_back_byte_for_byte(self, store: Any) -> None:
        assert put(store, keys_of(1)) == [True]
        assert hits(store, keys_of(1)) == [True]

    def test_batch_comes_back(self, store: Any) -> None:
        keys = keys_of(128)
        assert put(store, keys) == [True] * 128
        assert hits(store, keys) == [True] * 128

    def test_order_of_reading_is_free(self, store: Any) -> None:
        keys = keys_of(20)
        put(store, keys)
        random.Random(1).shuffle(keys)
        assert all(hits(store, keys))

    def test_empty_batches(self, store: Any) -> None:
        none = Batch.of([])
        assert store.get(none, []) == [] and store.put(none, []) == [] and store.exists(none) == 0
        store.delete([])

    def test_absent_key_is_a_plain_miss(self, store: Any) -> None:
        assert hits(store, keys_of(1)) == [False]
        assert store.exists(Batch.of(keys_of(1))) == 0

    def test_absent_keys_leave_their_neighbours_alone(self, store: Any) -> None:
        keys = keys_of(9)
        put(store, keys[::2])
        assert hits(store, keys) == [index % 2 == 0 for index in range(9)]

    def test_exists_counts_leading_keys_only(self, store: Any) -> None:
        keys = keys_of(8)
        put(store, keys[:5] + keys[6:])
        assert store.exists(Batch.of(keys)) == 5
        assert store.exists(Batch.of(keys[5:])) == 0
        assert store.exists(Batch.of(keys[6:])) == 2

    def test_exists_takes_the_keys_before(self, store: Any) -> None:
        keys = keys_of(6)
        put(store, keys)
        assert store.exists(Batch.of(keys)[3:]) == 3

    def test_exists_of_128_in_one_call(self, store: Any) -> None:
        keys = keys_of(128)
        put(store, keys)
        assert store.exists(Batch.of(keys)) == 128

    def test_putting_again_succeeds_and_keeps_the_first_bytes(self, store: Any) -> None:
        key = key_of(0)
        put(store, [key])
        assert store.put(Batch.of([key]), [page_of("other")]) == [True]
        assert hits(store, [key]) == [True]

    def test_same_key_twice_in_a_batch(self, store: Any) -> None:
        keys = [key_of(0), key_of(1), key_of(0)]
        assert put(store, keys) == [True] * 3
        assert hits(store, keys) == [True] * 3

    def test_batch_of_old_and_new_keys(self, store: Any) -> None:
        keys = keys_of(10)
        put(store, keys[3:6])
        assert put(store, keys) == [True] * 10
        assert all(hits(store, keys))

    def test_page_of_several_buffers(self, store: Any) -> None:
        whole = bytes_of(key_of(0))
        cuts = [0, 1, 1000, 1000, 4096, PAGE_BYTES]
        pieces = [memoryview(bytearray(whole[a:b])) for a, b in zip(cuts, cuts[1:])]
        assert store.put(Batch.of([key_of(0)]), [pieces]) == [True]
        assert hits(store, [key_of(0)]) == [True]
        into = [memoryview(bytearray(PAGE_BYTES // 4)) for _ in range(4)]
        assert store.get(Batch.of([key_of(0)]), [into]) == [True]
        assert content(into) == whole

    def test_page_of_a_thousand_small_buffers(self, store: Any) -> None:
        whole = bytes_of(key_of(0))
        pieces = [memoryview(bytearray(whole[at : at + 4])) for at in range(0, PAGE_BYTES, 4)]
        assert store.put(Batch.of([key_of(0)]), [pieces]) == [True]
        into = [memoryview(bytearray(4)) for _ in range(PAGE_BYTES // 4)]
        assert store.get(Batch.of([key_of(0)]), [into]) == [True]
        assert content(into) == whole

    def test_views_into_one_pool(self, store: Any) -> None:
        pool = memoryview(bytearray(10 * PAGE_BYTES))
        keys = keys_of(5)
        for index, key in enumerate(keys):
            pool[2 * index * PAGE_BYTES : (2 * index + 1) * PAGE_BYTES] = bytes_of(key)
        pages = [[pool[2 * i * PAGE_BYTES : (2 * i + 1) * PAGE_BYTES]] for i in range(5)]
        assert all(store.put(Batch.of(keys), pages))
        pool[:] = bytes(len(pool))
        assert all(store.get(Batch.of(keys[::-1]), pages))
        for index, key in enumerate(keys[::-1]):
            assert content(pages[index]) == bytes_of(key)
            assert not any(pool[(2 * index + 1) * PAGE_BYTES : (2 * index + 2) * PAGE_BYTES])

    def test_stored_bytes_are_a_copy(self, store: Any) -> None:
        page = page_of(key_of(0))
        store.put(Batch.of([key_of(0)]), [page])
        page[0][:] = bytes(PAGE_BYTES)
        assert hits(store, [key_of(0)]) == [True]

    def test_source_is_not_changed(self, store: Any) -> None:
        page = page_of(key_of(0))
        store.put(Batch.of([key_of(0)]), [page])
        assert content(page) == bytes_of(key_of(0))

    def test_source_may_be_read_only(self, store: Any) -> None:
        assert store.put(Batch.of([key_of(0)]), [[memoryview(bytes_of(key_of(0)))]]) == [True]
        assert hits(store, [key_of(0)]) == [True]

    def test_page_of_zeros_is_a_page(self, store: Any) -> None:
        into = page_of("noise")
        assert store.put(Batch.of([key_of(0)]), [blank()]) == [True]
        assert store.get(Batch.of([key_of(0)]), [into]) == [True]
        assert content(into) == bytes(PAGE_BYTES)

    def test_deleted_key_is_a_miss_and_can_be_put_again(self, store: Any) -> None:
        keys = keys_of(3)
        put(store, keys)
        store.delete(keys[1:2])
        assert hits(store, keys) == [True, False, True]
        assert put(store, keys) == [True] * 3
        assert all(hits(store, keys))

    def test_deleting_absent_keys_is_fine(self, store: Any) -> None:
        store.delete(keys_of(5))
        assert put(store, keys_of(1)) == [True]

    def test_clear_forgets_everything(self, store: Any) -> None:
        keys = keys_of(30)
        put(store, keys)
        store.clear()
        assert store.exists(Batch.of(keys)) == 0 and not any(hits(store, keys))
        assert all(put(store, keys)) and all(hits(store, keys))

    def test_clear_of_an_empty_store(self, store: Any) -> None:
        store.clear()
        store.clear()

    @pytest.mark.parametrize("key", HOSTILE_KEYS)
    def test_hostile_key_is_refused_by_get_and_put(self, store: Any, key: str, tmp_path: Path) -> None:
        before = sorted(tmp_path.rglob("*"))
        self.refused(lambda: store.put(Batch.of([key]), [blank()]))
        self.refused(lambda: store.get(Batch.of([key]), [blank()]))
        assert sorted(tmp_path.rglob("*")) == before

    @pytest.mark.parametrize("key", HOSTILE_KEYS)
    def test_hostile_key_is_refused_by_exists_and_delete(self, store: Any, key: str) -> None:
        put(store, keys_of(1))
        if self.raises:
            self.refused(lambda: store.exists(Batch.of([key])))
            self.refused(lambda: store.delete([key]))
        else:
            assert store.exists(Batch.of([key])) == 0
            store.delete([key])
        assert hits(store, keys_of(1)) == [True]

    def test_key_that_is_no_text_is_refused(self, store: Any) -> None:
        for key in (b"bytes", 7):
            batch = Batch.of([key])  # type: ignore[list-item]
            self.refused(lambda batch=batch: store.put(batch, [blank()]))  # type: ignore[misc]
            self.refused(lambda batch=batch: store.get(batch, [blank()]))  # type: ignore[misc]

    @pytest.mark.parametrize("key", ["0", "a.b-c_d", "A" * 160, "0x1", "con"])
    def test_plain_names_are_keys(self, store: Any, key: str) -> None:
        assert put(store, [key]) == [True] and hits(store, [key]) == [True]

    def test_keys_that_begin_alike_do_not_meet(self, store: Any) -> None:
        keys = ["ab", "abc", "abcd", "abc.page", "abc.tmp"]
        assert all(put(store, keys)) and all(hits(store, keys))
        store.delete(["abc"])
        assert hits(store, keys) == [True, False, True, True, True]

    def test_threads_share_a_handle(self, store: Any) -> None:
        keys = keys_of(40)
        faults: list[BaseException] = []

        def work(seed: int) -> None:
            rng = random.Random(seed)
            try:
                for _ in range(15):
                    batch = rng.sample(keys, 6)
                    rng.choice([put, hits, lambda s, k: s.exists(Batch.of(k)), lambda s, k: s.delete(k[:1])])(
                        store, batch
                    )
            except BaseException as error:
                faults.append(error)

        run_all([lambda seed=seed: work(seed) for seed in range(4)])  # type: ignore[misc]
        assert not faults
        self.takes_and_gives(store, keys)

    def test_threads_put_the_same_keys(self, store: Any) -> None:
        keys = keys_of(16)
        answers: list[list[bool]] = []
        run_all([lambda: answers.append(put(store, keys)) for _ in range(4)])
        assert answers == [[True] * 16] * 4 and all(hits(store, keys))

    def test_readers_never_see_half_a_page(self, store: Any) -> None:
        keys, ended = keys_of(4), threading.Event()
        faults: list[BaseException] = []

        def read() -> None:
            try:
                while not ended.is_set():
                    hits(store, keys)
            except BaseException as error:
                faults.append(error)

        def write() -> None:
            for _ in range(25):
                put(store, keys)
                store.delete(keys)
            ended.set()

        run_all([read, write])
        assert not faults

    def test_ping_and_stats(self, store: Any) -> None:
        put(store, keys_of(2))
        store.ping()
        figures = store.stats()
        assert all(isinstance(name, str) for name in figures)
        assert all(isinstance(value, int | float) for value in figures.values())

    def test_register_is_accepted(self, store: Any) -> None:
        store.register(memoryview(bytearray(1 << 16)))
        assert all(put(store, keys_of(2)))

    def test_closing_twice_is_fine(self, store: Any) -> None:
        store.close()
        store.close()

    def test_closed_handle_refuses(self, store: Any) -> None:
        put(store, keys_of(1))
        store.close()
        self.refused(lambda: store.get(Batch.of(keys_of(1)), [blank()]))
        self.refused(lambda: put(store, keys_of(1)))
        self.refused(lambda: [store.exists(Batch.of(keys_of(1)))])


class PersistentContract(Base):
    """Pages outlive the handle that wrote them."""

    def test_pages_are_there_after_reopening(self, make: Make) -> None:
        first = make()
        put(first, keys_of(50))
        first.close()
        second = make()
        assert second.exists(Batch.of(keys_of(50))) == 50 and all(hits(second, keys_of(50)))

    def test_deleted_pages_stay_deleted(self, make: Make) -> None:
        first = make()
        put(first, keys_of(3))
        first.delete(keys_of(2))
        first.close()
        assert hits(make(), keys_of(3)) == [False, False, True]

    def test_cleared_pages_stay_cleared(self, make: Make) -> None:
        first = make()
        put(first, keys_of(3))
        first.clear()
        first.close()
        assert not any(hits(make(), keys_of(3)))

    def test_handle_that_was_never_closed_loses_nothing(self, make: Make) -> None:
        put(make(), keys_of(20))
        assert all(hits(make(), keys_of(20)))


class NamespaceContract(Base):
    """Handles of different fingerprints on one store."""

    DIFFERENCES: Sequence[dict[str, Any]] = (
        {"model_id": "b/model"},
        {"revision": "rev2"},
        {"dtype": "bfloat16"},
        {"layout": "layer_first"},
        {"page_size": 32},
        {"tp_rank": 1},
        {"tp_size": 2},
        {"pp_rank": 1},
        {"pp_size": 2},
        {"shape": (2, 3, 32)},
        {"codec": "fp8"},
        {"model_id": "a/model@%/_ \u00fc\u4e2d" + "x" * 500},
    )

    @pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda d: next(iter(d)))
    def test_any_difference_is_a_miss_and_the_same_is_a_hit(
        self, make: Make, difference: dict[str, Any]
    ) -> None:
        put(make(), keys_of(3))
        other = make(dataclasses.replace(FINGERPRINT, **difference))
        assert other.exists(Batch.of(keys_of(3))) == 0 and not any(hits(other, keys_of(3)))
        assert all(put(other, keys_of(3))) and all(hits(other, keys_of(3)))
        assert all(hits(make(), keys_of(3)))

    def test_each_keeps_its_own_bytes_under_one_key(self, make: Make) -> None:
        ours, theirs = make(), make(OTHER)
        put(ours, keys_of(1))
        theirs.put(Batch.of(keys_of(1)), [page_of("theirs")])
        assert hits(ours, keys_of(1)) == [True]
        page = blank()
        assert theirs.get(Batch.of(keys_of(1)), [page]) == [True] and content(page) == bytes_of("theirs")

    def test_clear_is_scoped(self, make: Make) -> None:
        ours, theirs = make(), make(OTHER)
        put(ours, keys_of(4))
        put(theirs, keys_of(4))
        ours.clear()
        assert not any(hits(ours, keys_of(4))) and all(hits(theirs, keys_of(4)))

    def test_delete_is_scoped(self, make: Make) -> None:
        ours, theirs = make(), make(OTHER)
        put(ours, keys_of(2))
        put(theirs, keys_of(2))
        theirs.delete(keys_of(1))
        assert hits(ours, keys_of(2)) == [True, True] and hits(theirs, keys_of(2)) == [False, True]


class SharedContract(Base):
    """Several handles on one store at once."""

    def test_one_reads_what_the_other_wrote(self, make: Make) -> None:
        writer, reader = make(), make()
        put(writer, keys_of(10))
        assert reader.exists(Batch.of(keys_of(10))) == 10 and all(hits(reader, keys_of(10)))

    def test_page_deleted_by_another_is_a_miss_and_can_be_put(self, make: Make) -> None:
        ours, theirs = make(), make()
        put(ours, keys_of(2))
        theirs.delete(keys_of(1))
        assert hits(ours, keys_of(2)) == [False, True]
        assert all(put(ours, keys_of(2))) and all(hits(theirs, keys_of(2)))

    def test_same_keys_from_several_handles(self, make: Make) -> None:
        stores = [make() for _ in range(3)]
        answers: list[list[bool]] = []
        run_all([lambda s=s: answers.append(put(s, keys_of(20))) for s in stores])  # type: ignore[misc]
        assert answers == [[True] * 20] * 3
        assert all(all(hits(store, keys_of(20))) for store in stores)

    def test_clear_by_another(self, make: Make) -> None:
        ours, theirs = make(), make()
        put(ours, keys_of(5))
        theirs.clear()
        assert not any(hits(ours, keys_of(5)))
        assert all(put(ours, keys_of(5))) and all(hits(ours, keys_of(5)))

    def test_one_closes_and_the_other_goes_on(self, make: Make) -> None:
        ours, theirs = make(), make()
        put(ours, keys_of(5))
        ours.close()
        assert all(hits(theirs, keys_of(5))) and all(put(theirs, keys_of(10)))


class BoundedContract(Base):
    """A cap of `pages` pages, and the least recently used go first."""

    def bounded(self, make: Make, pages: int) -> Any:
        """A store with room for exactly `pages` pages of PAGE_BYTES."""
        raise NotImplementedError

    def used_pages(self, place: Path) -> int:
        """The number of pages in the store at `place`."""
        raise NotImplementedError

    def test_least_recently_used_goes(self, make: Make, tmp_path: Path) -> None:
        store = self.bounded(make, 3)
        a, b, c, d = keys_of(4)
        for key in (a, b, c):
            put(store, [key])
        hits(store, [a])
        assert put(store, [d]) == [True]
        assert hits(store, [a, b, c, d]) == [True, False, True, True]
        assert self.used_pages(tmp_path) == 3

    def test_put_and_delete_never_use_the_room_up(self, make: Make, tmp_path: Path) -> None:
        store = self.bounded(make, 2)
        for number in range(10):
            assert put(store, [key_of(number)]) == [True]
            store.delete([key_of(number)])
        assert self.used_pages(tmp_path) == 0

    def test_three_times_the_cap_stays_under_it(self, make: Make, tmp_path: Path) -> None:
        store = self.bounded(make, 10)
        for number in range(30):
            assert put(store, [key_of(number)]) == [True]
            assert self.used_pages(tmp_path) <= 10
        assert hits(store, keys_of(30))[-9:] == [True] * 9

    def test_batch_longer_than_the_cap_keeps_its_head(self, make: Make, tmp_path: Path) -> None:
        store = self.bounded(make, 6)
        answer = put(store, keys_of(10))
        assert answer == [True] * 6 + [False] * 4
        assert hits(store, keys_of(10)) == answer and self.used_pages(tmp_path) == 6

    def test_eviction_takes_a_prefix_from_its_tail(self, make: Make) -> None:
        store = self.bounded(make, 8)
        put(store, keys_of(8))
        for number in range(100, 105):
            put(store, [key_of(number)])
            answer = hits_without_using(store, keys_of(8))
            assert answer == sorted(answer, reverse=True), "a hole before the tail"
        assert sum(answer) == 3

    def test_reading_a_prefix_keeps_its_head_longest(self, make: Make) -> None:
        store = self.bounded(make, 8)
        for key in keys_of(8)[::-1]:
            put(store, [key])
        hits(store, keys_of(8))
        put(store, keys_of(3, start=100))
        assert hits_without_using(store, keys_of(8)) == [True] * 5 + [False] * 3

    def test_old_pages_of_the_batch_itself_are_not_evicted_for_it(self, make: Make) -> None:
        store = self.bounded(make, 4)
        put(store, keys_of(1))
        put(store, keys_of(3, start=10))
        assert put(store, [*keys_of(1), *keys_of(2, start=20)]) == [True] * 3
        assert all(hits(store, [*keys_of(1), *keys_of(2, start=20)]))

    def test_putting_again_counts_once(self, make: Make, tmp_path: Path) -> None:
        store = self.bounded(make, 3)
        for _ in range(5):
            put(store, keys_of(2))
        assert self.used_pages(tmp_path) == 2
        assert put(store, [key_of(7)]) == [True] and all(hits(store, [*keys_of(2), key_of(7)]))

    def test_clear_frees_the_room(self, make: Make, tmp_path: Path) -> None:
        store = self.bounded(make, 4)
        put(store, keys_of(4))
        store.clear()
        assert self.used_pages(tmp_path) == 0
        assert all(put(store, keys_of(4, start=50))) and all(hits(store, keys_of(4, start=50)))


class QuotaContract(Base):
    """Limits of `pages` pages for each tenant. `deletes`: whether the store can; else it refuses."""

    deletes = True

    def limited(self, make: Make, tmp_path: Path, pages: int | None, **config: Any) -> Any:
        default = {} if pages is None else {"quota": quota_of(pages)}
        return make(quota_path=str(tmp_path / "accounts"), **default, **config)

    def test_a_tenant_makes_room_with_his_own_coldest(self, make: Make, tmp_path: Path) -> None:
        store = self.limited(make, tmp_path, 3)
        theirs = keys_of(3, start=100)
        assert put_for(store, theirs, "salt:b") == [True] * 3
        for key in keys_of(3):
            assert put_for(store, [key], "salt:a") == [True]
        hits(store, keys_of(1))
        assert put_for(store, [key_of(3)], "salt:a") == [self.deletes]
        kept = [True, False, True, True] if self.deletes else [True, True, True, False]
        assert hits(store, keys_of(4)) == kept
        assert hits(store, theirs) == [True] * 3

    def test_a_batch_longer_than_the_quota_keeps_its_head(self, make: Make, tmp_path: Path) -> None:
        store = self.limited(make, tmp_path, 6)
        put_for(store, keys_of(2, start=50), "salt:a")
        room = 6 if self.deletes else 4
        answer = put_for(store, keys_of(10), "salt:a")
        assert answer == [True] * room + [False] * (10 - room) and hits(store, keys_of(10)) == answer

    def test_a_prefix_leaves_from_its_tail(self, make: Make, tmp_path: Path) -> None:
        if not self.deletes:
            return
        store, chain = self.limited(make, tmp_path, 30), Batch.of(keys_of(30), tenant="salt:a")
        assert all(put(store, chain[:20])) and all(put(store, chain[20:]))
        for number in range(100, 115):
            assert put_for(store, [key_of(number)], "salt:a") == [True]
        assert hits_without_using(store, keys_of(30)) == [True] * 15 + [False] * 15

    def test_a_page_counts_once(self, make: Make, tmp_path: Path) -> None:
        store = self.limited(make, tmp_path, 3)
        for _ in range(4):
            assert put_for(store, keys_of(2), "salt:a") == [True] * 2
        assert put_for(store, [key_of(7), key_of(7)], "salt:a") == [True] * 2
        assert hits(store, [*keys_of(2), key_of(7)]) == [True] * 3

    def test_deleting_and_clearing_make_room(self, make: Make, tmp_path: Path) -> None:
        store = self.limited(make, tmp_path, 4)
        put_for(store, keys_of(4), "salt:a")
        if self.deletes:
            store.delete(keys_of(2))
            assert put_for(store, keys_of(2, start=10), "salt:a") == [True] * 2
            assert hits(store, keys_of(4)) == [False, False, True, True]
        store.clear()
        assert put_for(store, keys_of(4, start=20), "salt:a") == [True] * 4
        assert all(hits(store, keys_of(4, start=20)))

    def test_named_tenants_have_their_own(self, make: Make, tmp_path: Path) -> None:
        quotas = {"salt:big": quota_of(5), "key:big": quota_of(2), "": 0}
        store = self.limited(make, tmp_path, 1, quotas=quotas)
        found = [sum(put_for(store, keys_of(8, start), tenant)) for start, tenant in
                 ((0, "salt:big"), (10, "key:big"), (20, ""), (30, "salt:else"))]  # fmt: skip
        assert found == [5, 2, 0, 1]

    def test_tenants_without_a_quota_have_no_limit(self, make: Make, tmp_path: Path) -> None:
        store = self.limited(make, tmp_path, None, quotas={"salt:a": quota_of(2)})
        assert all(put_for(store, keys_of(20), "salt:b")) and all(put(store, keys_of(20, start=20)))
        assert sum(put_for(store, keys_of(4, start=50), "salt:a")) == 2

    def test_the_account_outlives_the_handle(self, make: Make, tmp_path: Path) -> None:
        first = self.limited(make, tmp_path, 4)
        put_for(first, keys_of(4), "salt:a")
        first.close()
        second = self.limited(make, tmp_path, 4)
        put_for(second, keys_of(3, start=10), "salt:a")
        left = hits_without_using(second, [*keys_of(4), *keys_of(3, start=10)])
        assert sum(left) <= 4 and all(left[4:]) == self.deletes

    def test_a_lowered_quota_holds_from_the_next_put(self, make: Make, tmp_path: Path) -> None:
        first = self.limited(make, tmp_path, 6)
        put_for(first, keys_of(6), "salt:a")
        first.close()
        second = self.limited(make, tmp_path, 2)
        assert put_for(second, [key_of(9)], "salt:a") == [self.deletes]
        if self.deletes:
            assert sum(hits_without_using(second, [*keys_of(6), key_of(9)])) <= 2

    @pytest.mark.parametrize("tenant", ["salt:../../x", "key:/etc/passwd", "salt:a\0b", "salt:", "key:'; --",
                                        "salt:\ud800", "salt:" + "x" * 5000])  # fmt: skip
    def test_hostile_tenants_are_only_names(self, make: Make, tmp_path: Path, tenant: str) -> None:
        store = self.limited(make, tmp_path, 2)
        before = {path.parent for path in tmp_path.rglob("*.quota*")}
        assert sum(put_for(store, keys_of(3), tenant)) == 2
        assert {path.parent for path in tmp_path.rglob("*.quota*")} == before == {tmp_path / "accounts"}

    def test_threads_of_several_tenants_stay_within(self, make: Make, tmp_path: Path) -> None:
        store = self.limited(make, tmp_path, 5)
        faults: list[BaseException] = []

        def work(tenant: int, seed: int) -> None:
            rng = random.Random(seed)
            try:
                for _ in range(12):
                    batch = keys_of(3, start=100 * tenant + rng.randrange(20))
                    put_for(store, batch, f"salt:{tenant}")
                    hits(store, batch)
                    if rng.random() < 0.2:
                        store.delete(batch[:1])
            except BaseException as error:
                faults.append(error)

        run_all([lambda t=n % 3, s=n: work(t, s) for n in range(4)])  # type: ignore[misc]
        assert not faults
        for tenant in range(3):
            assert sum(hits_without_using(store, keys_of(23, start=100 * tenant))) <= 5

    def test_figures_say_who_has_how_much(self, make: Make, tmp_path: Path) -> None:
        store = self.limited(make, tmp_path, 3)
        put_for(store, keys_of(5), "salt:a")
        figures = {name.removeprefix("backend_"): value for name, value in store.stats().items()}
        assert figures["quota_tenants"] == 1
        assert figures["quota_refused_room" if self.deletes else "quota_refused_no_delete"] == 2
        (shown,) = [value for name, value in figures.items() if name.startswith("quota_used_bytes_")]
        assert quota_of(3) - 3 * 64 <= shown <= quota_of(3)


class SharedQuotaContract(QuotaContract):
    """Several handles on one store share the account."""

    def test_handles_together_stay_within(self, make: Make, tmp_path: Path) -> None:
        stores = [self.limited(make, tmp_path, 5) for _ in range(2)]
        run_all([lambda i=i, s=s: [put_for(s, keys_of(3, 10 * i + n), "salt:a") for n in range(5)]
                 for i, s in enumerate(stores)])  # type: ignore[misc]  # fmt: skip
        assert sum(hits(stores[0], keys_of(20))) <= 5

    def test_one_makes_room_with_what_the_other_put(self, make: Make, tmp_path: Path) -> None:
        ours, theirs = (self.limited(make, tmp_path, 3) for _ in range(2))
        put_for(theirs, keys_of(3), "salt:a")
        assert put_for(ours, [key_of(9)], "salt:a") == [True]
        assert hits(theirs, [*keys_of(3), key_of(9)]) == [True, True, False, True]


def quota_of(pages: int) -> int:
    """Room for exactly so many pages, with or without their seals; for up to 90 of them."""
    return pages * (PAGE_BYTES + 64)


def put_for(store: Any, keys: Sequence[str], tenant: str) -> list[bool]:
    return put(store, Batch.of(keys, tenant=tenant))


def hits_without_using(store: Any, keys: Sequence[str]) -> list[bool]:
    """Flags: which keys are there, looked up without making them recent."""
    return [store.exists(Batch.of([key])) == 1 for key in keys]


def run_all(works: Sequence[Callable[[], Any]], timeout_s: float = 60.0) -> None:
    """Run each in a thread of its own; all must end."""
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
        assert not thread.is_alive(), "a thread hangs"
