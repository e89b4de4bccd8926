"""The agent of the `nixl` backend, and batches of transfers between memory and files or objects."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from nixl._api import nixl_agent, nixl_agent_config

from hiradix.errors import ConfigError
from hiradix.storage.backends.nixl.config import FILE_PLUGINS, NixlConfig
from hiradix.storage.kit.options import flag
from hiradix.storage.kit.registered import RegisteredMemory

ANSWER_AT_THE_END = ("use_uring", "use_aio")
POSIX_ENGINES = (*ANSWER_AT_THE_END, "use_posix_aio")
QUICK_POLLS = 20
LONGEST_NAP_S = 0.0005
UNDER_WAY, DONE, FAILED = "PROC", "DONE", "ERR"
"""The library's names of a transfer's states."""
_agents = itertools.count()
logger = logging.getLogger(__name__)
_Piece = tuple[int, tuple[int, int, int], tuple[int, int, int]]
"""Of which page; address, length and device in memory; offset, length and device outside."""


@dataclass(frozen=True)
class Transfer:
    """A page's way. device: a file descriptor, or for objects a number of one's own. name: of the object.

    pieces: of the page, each with its offset outside memory, address and length.
    """

    device: int
    num_bytes: int
    pieces: Sequence[tuple[int, int, int]]
    name: str = ""


class NixlLink:
    """An agent with one plugin, and the memory it knows. Raises ConfigError when the plugin cannot be had.

    Transfers of several threads run side by side; the agent itself is used by one thread at a time. `memory`
    raises OSError where the library does not take more.
    """

    def __init__(self, config: NixlConfig, parameters: Mapping[str, str]):
        self._name = f"hiradix-{os.getpid()}-{next(_agents)}"
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._num_runs = 0
        self._is_closed = False
        self._segment = "FILE" if config.plugin in FILE_PLUGINS else "OBJ"
        self._agent, chosen = self._made(config, {**parameters, **config.plugin_options})
        answers = [engine for engine in POSIX_ENGINES if chosen.get(engine) == "true"]
        self._is_whole = config.plugin == "POSIX" and bool(answers) and set(answers) <= set(ANSWER_AT_THE_END)
        self._is_single = config.plugin == "POSIX" and not self._is_whole
        self._turn, self._has_failed = threading.Lock(), False
        self.memory = RegisteredMemory(config.buffer_bytes, self._register)

    def run(self, write: bool, transfers: Sequence[Transfer]) -> list[bool]:
        """Move pages; flags of those that were moved. Nothing is under way when this returns.

        Each piece is a transfer of its own, but for engines known to answer at the end of all: others
        answer at the first failure, and go on writing into memory that is another page's by then (which
        `use_posix_aio` does across transfers, too: see `_move_singly`). Pages that are one transfer are moved
        all or none, as the library does not say which failed.
        """
        if not transfers:
            return []
        with self._lock:
            if self._is_closed:
                return [False] * len(transfers)
            self._num_runs += 1
        try:
            return self._run(write, transfers)
        finally:
            with self._ended:
                self._num_runs -= 1
                self._ended.notify_all()

    def close(self) -> None:
        """Let go of the agent, once what is under way has ended."""
        with self._ended:
            self._is_closed = True
            self._ended.wait_for(lambda: not self._num_runs)
            self._agent = None

    # -- inside -------------------------------------------------------------------------

    def _run(self, write: bool, transfers: Sequence[Transfer]) -> list[bool]:
        whole = [(0, one.num_bytes, one.device, one.name) for one in transfers]
        pieces = [
            (index, (address, length, 0), (offset, length, one.device))
            for index, one in enumerate(transfers)
            for offset, address, length in one.pieces
        ]
        together = [pieces] if self._is_whole else [[piece] for piece in pieces]
        try:
            with _os_errors(), self._registered(whole):
                move = self._move_singly if self._is_single else self._move
                moved = move("WRITE" if write else "READ", together)
        except OSError as error:
            logger.info("%s", error)
            moved = [False] * len(together)
        lost = {index for parts, good in zip(together, moved) if not good for index, _, _ in parts}
        return [index not in lost for index in range(len(transfers))]

    def _made(self, config: NixlConfig, parameters: Mapping[str, str]) -> tuple[Any, Mapping[str, str]]:
        """The agent, and the parameters its plugin was made with."""
        choices: list[Mapping[str, str]] = [parameters]
        if config.plugin == "POSIX" and not set(POSIX_ENGINES) & set(parameters):
            choices = [{**parameters, engine: "true"} for engine in POSIX_ENGINES]
        fault: Exception | None = None
        for choice in choices:
            try:
                agent = nixl_agent(self._name, nixl_agent_config(backends=[]))
                agent.create_backend(config.plugin, dict(choice))
                return agent, choice
            except Exception as error:  # as in `_os_errors`
                fault = error
        raise ConfigError(f"{flag('plugin')}: cannot use {config.plugin}: {type(fault).__name__}: {fault}")

    def _register(self, address: int, num_bytes: int) -> None:
        with self._lock, _os_errors():
            self._agent.register_memory([(address, num_bytes, 0, "")], "DRAM")

    @contextmanager
    def _registered(self, whole: list[tuple[int, int, int, str]]) -> Iterator[None]:
        """Files or objects are known to the library for the time of a transfer."""
        with self._lock:
            agent = self._agent
            known = agent.register_memory(whole, self._segment)
        try:
            yield
        finally:
            with self._lock:
                agent.deregister_memory(known)

    def _move_singly(self, what: str, together: Sequence[Sequence[_Piece]]) -> list[bool]:
        """`_move` one after the other, until one fails: `use_posix_aio` has one queue for all, and answers
        for later ones with that failure while they are under way. From then on nothing is moved."""
        moved: list[bool] = []
        for one in together:
            with self._turn:
                done = not self._has_failed and self._move(what, [one]) == [True]
                if not (done or self._has_failed):
                    self._has_failed = True
                    logger.warning("nixl: use_posix_aio failed once: plain calls move all pages from here on")
            moved.append(done)
        return moved

    def _move(self, what: str, together: Sequence[Sequence[_Piece]]) -> list[bool]:
        """Run the transfers `together`; flags of those that came to their end. When this returns all have
        ended or failed."""
        handles: list[Any] = []
        try:
            states = [self._begun(what, parts, handles) for parts in together]
            num_polls, nap_s = 0, LONGEST_NAP_S / 16
            while UNDER_WAY in states:
                num_polls += 1
                if num_polls > QUICK_POLLS:
                    time.sleep(nap_s)
                    nap_s = min(2 * nap_s, LONGEST_NAP_S)
                for index, state in enumerate(states):
                    if state == UNDER_WAY:
                        states[index] = self._state(self._agent.check_xfer_state, handles[index])
            return [state == DONE for state in states]
        finally:
            with self._lock:
                for handle in filter(None, handles):
                    self._agent.release_xfer_handle(handle)

    def _begun(self, what: str, parts: Sequence[_Piece], handles: list[Any]) -> str:
        """Begin a transfer, whose handle is added to `handles`: None where there is none."""
        agent, handle = self._agent, None
        try:
            with self._lock, _os_errors():
                inside = agent.get_xfer_descs([near for _, near, _ in parts], "DRAM")
                outside = agent.get_xfer_descs([far for _, _, far in parts], self._segment)
                handle = agent.initialize_xfer(what, inside, outside, self._name)
        except OSError as error:
            logger.info("%s", error)
        handles.append(handle)
        return FAILED if handle is None else self._state(agent.transfer, handle)

    def _state(self, ask: Callable[[Any], str], handle: Any) -> str:
        try:
            with self._lock, _os_errors():
                return ask(handle)
        except OSError as error:
            logger.info("%s", error)
            return FAILED


@contextmanager
def _os_errors() -> Iterator[None]:
    """The library's exceptions, which have no common base, as OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"nixl: {type(error).__name__}: {error}") from error
