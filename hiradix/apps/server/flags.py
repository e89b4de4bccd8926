"""From flags, environment and file to one frozen `ServeConfig`. No torch here: a bad value fails at once."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from hiradix.adapters.vllm import settings as vllm_settings
from hiradix.apps.engine.api import EngineConfig
from hiradix.apps.engine.smollm2 import MODEL_NAME, smollm2_path
from hiradix.apps.lmcache.keys import foreign_key
from hiradix.apps.server.flag_table import FLAGS, REFUSED, SECTIONS, TABLE, Flag, setting_of_flag
from hiradix.apps.server.key_files import choose_key, read_tenants
from hiradix.browsers import Allowed, allowed
from hiradix.config import (
    DEFAULT_PAGE_SIZE,
    EXTRA_CONFIG_FLAG,
    REQUIRED_KEY,
    ExtraConfig,
    HiCacheConfig,
    normalise,
    of_device_alone,
    without_host_tier,
)
from hiradix.errors import ConfigError
from hiradix.events import KVEventsConfig, read_kv_events_config
from hiradix.intents.limits import IntentLimits
from hiradix.policy.eviction import make_order
from hiradix.settings import Setting, Type, fields_of, nearest, settings_of
from hiradix.sources import Given, Resolved, SettingSource, placed, resolve
from hiradix.storage import StoreSettings, load_storage_backend
from hiradix.storage.attach.checks import check_store
from hiradix.storage.attach.rules import AttachRules, rules_of
from hiradix.storage.backends.disk import config as disk_config
from hiradix.storage.backends.file import config as file_config

_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*\Z")
API_KEYS = "--api-keys"
EXTRA = "hicache_storage_backend_extra_config"
_REPEATED = (Type.LIST, Type.STORES)
OWN_LABELS = frozenset({"le", "finish_reason", "cache_source", "kind", "reason", "figure"})
"""By which metrics tell their values apart: a label of that name for all of them would be lost or refused."""


@dataclass(frozen=True)
class ServeConfig:
    """Everything `hiradix serve` starts from. `notes` are the lines start-up prints (defaults and rewrites).

    Keys are in no repr. tenants: by key, as the file at `api_keys_path` has them. `extra_config_text` is
    what was said, kept for the admin view. `tp_size` ranks wait for each other for at most `rank_timeout_s`.
    places: by flag, where it is said, if not on the command line.
    """

    engine: EngineConfig
    model_name: str
    host: str = setting_of_flag("--host").default
    port: int = setting_of_flag("--port").default
    log_level: str = setting_of_flag("--log-level").default
    log_format: str = setting_of_flag("--log-format").default
    shutdown_timeout_s: float = setting_of_flag("--shutdown-timeout").default
    keep_alive_s: float = setting_of_flag("--keep-alive-timeout").default
    pages: Allowed = Allowed()
    api_key: str | None = field(default=None, repr=False)
    admin_api_key: str | None = field(default=None, repr=False)
    tenants: Mapping[str, str | None] = field(default_factory=dict, repr=False)
    api_keys_path: str | None = None
    needs_salt: bool = False
    other_names: tuple[str, ...] = ()
    tool_parser: str | None = None
    extra_config_text: str | None = field(default=None, repr=False)
    metric_labels: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    tp_size: int = setting_of_flag("--tp-size").default
    rank_timeout_s: float = setting_of_flag("--dist-timeout").default
    record_trace: Path | None = None
    kv_events: KVEventsConfig = KVEventsConfig()
    attach: AttachRules = field(default_factory=AttachRules)
    places: Mapping[str, str] = field(default_factory=dict, compare=False)


class _Parser(argparse.ArgumentParser):
    """argparse that reports a bad flag as ConfigError, so that start-up has one way to say no."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


