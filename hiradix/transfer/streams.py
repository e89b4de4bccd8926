"""Order on the device: what a copy waits for, and when it has ended. Nothing to do on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from hiradix.transfer.jobs import JobKind


class Streams:
    """One copy stream per direction. `mark` is called on the scheduler thread, the rest on a worker.

    These are for pools on a CPU, where a copy has ended when its call returns.
    """

    def mark(self) -> object:
        """An event after everything the calling thread has given to its current stream."""
        return None

    def copying(self, kind: JobKind, after: object) -> AbstractContextManager[None]:
        """Run the body on the direction's stream, ordered behind `after`."""
        return nullcontext()

    def record(self, kind: JobKind) -> object:
        """An event after all copies launched so far."""
        return None

    def drain(self, kind: JobKind) -> None:
        """Return when all launched copies have ended."""

    def wait_event(self, event: Any) -> None:
        """Order the calling thread's current stream behind `event`."""


class CudaStreams(Streams):
    """CUDA: copies run on a stream per direction, behind the compute stream's work at submission.

    device: without an index, the one that is current here. Each thread has a current device of its own, which
    is the first one in a new thread: `cuda` would be another device there.
    """

    def __init__(self, device: Any):
        import torch

        self._cuda: Any = torch.cuda
        named = torch.device(device)
        index = self._cuda.current_device() if named.index is None else named.index
        self._device = torch.device(named.type, index)
        self._streams = {kind: self._cuda.Stream(self._device) for kind in (JobKind.WRITE, JobKind.LOAD)}

    def mark(self) -> object:
        """An event after everything the calling thread has given to its current stream."""
        event = self._cuda.Event()
        event.record(self._cuda.current_stream(self._device))
        return event

    @contextmanager
    def copying(self, kind: JobKind, after: object) -> Iterator[None]:
        """Run the body on the direction's stream, ordered behind `after`."""
        stream = self._streams[kind]
        with self._cuda.device(self._device), self._cuda.stream(stream):
            if after is not None:
                stream.wait_event(after)
            yield

    def record(self, kind: JobKind) -> object:
        """An event after all copies launched so far."""
        event = self._cuda.Event()
        event.record(self._streams[kind])
        return event

    def drain(self, kind: JobKind) -> None:
        """Return when all launched copies have ended; the thread sleeps, it does not spin."""
        event = self._cuda.Event(blocking=True)
        event.record(self._streams[kind])
        event.synchronize()

    def wait_event(self, event: Any) -> None:
        """Order the calling thread's current stream behind `event`."""
        self._cuda.current_stream(self._device).wait_event(event)


def make_streams(device: Any) -> Streams:
    """Streams for a pool on `device` (a torch device or its name)."""
    return CudaStreams(device) if str(device).startswith("cuda") else Streams()
