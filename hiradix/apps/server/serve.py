"""`hiradix serve`: from arguments to a listening server and back to an orderly end.

    parse flags -> take the port -> build the engine -> serve -> (signal) finish or abort -> drain -> close

Exit status: 0 after SIGTERM or SIGINT, also where something was cut off, 2 with a line on stderr when it
cannot start, 1 if the engine failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hiradix.apps.engine.api import EngineConfig
from hiradix.apps.server.flags import ServeConfig, make_parser, parse_serve_args, tenants_of
from hiradix.apps.server.logs import set_up
from hiradix.config import EXTRA_CONFIG_FLAG
from hiradix.errors import CacheError, ConfigError
from hiradix.settings import fields_of
from hiradix.sources import placed

if TYPE_CHECKING:
    import uvicorn

    from hiradix.apps.engine.engine import Engine
    from hiradix.apps.server.engine_service import EngineService

logger = logging.getLogger(__name__)

HEALTH_POLL_S = 1.0
PROGRESS_S = 5.0
UNSENT_TIMEOUT_S = 60.0  # a client that takes nothing for so long has left
REQUESTS_SHARE = 0.5  # of the time from the signal to the end, in which running requests may finish
ANSWERS_SHARE = 0.2  # of it, after their abort, in which their answers may be sent
LEAST_CLOSE_S = 0.5  # for the engine to end, however late it is
SECOND_GRACE_S = 0.5  # after a second signal aborted requests may say so for this long
HARD_END_S = 0.5  # behind the time that is given: what hangs then ends with the process
_READING_KEYS = threading.Lock()
_FIELD = re.compile(r"(?P<name>[a-z_]+)=(?P<rest>.*)", re.DOTALL)
_FLAGS = {"tp_size": "--tp-size", **{name: one.flag for name, one in fields_of(EngineConfig)}}


class _Ending:
    """The deadline for the process to end, once a signal came; a thread enforces it, whatever hangs."""

    def __init__(self) -> None:
        self.status = 0
        self._deadline_s = math.inf
        self._timer: threading.Timer | None = None

    @property
    def remaining_s(self) -> float:
        """Seconds that are left, infinite until a signal came."""
        return self._deadline_s - time.monotonic()

    def within(self, seconds: float) -> None:
        """Let it end so soon, or sooner where that was asked for before."""
        if seconds >= self.remaining_s:
            return
        self._deadline_s = time.monotonic() + seconds
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(seconds + HARD_END_S, self._end)
        self._timer.daemon = True
        self._timer.start()

    def _end(self) -> None:
        logger.warning("the time for the end is over: what still runs is cut off")
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(self.status)


class _Stopped(BaseException):
    """A signal came while the server was starting."""


def serve(arguments: Sequence[str]) -> int:
    """Run the server until a signal; the process's exit status."""
    if {"-h", "--help"} & set(arguments):
        make_parser().print_help()
        return 0
    places: Mapping[str, str] = {}
    try:
        config = parse_serve_args(arguments)
        places = config.places
        set_up(config.log_level, config.log_format)
        with _stop_on_signals():
            listener = bind(config.host, config.port)
            with contextlib.closing(listener):
                with _progress(config):
                    service = build_service(config)
                return _run(service, config, listener)
    except CacheError as error:
        line = start_up_line(error)
        if any(argument.startswith("--file-storage-path") for argument in arguments):
            line = line.replace(f"{EXTRA_CONFIG_FLAG}: file_storage_path", "--file-storage-path")
        print(f"hiradix serve: error: {placed(line, places)}", file=sys.stderr)
        return 2
    except _Stopped:
        return 0


