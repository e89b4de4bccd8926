"""Every flag of `hiradix serve` as data: the parser, `docs/flags.md` and the tests read this table only.

The settings of engine and cache stand where these are configured, those of the server itself here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hiradix.apps.engine.api import EngineConfig
from hiradix.apps.server.tools import FORMATS
from hiradix.config import RANK_TIMEOUT_S, REQUIRED_KEY, HiCacheConfig
from hiradix.intents.limits import IntentLimits
from hiradix.settings import (
    MAX_PORT,
    REQUIRED,
    Setting,
    Type,
    setting_of,
    settings_of,
    shown_default,
    shown_values,
)
from hiradix.sources import CONFIG

Status = Literal["implemented", "accepted", "refused"]
MAX_SHUTDOWN_TIMEOUT_S = 3600.0
MAX_KEEP_ALIVE_S = 86400.0
MAX_DIST_TIMEOUT_S = 86400.0


@dataclass(frozen=True)
class Flag:
    """One command-line flag. One of a bool is a switch, one of a list may be repeated.

    `accepted` takes the flag, and its text says why nothing changes; `refused` stops the start with the text
    as the reason.
    """

    setting: Setting
    status: Status = "implemented"

    @property
    def name(self) -> str:
        return self.setting.flag

    @property
    def aliases(self) -> tuple[str, ...]:
        return tuple("--" + alias.replace("_", "-") for alias in self.setting.aliases)

    @property
    def note(self) -> str:
        return self.setting.text

    @property
    def default(self) -> Any:
        """The value where nobody says one; None where that is found out later."""
        one = self.setting
        unknown = one.default_text or one.default == "" or one.default is REQUIRED or callable(one.default)
        return None if unknown else one.default


def _flag(name: str, type: Type, default: Any, text: str, **more: Any) -> Flag:
    return Flag(Setting(name, type, default, text, **more))


def _accepted(name: str, text: str) -> Flag:
    return Flag(Setting(name, Type.BOOL, False, text), "accepted")


def _refused(name: str, reason: str, value: bool = False) -> Flag:
    return Flag(Setting(name, Type.TEXT if value else Type.BOOL, None, reason), "refused")


_SERVER: tuple[Flag, ...] = (
    Flag(CONFIG),
    Flag(setting_of(EngineConfig, "model_path")),
    Flag(setting_of(HiCacheConfig, "served_model_name")),
    _flag("host", Type.TEXT, "127.0.0.1",
          "Address to listen on; the default is reachable from this machine only.", metavar="ADDRESS"),
    _flag("port", Type.INTEGER, 30000, "TCP port; 0 takes a free one and the start-up line names it.",
          maximum=MAX_PORT),
    _flag("api_key", Type.SECRET, None,
          "Bearer key that every request needs, but /health, /ready and /metrics.",
          metavar="KEY"),
    _flag("admin_api_key", Type.SECRET, None,
          "Bearer key for the admin endpoints; without it runtime attach, detach and clearing storage are "
          "off.",
          metavar="KEY"),
    _flag("api_key_file", Type.FILE, None, "File with the api key; or the variable HIRADIX_API_KEY.",
          metavar="FILE"),
    _flag("admin_api_key_file", Type.FILE, None,
          "File with the admin key; or the variable HIRADIX_ADMIN_API_KEY.", metavar="FILE"),
    _flag("api_keys", Type.FILE, None,
          "File of keys, each with a tenant: lines of both, or a JSON object of tenants by key. Tenants "
          "share no page; SIGHUP reads it again.", metavar="FILE"),
    _flag("require_cache_salt", Type.BOOL, False,
          "Requests without cache_salt are refused, but those of a tenant's key."),
    _flag("attachable", Type.STORES, dict,
          "Prepared configuration that PUT /hicache/storage-backend attaches by its NAME: a JSON object, or "
          "@path to a .json, .toml or .yaml file, with `backend` and that backend's keys. May be repeated; "
          "elsewhere an object of these by name.",
          metavar="NAME=JSON|@FILE"),
    _flag("attach_allow", Type.LIST, (),
          "What else may be attached over HTTP: backend=NAME[,path=FOLDER][,host=HOST[:PORT]][,file=FILE]"
          "[,url=s3://BUCKET/PREFIX]; see docs/http-api.md. May be repeated; in a variable with ; between.",
          metavar="RULE"),
    _flag("log_level", Type.TEXT, "info", "Verbosity of the log.",
          choices=("debug", "info", "warning", "error")),
    _flag("log_format", Type.TEXT, "text", "Lines of the log: text, or a JSON object each.",
          choices=("text", "json")),
    _flag("keep_alive_timeout", Type.SECONDS, 75.0,
          "Seconds that a connection without a request is kept after an answer.",
          minimum=1, maximum=MAX_KEEP_ALIVE_S,
          metavar="SECONDS"),
    _flag("allowed_hosts", Type.TEXT, None,
          "Names, with commas between, by which requests without a key may call it, beside loopback ones. On "
          "a loopback address no others are taken, else any unless this is given; * is any.",
          metavar="NAMES"),
    _flag("allowed_origins", Type.TEXT, None,
          "Origins, with commas between, of web pages that may send requests: http://HOST:PORT.",
          metavar="ORIGINS"),
    _flag("shutdown_timeout", Type.SECONDS, 9.0,
          "Seconds from SIGTERM or SIGINT to the end of the process: running requests may finish in the "
          "first half, backups have what is left.", maximum=MAX_SHUTDOWN_TIMEOUT_S, metavar="SECONDS"),
    _flag("record_trace", Type.FILE, None,
          "New file for the shape of the traffic, for `hiradix replay` and `hiradix size`: times, lengths "
          "and salted hashes of blocks, no content; at most 256 MiB of text, compressed as FILE.gz or "
          "FILE.zst. Beside an earlier recording, numbered.", metavar="FILE"),
    _flag("tool_call_parser", Type.TEXT, None,
          "How the model writes tool calls; by default as its chat template says.",
          choices=tuple(FORMATS), default_text="by the chat template"),
    _accepted("enable_metrics", "GET /metrics is always on."),
    _flag("extra_metric_labels", Type.OBJECT, None, "JSON object of labels added to every metric.",
          metavar="JSON"),
    _accepted("enable_cache_report", "Usage details with cached tokens per tier are always on."),
)  # fmt: skip

_ENGINE: tuple[Flag, ...] = (
    *(Flag(one) for one in settings_of(EngineConfig) if one.name != "model_path"),
    _flag("tp_size", Type.INTEGER, 1,
          "Processes over which the model's heads are cut (tensor parallel, on the CPU); see docs/ranks.md.",
          minimum=1, aliases=("tensor_parallel_size", "tp")),
    _flag("dist_timeout", Type.SECONDS, RANK_TIMEOUT_S,
          "Longest wait of one rank for another; after that, or when a rank dies, the server ends.",
          maximum=MAX_DIST_TIMEOUT_S, metavar="SECONDS"),
)  # fmt: skip

_CACHE: tuple[Flag, ...] = (
    *(Flag(one) for one in settings_of(HiCacheConfig) if one.name != "served_model_name"),
    _flag(REQUIRED_KEY, Type.BOOL, False,
          "End the start, with exit status 2, when storage does not answer; without it the server starts and "
          "joins storage later. Wrong values end it either way. Extra-config key hicache_storage_required."),
    _flag("file_storage_path", Type.FOLDER, None,
          "Directory of the file or disk backend (extra-config key file_storage_path, disk_storage_path).",
          metavar="DIR"),
    _flag("kv_events_config", Type.OBJECT, None,
          "Publish which blocks are in which tier over ZeroMQ: a JSON object with SGLang's keys; see "
          "docs/kv-events.md.", metavar="JSON|@FILE"),
    _accepted("disable_hicache_numa_detect", "The process is never bound to a NUMA node."),
)  # fmt: skip

_WISHES: tuple[Flag, ...] = tuple(Flag(one) for one in settings_of(IntentLimits))

_REFUSED: tuple[Flag, ...] = (
    _refused("hicache_storage_prefetch_retry_poll_interval", "storage is asked once per request", True),
    _refused("hicache_storage_prefetch_retry_max_attempts", "storage is asked once per request", True),
    _refused("radix_cache_backend", "the cache of this server is hiradix's own; plugins are SGLang's", True),
    _refused("enable_session_radix_cache", "sessions reuse prefixes through the one radix tree"),
    _refused("enable_unified_memory", "device and host pools are separate"),
    _refused("enable_page_major_kv_layout", "the device pool is laid out by layer"),
    _refused("enable_hisparse", "sparse attention offload is not supported"),
    _refused("hisparse_config", "sparse attention offload is not supported", True),
    _refused("enable_lmcache", "it replaces this cache; use SGLang's own server for it"),
    _refused("lmcache_config_file", "it replaces this cache; use SGLang's own server for it", True),
    _refused("enable_flexkv", "it replaces this cache; use SGLang's own server for it"),
    _refused("flexkv_config_file", "it replaces this cache; use SGLang's own server for it", True),
    _refused("enable_unified_cache_external_linker", "storage is reached through the host tier"),
    _refused("unified_cache_external_linker_backend", "storage is reached through the host tier", True),
    _refused("unified_cache_external_linker_config", "storage is reached through the host tier", True),
    _refused("enable_linker_mla_dedup", "storage is reached through the host tier"),
    _refused("disaggregation_decode_enable_offload_kvcache", "this server does not split prefill and decode"),
    _refused("disaggregation_decode_enable_radix_cache", "this server does not split prefill and decode"),
    _refused("load_publish_endpoint", "load is read from /metrics", True),
)

SECTIONS: dict[str, tuple[Flag, ...]] = {
    "Server": _SERVER,
    "Engine": _ENGINE,
    "Cache": _CACHE,
    "Wishes": _WISHES,
    "Refused": _REFUSED,
}
FLAGS: tuple[Flag, ...] = tuple(flag for flags in SECTIONS.values() for flag in flags)
TABLE: tuple[Setting, ...] = tuple(flag.setting for flag in FLAGS if flag.status != "refused")
"""What can be said by a flag, in the environment and in a file."""
REFUSED: Mapping[str, str] = {flag.setting.name: flag.note for flag in FLAGS if flag.status == "refused"}
"""Settings of SGLang's that there are not, and why."""


def setting_of_flag(name: str) -> Setting:
    """The setting of the flag `name`, with its dashes."""
    (found,) = (flag.setting for flag in FLAGS if flag.name == name)
    return found


def flags_markdown() -> str:
    """The tables of `docs/flags.md`, one per section, in the order of the table above."""
    lines: list[str] = []
    header = ["| flag | variable | values | default | status | meaning |", "|---|---|---|---|---|---|"]
    for section, flags in SECTIONS.items():
        lines += [f"## {section}", "", *header, *(_row(flag) for flag in flags), ""]
    return "\n".join(lines)


def _row(flag: Flag) -> str:
    one = flag.setting
    names = ", ".join(f"`{name}`" for name in (flag.name, *flag.aliases))
    values = {Type.BOOL: "switch", Type.LIST: "text, repeated"}.get(one.type) or shown_values(one)
    variable = "" if flag.status == "refused" else f"`{one.variable}`"
    default = "" if flag.status == "refused" else "off" if one.type is Type.BOOL else shown_default(one)
    return f"| {names} | {variable} | {values} | {default} | {flag.status} | {flag.note} |".replace(
        "|@", "\\|@"
    )
