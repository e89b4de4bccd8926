"""Keys of the `nixl` backend, its agent, and batches of transfers between memory and files or objects."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from nixl._api import nixl_agent, nixl_agent_config

from hiradix.errors import ConfigError
from hiradix.storage.options import Options, flag
from hiradix.storage.registered import RegisteredMemory

FILE_PLUGINS = ("POSIX", "GDS", "GDS_MT")
PLUGINS = (*FILE_PLUGINS, "OBJ")
POSIX_ENGINES = ("use_uring", "use_aio", "use_posix_aio")
QUICK_POLLS = 20
LONGEST_NAP_S = 0.0005
_agents = itertools.count()


@dataclass(frozen=True)
class NixlConfig:
    """Who moves the bytes, and how.

    plugin_options: the plugin's own parameters. buffer_bytes: registered memory of each call, for what is not
    in the host pool. zero_copy: calls run on the caller's thread with its pages. rest: the store's keys.
    """

    plugin: str
    plugin_options: Mapping[str, str]
    buffer_bytes: int
    zero_copy: bool
    rest: Mapping[str, Any]

    @staticmethod
    def from_mapping(values: Mapping[str, Any]) -> NixlConfig:
        """Reads its own keys, raising ConfigError; `rest` has the others."""
        options = Options(values)
        plugin = options.choice("plugin", PLUGINS[0], PLUGINS)
        more = values.get("plugin_options") or {}
        if not isinstance(more, Mapping) or not all(isinstance(v, str) for v in more.values()):
            raise ConfigError(f"{flag('plugin_options')} must be an object of texts, got {more!r}")
        own = ("plugin", "plugin_options", "buffer_size", "zero_copy")
        return NixlConfig(
            plugin=plugin,
            plugin_options=dict(more),
            buffer_bytes=options.size("buffer_size", 16 << 20),
            zero_copy=options.boolean("zero_copy", plugin in FILE_PLUGINS),
            rest={key: value for key, value in values.items() if key not in own},
        )


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
        self._segment = "FILE" if config.plugin in FILE_PLUGINS else "OBJ"
        self._agent = self._made(config, {**parameters, **config.plugin_options})
        self.memory = RegisteredMemory(config.buffer_bytes, self._register)

    def run(self, write: bool, transfers: Sequence[Transfer]) -> None:
        """Move all pages. Raises OSError when one of them failed: the library does not say which."""
        if not transfers:
            return
        whole = [(0, one.num_bytes, one.device, one.name) for one in transfers]
        near = [(address, length, 0) for one in transfers for _, address, length in one.pieces]
        far = [(offset, length, one.device) for one in transfers for offset, _, length in one.pieces]
        with _os_errors(), self._registered(whole):
            self._move("WRITE" if write else "READ", near, far)

    def close(self) -> None:
        """Let go of the agent. Not while transfers run."""
        with self._lock:
            self._agent = None

    # -- inside -------------------------------------------------------------------------

    def _made(self, config: NixlConfig, parameters: Mapping[str, str]) -> Any:
        choices: list[Mapping[str, str]] = [parameters]
        if config.plugin == "POSIX" and not set(POSIX_ENGINES) & set(parameters):
            choices = [{**parameters, engine: "true"} for engine in POSIX_ENGINES]
        fault: Exception | None = None
        for choice in choices:
            try:
                agent = nixl_agent(self._name, nixl_agent_config(backends=[]))
                agent.create_backend(config.plugin, dict(choice))
                return agent
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

    def _move(self, what: str, near: list[tuple[int, int, int]], far: list[tuple[int, int, int]]) -> None:
        agent = self._agent
        with self._lock:
            inside, outside = agent.get_xfer_descs(near, "DRAM"), agent.get_xfer_descs(far, self._segment)
            handle = agent.initialize_xfer(what, inside, outside, self._name)
        try:
            with self._lock:
                state = agent.transfer(handle)
            num_polls, nap_s = 0, LONGEST_NAP_S / 16
            while state == "PROC":
                num_polls += 1
                if num_polls > QUICK_POLLS:
                    time.sleep(nap_s)
                    nap_s = min(2 * nap_s, LONGEST_NAP_S)
                with self._lock:
                    state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise OSError(f"nixl: a transfer ended in state {state}")
        finally:
            with self._lock:
                agent.release_xfer_handle(handle)


@contextmanager
def _os_errors() -> Iterator[None]:
    """The library's exceptions, which have no common base, as OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"nixl: {type(error).__name__}: {error}") from error