@contextlib.contextmanager
def _progress(config: ServeConfig) -> Generator[None]:
    """Say at once what the start does, and every few seconds that it still does."""
    path = Path(config.engine.model_path)
    size = sum(file.stat().st_size for file in path.glob("*.safetensors")) / (1 << 20)
    print(f"hiradix serve: loading {config.model_name} ({size:,.0f} MiB of weights) ...", flush=True)
    begun_s, ended = time.monotonic(), threading.Event()

    def tell() -> None:
        while not ended.wait(PROGRESS_S):
            print(f"hiradix serve: still loading, {time.monotonic() - begun_s:.0f} s ...", flush=True)

    teller = threading.Thread(target=tell, name="hiradix-progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()


def start_up_line(error: CacheError) -> str:
    """One line about what stopped the start, with the flag in place of an engine's field name."""
    text = " ".join(str(error).split())
    if text.startswith("model path "):
        return "--" + text.replace(" ", "-", 1)
    match = _FIELD.match(text)
    if match and match["name"] in _FLAGS:
        return f"{_FLAGS[match['name']]} {match['rest']}"
    return text


@contextlib.contextmanager
def _stop_on_signals() -> Generator[None]:
    def stop(number: int, frame: object) -> None:
        raise _Stopped

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket on host and port that does not listen yet; ConfigError naming the flag."""
    family, kind, protocol, _, address = _resolved(host, port)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; connections have it from their listener
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNSENT_TIMEOUT_S * 1000))
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(f"--host {host} --port {port}: cannot listen: {error.strerror or error}") from error
    return listener


def _resolved(host: str, port: int) -> tuple[Any, ...]:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:  # a name whose parts are empty or too long is not encoded
        raise ConfigError(f"--host {host}: {error}") from error


def build_service(config: ServeConfig) -> EngineService:
    """A running engine; loads torch and the model. CacheError when it cannot be built."""
    for note in config.notes:
        print(f"hiradix serve: {note}", flush=True)
    from hiradix.apps.engine.async_engine import EngineThread
    from hiradix.apps.server.engine_service import EngineService
    from hiradix.apps.server.ranked_service import RankedService
    from hiradix.apps.server.recorder import TraceRecorder

    _check_device(config.engine.device)
    recorder = None if config.record_trace is None else TraceRecorder(config.record_trace)
    try:
        engine = _build_engine(config)
    except BaseException:
        if recorder is not None:
            recorder.discard()
        raise
    if recorder is not None and config.tp_size == 1:  # of several ranks each has a part of a token
        recorder.describe(engine.info().kv_bytes_per_token)
    thread = EngineThread(engine)
    thread.start()
    make = EngineService if config.tp_size == 1 else RankedService
    return make(engine, thread, recorder)


def _build_engine(config: ServeConfig) -> Engine:
    """The engine, which publishes its KV events if it is to; CacheError when it cannot be built."""
    from safetensors import SafetensorError

    from hiradix.apps.engine.ranks import build_engine

    try:
        engine = build_engine(config.engine, config.tp_size, config.rank_timeout_s)
    except (OSError, MemoryError, RuntimeError, SafetensorError) as error:  # bad weights, too large pools
        chosen = config.engine
        flags = (
            f"--model-path {chosen.model_path} --max-total-tokens {chosen.max_total_tokens} "
            f"--max-running-requests {chosen.max_running_requests}"
        )
        raise ConfigError(f"{flags}: cannot build the engine: {error}") from error
    if config.kv_events.is_on:
        try:
            engine.publish_events(config.kv_events, str(_resolved(config.host, config.port)[4][0]))
        except BaseException:
            engine.close()
            raise
    return engine


def _check_device(name: str) -> None:
    """ConfigError unless a number put on the device can be read from it."""
    import torch

    try:
        torch.ones(1, device=name).item()
    except Exception as error:  # each of torch's devices has its own way to say no
        raise ConfigError(f"--device {name}: {error}") from error


def _run(service: EngineService, config: ServeConfig, listener: socket.socket) -> int:
    ending = _Ending()
    try:
        healthy = asyncio.run(_serve(service, config, listener, ending))
    except _Stopped:
        healthy = True
    ending.status = 0 if healthy else 1
    ending.within(config.shutdown_timeout_s)  # where it was the engine that ended
    try:
        with _stop_on_signals():  # the loop took the handlers with it
            if not service.close(max(ending.remaining_s, LEAST_CLOSE_S)):
                logger.warning("the deadline passed before all transfers had ended")
    except _Stopped:
        logger.warning("stopped by a second signal before all transfers had ended")
        ending.within(0.0)
    if healthy:
        return 0
    print("hiradix serve: error: the engine failed, see the log", file=sys.stderr)
    return 1


async def _serve(
    service: EngineService, config: ServeConfig, listener: socket.socket, ending: _Ending
) -> bool:
    """Serve until a signal or the engine's end; True when it was a signal."""
    server = _make_server(service, config)
    loop = asyncio.get_running_loop()

    def leave() -> None:
        server.force_exit = True

    def stop() -> None:
        if server.should_exit:
            service.abort_all()
            loop.call_later(SECOND_GRACE_S, leave)
            ending.within(SECOND_GRACE_S + LEAST_CLOSE_S)
        else:
            server.should_exit = True
            ending.within(config.shutdown_timeout_s)
            loop.call_later(config.shutdown_timeout_s * REQUESTS_SHARE, service.abort_all)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    if config.api_keys_path is not None:
        loop.add_signal_handler(signal.SIGHUP, _read_keys_beside, server.config.app, config)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    announced = False
    while True:
        done, _ = await asyncio.wait({serving}, timeout=0.05 if not announced else HEALTH_POLL_S)
        if done:
            serving.result()
            return service.healthy
        if server.started and not announced:
            announced = True
            print(start_line(service, config, listener), flush=True)
        if not service.healthy:
            server.should_exit = server.force_exit = True


def _read_keys_beside(app: Any, config: ServeConfig) -> None:
    """`_read_keys_again` on a thread of its own: the file's disk may hang, and a pipe is waited for."""
    threading.Thread(target=_read_keys_again, args=(app, config), name="hiradix-keys", daemon=True).start()


def _read_keys_again(app: Any, config: ServeConfig) -> None:
    """Know the keys that the file of `--api-keys` has now; those there were where it has none that are
    good."""
    from hiradix.apps.server.auth import Keys

    with _READING_KEYS:  # what was read last is what counts
        try:
            tenants, notes = tenants_of(config.api_keys_path, config.api_key, config.admin_api_key)
        except ConfigError as error:
            logger.error("the keys stay as they are: %s", error)
            return
        app.state.key_ring.put_in(Keys(config.api_key, config.admin_api_key, tenants))
    for note in notes:
        logger.warning("%s", note)
    logger.warning("%s was read again: %d keys", config.api_keys_path, len(tenants))


def _make_server(service: EngineService, config: ServeConfig) -> uvicorn.Server:
    import uvicorn

    from hiradix.apps.server import audit
    from hiradix.apps.server.app import AppSettings, create_app
    from hiradix.apps.server.auth import Keys
    from hiradix.apps.server.connection import http_settings
    from hiradix.apps.server.refusals import Sparing

    class Server(uvicorn.Server):
        """uvicorn with our own signal handling: it must not raise the signal again after a clean end."""

        @contextlib.contextmanager
        def capture_signals(self) -> Generator[None]:
            yield

    settings = AppSettings(
        model_name=config.model_name,
        cache=config.engine.cache,
        keys=Keys(config.api_key, config.admin_api_key, config.tenants),
        metric_labels=dict(config.metric_labels),
        extra_config_text=config.extra_config_text,
        attach=config.attach,
        pages=config.pages,
        needs_salt=config.needs_salt,
        other_names=config.other_names,
        tool_parser=config.tool_parser,
    )
    logging.getLogger("uvicorn.error").addFilter(Sparing())
    audit.AUDIT.setLevel(logging.INFO)
    graceful: dict[str, Any] = {  # whole seconds to uvicorn's types, not to its clock
        "timeout_graceful_shutdown": config.shutdown_timeout_s * (REQUESTS_SHARE + ANSWERS_SHARE)
    }
    return Server(
        uvicorn.Config(
            create_app(service, settings),
            log_level="warning" if config.log_level == "info" else config.log_level,
            access_log=config.log_level == "debug",
            **http_settings(config.keep_alive_s),
            **graceful,
        )
    )


def start_line(service: EngineService, config: ServeConfig, listener: socket.socket) -> str:
    """The line that says the server is ready: model, address and cache."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    cache = config.engine.cache
    parts = [f"page size {cache.page_size}", f"device pool {config.engine.max_total_tokens} tokens"]
    if config.tp_size > 1:
        parts.append(f"tensor parallel size {config.tp_size}")
    if cache.disable_radix_cache:
        parts.append("prefix cache off")
    if cache.enable_hierarchical_cache:
        parts.append("hierarchical cache on")
        parts.append(f"storage {cache.hicache_storage_backend or 'none'}")
    return f"hiradix serve: {config.model_name} ready at http://{shown}:{port} ({', '.join(parts)})"
