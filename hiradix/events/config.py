"""`--kv-events-config`: SGLang's keys and defaults, and where a publisher listens."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hiradix.config_files import load_mapping
from hiradix.errors import ConfigError
from hiradix.settings import MAX_PORT, require_bool, require_choice, require_int

FLAG = "--kv-events-config"
PUBLISHERS = ("null", "zmq")
FORMATS = ("default", "dynamo")
ENCODINGS = ("map", "array")
WILDCARDS = ("*", "0.0.0.0", "[::]", "::")
MOST = (1 << 31) - 3  # ZeroMQ counts messages in 32 bits, and a replay has two more
_TCP = re.compile(r"tcp://(?P<host>\[[^\]]+\]|[^:/\s]+):(?P<port>\d{1,5})\Z")


@dataclass(frozen=True)
class KVEventsConfig:
    """Settings of the KV event publisher: where it publishes, in which format. Raises ConfigError naming the
    key.

    endpoint: of the PUB socket, `tcp://HOST:PORT` (port 0: any free one) or `ipc://PATH`. Host `*` is the
        address the HTTP server listens on, and every address where there is none.
    bind: bind or connect it; None binds wildcards and ipc, and connects to another host.
    replay_endpoint: of the ROUTER socket that sends again what a subscriber has missed, of the last
        `buffer_steps` messages.
    hwm: messages for a subscriber that is too slow before it loses some.
    max_queue_size: steps that may wait to be sent; with more, everything is sent anew when there is room.
    format: `dynamo` names blocks by adapter and tenant too. encoding: `array` is what SGLang before 0.5.10
        sends.
    """

    publisher: str = "null"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    bind: bool | None = None
    format: str = "default"
    encoding: str = "map"

    def __post_init__(self) -> None:
        require_choice(_name("publisher"), self.publisher, PUBLISHERS)
        require_choice(_name("format"), self.format, FORMATS)
        require_choice(_name("encoding"), self.encoding, ENCODINGS)
        _require_endpoint("endpoint", self.endpoint)
        if self.replay_endpoint is not None:
            _require_endpoint("replay_endpoint", self.replay_endpoint)
        for key in ("buffer_steps", "hwm", "max_queue_size"):
            require_int(_name(key), getattr(self, key), 1, MOST)
        if not isinstance(self.topic, str):
            raise ConfigError(f"{_name('topic')} must be text, got {type(self.topic).__name__}")
        if any("\ud800" <= letter <= "\udfff" for letter in self.topic):
            raise ConfigError(f"{_name('topic')} has half a surrogate pair, which cannot be sent")
        if self.bind is not None:
            require_bool(_name("bind"), self.bind)

    @property
    def is_on(self) -> bool:
        return self.publisher != "null"


def parse_kv_events_config(text: str | None) -> KVEventsConfig:
    """`text` is JSON, `@path` to a .json, .toml or .yaml file, or nothing: no events."""
    return read_kv_events_config(load_mapping(FLAG, text))


def read_kv_events_config(values: Mapping[str, Any]) -> KVEventsConfig:
    """The same from the object itself; none of its keys is no events."""
    known = {entry.name for entry in dataclasses.fields(KVEventsConfig)}
    if unknown := sorted(set(values) - known):
        raise ConfigError(f"{_name(unknown[0])}: unknown key, expected one of {', '.join(sorted(known))}")
    return KVEventsConfig(**values)


def split_tcp(endpoint: str) -> tuple[str, int] | None:
    """Host and port of a `tcp://` endpoint, None of another."""
    match = _TCP.match(endpoint)
    return (match["host"], int(match["port"])) if match else None


def _require_endpoint(key: str, value: object) -> None:
    if isinstance(value, str):
        tcp = split_tcp(value)
        if tcp is not None and tcp[1] <= MAX_PORT:
            return
        if value.startswith("ipc://") and value != "ipc://":
            return
    raise ConfigError(f"{_name(key)}: expected tcp://HOST:PORT or ipc://PATH, got {value!r}")


def _name(key: str) -> str:
    return f"{FLAG}: {key}"
