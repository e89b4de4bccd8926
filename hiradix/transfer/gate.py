"""The layer gate: a forward pass may read layer k of loaded pages only after layer k has been copied.

Every layer-wise load is a batch with an index of its own (it counts up and is never used twice, so a
late waiter cannot take another batch for its own). At most `num_slots` batches have copies under way.

A wait that gives up leaves a mark (`gave_up`) that no later success of the copy takes away: what has been
computed behind it was computed without the pages it needs.

A waiter first waits on the host until the worker has recorded the layer's event, since waiting on an
event that is not recorded yet is a no-op, and then makes its CUDA stream wait for the event.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hiradix.errors import CacheError, Misuse
from hiradix.transfer.drivers import Driver, ThreadDriver

MAX_REMEMBERED_FAILURES = 1024


class LoadFailed(CacheError):
    """Pages that a forward pass waits for did not arrive: their requests must not use them."""


class _BatchProgress:
    __slots__ = ("ended", "error", "events", "index", "layers_done")

    def __init__(self, index: int, num_layers: int):
        self.index = index
        self.layers_done = 0
        self.events: list[Any] = [None] * num_layers
        self.error: str | None = None
        self.ended = False


class LayerDoneCounter:
    """Tells per layer how far each batch of loads has come.

    The scheduler thread calls `update_producer` and `set_consumer`, the load worker `layer_done` and
    `end`, the model's thread `wait_until`. wait_event(event) orders the current stream behind an event.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int = 3,
        *,
        driver: Driver | None = None,
        timeout_s: float = 30.0,
        wait_event: Callable[[Any], None] = lambda event: event.wait(),
    ):
        self.num_layers = num_layers
        self.num_slots = num_slots
        self.timeout_s = timeout_s
        self._wait_event = wait_event
        self._driver = ThreadDriver() if driver is None else driver
        self._slots: list[_BatchProgress | None] = [None] * num_slots
        self._failures: OrderedDict[int, str] = OrderedDict()
        self._given_up: OrderedDict[int, str] = OrderedDict()
        self._next = 0
        self._consumers: tuple[int, ...] = ()
        self._readable: tuple[int, ...] = ()

    # -- producer -----------------------------------------------------------------------

    def update_producer(self) -> int:
        """Index of a new batch, when the slot it shares with an older one is free.

        Waits for that up to `timeout_s`; after that the new batch is born failed, so its waiters raise.
        """
        index = self._next
        self._next += 1
        slot = index % self.num_slots
        if self._is_free(slot) or self._driver.wait_for(lambda: self._is_free(slot), self.timeout_s):
            self._slots[slot] = _BatchProgress(index, self.num_layers)
        else:
            _remember(self._failures, index, f"no load slot came free within {self.timeout_s} s")
        return index

    def is_open(self, index: int) -> bool:
        """Whether batch `index` has a slot and its copies have not ended."""
        batch = self._slots[index % self.num_slots]
        return batch is not None and batch.index == index and not batch.ended

    def layer_done(self, index: int, layer: int, event: Any = None) -> None:
        """Layer `layer` of batch `index` is copied, or will be when `event` fires. Layers come in order."""
        batch = self._batch(index)
        if batch.layers_done != layer:
            raise Misuse(f"batch {index}: layer {layer} after {batch.layers_done} layers")
        batch.events[layer] = event
        batch.layers_done = layer + 1
        self._driver.notify()

    def end(self, index: int, error: str | None = None) -> None:
        """All copies of the batch have ended, on the device too; its slot may be used again."""
        batch = self._batch(index)
        if error is None:
            if batch.layers_done != self.num_layers:
                raise Misuse(f"batch {index} ended at layer {batch.layers_done}")
        else:
            batch.error = error
            _remember(self._failures, index, error)
        batch.ended = True
        self._driver.notify()

    # -- consumer -----------------------------------------------------------------------

    def set_readable(self, indices: Iterable[int]) -> None:
        """The batches whose pages a reader may come upon: consumers of any batch wait for all of these."""
        self._readable = tuple(indices)

    def set_consumer(self, *indices: int) -> None:
        """The batches that reads from now on belong to; a negative index means none."""
        given = [index for index in indices if index >= 0]
        self._consumers = tuple(sorted({*given, *self._readable})) if given else ()

    @property
    def consumer_index(self) -> int:
        """The newest batch that reads belong to, -1 for none. For engines that replay a whole forward pass as
        a CUDA graph, whose layers do not ask: they wait for the last layer themselves, if this is not -1."""
        return max(self._consumers, default=-1)

    def wait_until(self, layer: int) -> None:
        """Return when `layer` may be read for every consumer batch.

        Raises LoadFailed if a batch failed or did not come so far within `timeout_s`; the latter stays known
        (`gave_up`), whatever becomes of the batch. The wait may be repeated.
        """
        for index in self._consumers:
            self._wait_one(index, layer)

    def error(self, index: int) -> str | None:
        """The reason why batch `index` failed, or None."""
        return self._failures.get(index)

    def gave_up(self, index: int) -> str | None:
        """The wait for batch `index` that reached its deadline, in words; None if none did. It stays after
        the batch has ended well: the results computed behind that wait must not be kept, inserted or stored."""
        return self._given_up.get(index)

    def reset(self) -> None:
        """Forget consumers, old failures and waits. Batches under way keep their slots until they end."""
        self._consumers = self._readable = ()
        self._failures.clear()
        self._given_up.clear()

    def view(self, layers: Sequence[int]) -> GateView:
        """The gate as a pool sees it whose layer i is the model's `layers[i]`."""
        return GateView(self, layers)

    def _wait_one(self, index: int, layer: int) -> None:
        batch = self._slots[index % self.num_slots]
        if batch is None or batch.index != index:  # its slot is in use again: its copies ended, well or not
            self._raise_if_failed(index)
            return
        ready = batch.error is not None or batch.layers_done > layer
        if not ready and not self._driver.wait_for(
            lambda: batch.error is not None or batch.layers_done > layer, self.timeout_s
        ):
            text = f"layer {layer} did not arrive within {self.timeout_s} s"
            _remember(self._given_up, index, text)
            raise LoadFailed(f"load {index}: {text}")
        if batch.error is not None:
            raise LoadFailed(f"load {index}: {batch.error}")
        event = batch.events[layer]
        if event is not None:
            self._wait_event(event)

    def _raise_if_failed(self, index: int) -> None:
        error = self._failures.get(index)
        if error is not None:
            raise LoadFailed(f"load {index}: {error}")

    def _batch(self, index: int) -> _BatchProgress:
        batch = self._slots[index % self.num_slots]
        if batch is None or batch.index != index:
            raise Misuse(f"batch {index} does not own its slot")
        if batch.ended:
            raise Misuse(f"batch {index} has ended")
        return batch

    def _is_free(self, slot: int) -> bool:
        batch = self._slots[slot]
        return batch is None or batch.ended


def _remember(texts: OrderedDict[int, str], index: int, text: str) -> None:
    texts[index] = text
    while len(texts) > MAX_REMEMBERED_FAILURES:
        texts.popitem(last=False)


class GateView:
    """The gate for a pool that has some of the model's layers."""

    def __init__(self, gate: LayerDoneCounter, layers: Sequence[int]):
        self._gate = gate
        self._layers = tuple(layers)

    def wait_until(self, layer: int) -> None:
        """Wait for the pool's own layer number `layer`, with the rules of `LayerDoneCounter.wait_until`."""
        self._gate.wait_until(self._layers[layer])