class _Refuse(argparse.Action):
    """Stops with the reason of a flag that upstream has and this server does not."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        raise ConfigError(f"{option_string} is not supported: {self.metavar}")


def _add(group: argparse._ArgumentGroup, flag: Flag) -> None:
    """Texts only, and nothing for what is not given: `resolve` knows of defaults and other sources."""
    if flag.status == "refused":
        group.add_argument(flag.name, action=_Refuse, nargs="?", metavar=flag.note, help=argparse.SUPPRESS)
        return
    one, names, note = flag.setting, (flag.name, *flag.aliases), flag.note.replace("%", "%%")
    if one.type is Type.BOOL:
        group.add_argument(*names, action="store_const", const="true", dest=one.name, help=note)
        opposite = [f"--no-{name.removeprefix('--')}" for name in names]
        hidden = argparse.SUPPRESS
        group.add_argument(*opposite, action="store_const", const="false", dest=one.name, help=hidden)
        return
    shown = one.default_text or ("" if flag.default in (None, (), {}) else str(flag.default))
    group.add_argument(
        *names,
        dest=one.name,
        action="append" if one.type in _REPEATED else "store",
        metavar=f"{{{','.join(one.choices)}}}"
        if one.choices
        else one.metavar or one.name.rsplit("_", 1)[-1].upper(),
        help=f"{note} (default: {shown})" if shown else note,
    )


def make_parser() -> argparse.ArgumentParser:
    """The parser of `hiradix serve`; on a bad argument it raises ConfigError instead of exiting."""
    parser = _Parser(
        prog="hiradix serve",
        description="Serve a model over HTTP.",
        epilog="Each flag can also be said by a variable, HIRADIX_ and its name, and in a file; --no-NAME turns "
        "a switch off that one of these turns on. `hiradix config show` tells what counts.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for section, flags in SECTIONS.items():
        group = parser.add_argument_group(section)
        for flag in flags:
            _add(group, flag)
    return parser


PATH_KEYS = {"disk": disk_config.PATH_KEY, "file": file_config.PATH_KEY}
"""Which key of a backend `--file-storage-path` stands for."""


def said_by_flags(arguments: Sequence[str]) -> dict[str, Given]:
    """The settings on the command line, by name. Raises ConfigError with one line that names the flag, and no
    value of an unknown one: it may be a key."""
    args, left = make_parser().parse_known_args(list(arguments))
    if left:
        name = left[0].partition("=")[0]
        if not name.startswith("--"):
            place = list(arguments).index(left[0]) + 1
            raise ConfigError(
                f"argument {place} belongs to no flag; the model's folder is given by --model-path"
            )
        known = (name for flag in FLAGS for name in (flag.name, *flag.aliases))
        raise ConfigError(f"{name:.80} is no flag of hiradix serve{nearest(name, known)}")
    return {one.name: _said(one, getattr(args, one.name)) for one in TABLE if hasattr(args, one.name)}


def _said(one: Setting, text: Any) -> Given:
    value: Any
    if one.type is Type.STORES:
        value = _pairs(one.flag, text)
    elif one.type is Type.LIST:
        value = text
    else:
        value = one.from_text(one.flag, text)
    return Given(
        one.check(one.flag, value), SettingSource.FLAG, one.flag, text if isinstance(text, str) else None
    )


def _pairs(flag: str, texts: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        name, is_pair, value = text.partition("=")
        if not is_pair:
            raise ConfigError(f"{flag}: expected NAME=JSON or NAME=@FILE")
        if name in found:
            raise ConfigError(f"{flag} {name:.64}: is given twice")
        found[name] = value
    return found


def resolve_serve(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Resolved:
    """All settings of the server, and who says each. Raises ConfigError for a bad flag; what is wrong
    elsewhere are its `problems`."""
    return resolve(
        TABLE,
        said_by_flags(arguments),
        os.environ if environment is None else environment,
        {one.name: "vLLM" for one in vllm_settings.own_settings()},
        lambda name: f"is not supported: {REFUSED[name]}" if name in REFUSED else foreign_key(name),
    )


def parse_serve_args(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> ServeConfig:
    """The configuration of `arguments`, the environment (the process's) and a file; raises ConfigError with
    one line that names the flag, the variable or the line of the file."""
    found = resolve_serve(arguments, environment)
    found.check()
    return serve_config(found)


def serve_config(found: Resolved) -> ServeConfig:
    """The configuration that the settings make together. Raises ConfigError."""
    try:
        return _serve_config(found)
    except ConfigError as error:
        raise ConfigError(placed(str(error), found.places)) from error


def _serve_config(found: Resolved) -> ServeConfig:
    if "model_path" not in found.given:
        raise ConfigError("--model-path is required (or HIRADIX_MODEL_PATH, or model_path in the file)")
    _check_numbers(found)
    name = found["served_model_name"] or found["model_path"]
    cache, notes = _cache_config(found, name)
    if not cache.enable_hierarchical_cache:
        notes += without_host_tier(_of_host_tier(found))
    api_key, more = choose_key(found, "api_key")
    admin_key, and_more = choose_key(found, "admin_api_key")
    tenants, of_file = tenants_of(found["api_keys"], api_key, admin_key, found.where("api_keys"))
    notes = (*found.notes, *notes, *more, *and_more, *of_file)
    host = found["host"]
    if api_key is None and not tenants and host not in ("127.0.0.1", "localhost", "::1"):
        notes += (f"--host {host} without --api-key: anyone who can reach this address can use the server",)
    record_trace = found["record_trace"]
    return ServeConfig(
        engine=_engine_config(found, cache, name),
        model_name=name,
        host=host,
        port=found["port"],
        log_level=found["log_level"],
        log_format=found["log_format"],
        shutdown_timeout_s=found["shutdown_timeout"],
        keep_alive_s=found["keep_alive_timeout"],
        pages=allowed(host, found["allowed_hosts"], found["allowed_origins"]),
        record_trace=None if record_trace is None else Path(record_trace).expanduser(),
        api_key=api_key,
        admin_api_key=admin_key,
        tenants=tenants,
        api_keys_path=found["api_keys"],
        needs_salt=found["require_cache_salt"],
        other_names=() if found["served_model_name"] else _other_names(found["model_path"]),
        tool_parser=found["tool_call_parser"],
        extra_config_text=_as_text(found, EXTRA),
        metric_labels=_metric_labels(found["extra_metric_labels"] or {}),
        notes=notes,
        tp_size=found["tp_size"],
        rank_timeout_s=found["dist_timeout"],
        kv_events=read_kv_events_config(found["kv_events_config"] or {}),
        attach=rules_of(found["attachable"], found["attach_allow"], found.where),
        places=found.places,
    )


def _as_text(found: Resolved, name: str) -> str | None:
    """An object as it was given by a flag or a variable, else as JSON."""
    given = found.given.get(name)
    if given is None or given.text is not None:
        return None if given is None else given.text
    return json.dumps(dict(given.value), default=str)


def _check_numbers(found: Resolved) -> None:
    if not found["dist_timeout"] > 0:
        raise ConfigError(f"--dist-timeout must be above 0, got {found['dist_timeout']:g}")
    ratio = found["swa_full_tokens_ratio"]
    if ratio is not None and not 0 < ratio <= 1:
        raise ConfigError(f"--swa-full-tokens-ratio must be in (0, 1], got {ratio}")


def tenants_of(
    path: str | None, api_key: str | None, admin_key: str | None, where: str = API_KEYS
) -> tuple[dict[str, str | None], tuple[str, ...]]:
    """Tenants by key of the file, if there is one, and notes. Raises ConfigError naming `where`."""
    if path is None:
        return {}, ()
    found, notes = read_tenants(where, path)
    for flag, key in (("--api-key", api_key), ("--admin-api-key", admin_key)):
        if key in found:
            raise ConfigError(f"{where} {path}: one of its keys is that of {flag}")
    return found, notes


def _metric_labels(labels: Mapping[str, Any]) -> dict[str, str]:
    for name, value in labels.items():
        if not _LABEL.match(name) or name.startswith("__") or not isinstance(value, str):
            raise ConfigError(f"--extra-metric-labels: {name!r} must be a label name with a text value")
        if name in OWN_LABELS:
            raise ConfigError(f"--extra-metric-labels: {name!r} is a label of the metrics themselves")
    return dict(labels)


def _page_size(found: Resolved) -> tuple[int, tuple[str, ...]]:
    if "page_size" in found.given:
        return found["page_size"], ()
    if not found["enable_hierarchical_cache"]:
        return 1, ()
    note = f"--page-size not given: using {DEFAULT_PAGE_SIZE} with the hierarchical cache"
    return DEFAULT_PAGE_SIZE, (note,)


def _storage_config(found: Resolved) -> ExtraConfig:
    extra = ExtraConfig.from_mapping(found[EXTRA])
    backend, path = found["hicache_storage_backend"], found["file_storage_path"]
    if backend is not None:
        load_storage_backend(backend)
    extra = _with_required(found, extra)
    if path is None:
        return extra
    key = PATH_KEYS.get(backend or "file")
    if key is None:
        raise ConfigError(f"--file-storage-path is for --hicache-storage-backend {' or '.join(PATH_KEYS)}")
    if found.source("file_storage_path") < found.source(EXTRA):
        extra = dataclasses.replace(extra, backend={**extra.backend, key: path})
    return extra.with_backend(**{key: path})


def _with_required(found: Resolved, extra: ExtraConfig) -> ExtraConfig:
    """The setting of that name and the key inside say one thing; who says it sooner counts."""
    one, inside = found.given.get(REQUIRED_KEY), extra.hicache_storage_required
    if one is None or (inside is None and not one.value) or found.source(EXTRA) < one.source:
        return extra
    if inside not in (None, one.value) and found.source(EXTRA) == one.source:
        said, other = str(one.value).lower(), str(inside).lower()
        raise ConfigError(
            f"--hicache-storage-required is {said}, but {EXTRA_CONFIG_FLAG}: {REQUIRED_KEY} is {other}"
        )
    return dataclasses.replace(extra, hicache_storage_required=one.value)


def _cache_config(found: Resolved, name: str) -> tuple[HiCacheConfig, tuple[str, ...]]:
    page_size, notes = _page_size(found)
    given = {one.name: found[one.name] for one in settings_of(HiCacheConfig)}
    given |= {
        "page_size": page_size,
        "hicache_no_regret": found["hicache_no_regret"] == "on",
        EXTRA: _storage_config(found),
        "served_model_name": name,
    }
    config = HiCacheConfig(**given)
    _check_names(config)
    if not config.enable_hierarchical_cache:
        return of_device_alone(config), notes  # the caller says what was given for nothing
    config, warnings = normalise(config)
    return config, notes + warnings


def _of_host_tier(found: Resolved) -> list[str]:
    """The places of all settings of the host tier and below that are given."""
    below = ("hicache_", "file_storage_path", "disable_hicache_")
    return [found.where(name) for name in found.table if name.startswith(below) and name in found.given]


def _check_names(config: HiCacheConfig) -> None:
    """The eviction policy exists; it, storage's guard and its wrappers take their settings. Before a model is
    loaded."""
    make_order(config.radix_eviction_policy, config.radix_eviction_policy_config)
    if config.hicache_storage_backend is not None:
        keys = config.hicache_storage_backend_extra_config.backend
        StoreSettings.read(keys)
        check_store(config.hicache_storage_backend, keys)


def _other_names(model_path: str) -> tuple[str, ...]:
    """The further names of a model without a served name, beside its path: that of its folder."""
    name = Path(model_path).expanduser().resolve().name
    return (name,) if name and name != model_path else ()


def _model_path(text: str) -> str:
    path = Path(text).expanduser()
    if text == MODEL_NAME and not path.is_dir():
        return str(smollm2_path())
    if not path.is_dir():
        raise ConfigError(f"--model-path: {text} is not a directory, and not {MODEL_NAME}, known by name")
    if not (path / "config.json").is_file():
        raise ConfigError(f"--model-path: {text} has no config.json, it is not a transformers checkpoint")
    return str(path)


def _engine_config(found: Resolved, cache: HiCacheConfig, name: str) -> EngineConfig:
    given = {field: found[one.name] for field, one in fields_of(EngineConfig)}
    return EngineConfig(
        **given | {"model_path": _model_path(found["model_path"])},
        cache=cache,
        intents=IntentLimits(**{field: found[one.name] for field, one in fields_of(IntentLimits)}),
        model_name=name,
    )
