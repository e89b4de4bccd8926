"""torch.cuda of a machine with several devices, as far as streams need it; nothing runs before it must.

As in CUDA, the current device and the current streams belong to the thread, and a new thread is on device 0.
As in torch, a stream that is made current takes its device along, and the stream before it brings its own
back. used: devices that a thread made current, which each cost a context there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class FakeStream:
    def __init__(self, device: int, cuda_stream: int) -> None:
        self.device = device
        self.cuda_stream = cuda_stream
        self._work: list[Callable[[], None]] = []
        self._num_run = 0

    def launch(self, work: Callable[[], None]) -> None:
        self._work.append(work)

    def wait_event(self, event: FakeEvent) -> None:
        at = event.at  # of an event that is not recorded there is nothing to wait for
        if at is not None:
            self.launch(lambda: at[0].run(at[1]))

    def wait_stream(self, stream: FakeStream) -> None:
        event = FakeEvent()
        event.record(stream)
        self.wait_event(event)

    def run(self, count: int | None = None) -> None:
        while self._num_run < (len(self._work) if count is None else count):
            self._num_run += 1
            self._work[self._num_run - 1]()

    def synchronize(self) -> None:
        self.run()

    @property
    def mark(self) -> tuple[FakeStream, int]:
        return self, len(self._work)


class FakeEvent:
    def __init__(self, blocking: bool = False) -> None:
        self.blocking = blocking
        self.at: tuple[FakeStream, int] | None = None

    def record(self, stream: FakeStream) -> None:
        self.at = stream.mark

    def synchronize(self) -> None:
        assert self.at is not None, "synchronize with an event that is not recorded"
        self.at[0].run(self.at[1])


class FakeCuda:
    Event = FakeEvent

    def __init__(self) -> None:
        self._local = threading.local()
        self._streams: list[FakeStream] = []

    # -- of the calling thread ----------------------------------------------------------

    @property
    def used(self) -> set[int]:
        return self._of_thread("used", set)

    def _of_thread(self, name: str, make: Callable[[], Any]) -> Any:
        if not hasattr(self._local, name):
            setattr(self._local, name, make())
        return getattr(self._local, name)

    def current_device(self) -> int:
        return int(self._of_thread("device", int))

    def set_device(self, index: int) -> None:
        self._local.device = index
        self.used.add(index)

    def current_stream(self, device: Any = None) -> FakeStream:
        streams: dict[int, FakeStream] = self._of_thread("streams", dict)
        index = self._index(device)
        if index not in streams:
            streams[index] = self._made(index, 0)
        return streams[index]

    def set_stream(self, stream: FakeStream) -> None:
        self.current_stream(stream.device)
        self._local.streams[stream.device] = stream
        if self.current_device() != stream.device:
            self.set_device(stream.device)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, index = self.current_device(), self._index(device)
        if index != before:
            self.set_device(index)
        yield
        self._local.device = before  # makes no context where there is none

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, there = self.current_stream(), self.current_stream(stream.device)
        self.set_stream(stream)
        yield
        if before.device != stream.device:
            self.set_stream(there)
        self.set_stream(before)

    def Stream(self, device: Any = None) -> FakeStream:
        return self._made(self._index(device), 1 + len(self._streams))

    def _made(self, device: int, cuda_stream: int) -> FakeStream:
        self._streams.append(FakeStream(device, cuda_stream))
        return self._streams[-1]

    def synchronize(self, device: Any = None) -> None:
        """All that any thread has launched on the device is run."""
        for stream in self._streams:
            if stream.device == self._index(device):
                stream.run()

    def _index(self, device: Any) -> int:
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return self.current_device() if index is None else index
