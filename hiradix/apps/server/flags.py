"""From command-line arguments to one frozen `ServeConfig`. No torch here: a bad flag fails at once."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from hiradix.apps.engine.api import EngineConfig
from hiradix.apps.engine.smollm2 import MODEL_NAME, smollm2_path
from hiradix.apps.server.flag_table import FLAGS, MAX_DIST_TIMEOUT_S, Flag, setting_of_flag
from hiradix.apps.server.key_files import choose_key, read_tenants
from hiradix.browsers import Allowed, allowed
from hiradix.config import (
    DEFAULT_PAGE_SIZE,
    EXTRA_CONFIG_FLAG,
    REQUIRED_KEY,
    ExtraConfig,
    HiCacheConfig,
    load_mapping,
    normalise,
    of_device_alone,
    parse_extra_config,
    without_host_tier,
)
from hiradix.errors import ConfigError
from hiradix.events import KVEventsConfig, parse_kv_events_config
from hiradix.policy.eviction import make_order
from hiradix.settings import NUMBERS, REQUIRED, Type, fields_of, settings_of
from hiradix.storage import StoreSettings, load_storage_backend
from hiradix.storage.attach.rules import ATTACHABLE, AttachRules, parse_prepared, parse_rule
from hiradix.storage.backends.disk import config as disk_config
from hiradix.storage.backends.file import config as file_config

_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*\Z")
API_KEYS = "--api-keys"
OWN_LABELS = frozenset({"le", "finish_reason", "cache_source", "kind", "reason", "figure"})
"""By which metrics tell their values apart: a label of that name for all of them would be lost or refused."""


@dataclass(frozen=True)
class ServeConfig:
    """Everything `hiradix serve` starts from. `notes` are the lines start-up prints (defaults and rewrites).

    Keys are in no repr. tenants: by key, as the file at `api_keys_path` has them. `extra_config_text` is
    what the flag said, kept for the admin view. `tp_size` ranks wait for each other for at most
    `rank_timeout_s`.
    """

    engine: EngineConfig
    model_name: str
    host: str = setting_of_flag("--host").default
    port: int = setting_of_flag("--port").default
    log_level: str = setting_of_flag("--log-level").default
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


def _add(parser: argparse.ArgumentParser, flag: Flag) -> None:
    if flag.status == "refused":
        parser.add_argument(flag.name, action=_Refuse, nargs="?", metavar=flag.note, help=argparse.SUPPRESS)
        return
    one, names, note = flag.setting, (flag.name, *flag.aliases), flag.note.replace("%", "%%")
    if one.type is Type.BOOL:
        parser.add_argument(*names, action="store_true", dest=one.name, help=note)
        return
    if one.type is Type.LIST:
        parser.add_argument(
            *names, dest=one.name, type=flag.parse, action="append", default=[], metavar=one.metavar,
            help=note,
        )  # fmt: skip
        return
    default = flag.default
    shown = one.default_text or ("" if default is None else str(default))
    parser.add_argument(
        *names,
        dest=one.name,
        type=flag.parse,
        default=default,
        choices=one.choices or None,
        required=one.default is REQUIRED,
        metavar=None if one.choices else one.metavar or one.name.rsplit("_", 1)[-1].upper(),
        help=f"{note} (default: {shown})" if shown else note,
    )


def make_parser() -> argparse.ArgumentParser:
    """The parser of `hiradix serve`; on a bad argument it raises ConfigError instead of exiting."""
    parser = _Parser(prog="hiradix serve", description="Serve a model over HTTP.", allow_abbrev=False)
    for flag in FLAGS:
        _add(parser, flag)
    return parser


PATH_KEYS = {"disk": disk_config.PATH_KEY, "file": file_config.PATH_KEY}
"""Which key of a backend `--file-storage-path` stands for."""


def parse_serve_args(arguments: Sequence[str]) -> ServeConfig:
    """The configuration of `arguments`; raises ConfigError with one line that names the flag."""
    args = make_parser().parse_args(list(arguments))
    _check_numbers(args)
    name = args.served_model_name or args.model_path
    cache, notes = _cache_config(args, name)
    if not cache.enable_hierarchical_cache:
        notes += without_host_tier(_host_flags(arguments))
    api_key, more = choose_key("--api-key", args.api_key, args.api_key_file, os.environ)
    admin_key, and_more = choose_key(
        "--admin-api-key", args.admin_api_key, args.admin_api_key_file, os.environ
    )
    tenants, of_file = tenants_of(args.api_keys, api_key, admin_key)
    notes += more + and_more + of_file
    if api_key is None and not tenants and args.host not in ("127.0.0.1", "localhost", "::1"):
        notes += (
            f"--host {args.host} without --api-key: anyone who can reach this address can use the server",
        )
    return ServeConfig(
        engine=_engine_config(args, cache, name),
        model_name=name,
        host=args.host,
        port=args.port,
        log_level=args.log_level,
        shutdown_timeout_s=args.shutdown_timeout,
        keep_alive_s=args.keep_alive_timeout,
        pages=allowed(args.host, args.allowed_hosts, args.allowed_origins),
        record_trace=None if args.record_trace is None else Path(args.record_trace).expanduser(),
        api_key=api_key,
        admin_api_key=admin_key,
        tenants=tenants,
        api_keys_path=args.api_keys,
        needs_salt=args.require_cache_salt,
        other_names=() if args.served_model_name else _other_names(args.model_path),
        tool_parser=args.tool_call_parser,
        extra_config_text=args.hicache_storage_backend_extra_config,
        metric_labels=_metric_labels(args.extra_metric_labels),
        notes=notes,
        tp_size=args.tp_size,
        rank_timeout_s=args.dist_timeout,
        kv_events=parse_kv_events_config(args.kv_events_config),
        attach=_attach_rules(args),
    )


def _check_numbers(args: argparse.Namespace) -> None:
    if not 0 < args.dist_timeout <= MAX_DIST_TIMEOUT_S:
        raise ConfigError(
            f"--dist-timeout must be above 0 and at most {MAX_DIST_TIMEOUT_S:g}, got {args.dist_timeout}"
        )
    ratio = args.swa_full_tokens_ratio
    if ratio is not None and not 0 < ratio <= 1:
        raise ConfigError(f"--swa-full-tokens-ratio must be in (0, 1], got {ratio}")
    if args.chunked_prefill_size == -1:
        args.chunked_prefill_size = None
    for flag in FLAGS:
        if flag.setting.type in NUMBERS and flag.status == "implemented":
            value = getattr(args, flag.setting.name)
            if value is not None:
                flag.setting.check(flag.name, value)


def _attach_rules(args: argparse.Namespace) -> AttachRules:
    prepared = {}
    for text in args.attachable:
        name, is_pair, value = text.partition("=")
        if not is_pair:
            raise ConfigError(f"{ATTACHABLE} {name:.64}: expected NAME=JSON or NAME=@FILE")
        if name in prepared:
            raise ConfigError(f"{ATTACHABLE} {name}: is given twice")
        prepared[name] = parse_prepared(ATTACHABLE, name, value)
    return AttachRules(prepared, tuple(map(parse_rule, args.attach_allow)))


def tenants_of(
    path: str | None, api_key: str | None, admin_key: str | None
) -> tuple[dict[str, str | None], tuple[str, ...]]:
    """Tenants by key of the file, if there is one, and notes. Raises ConfigError naming the flag."""
    if path is None:
        return {}, ()
    found, notes = read_tenants(API_KEYS, path)
    for flag, key in (("--api-key", api_key), ("--admin-api-key", admin_key)):
        if key in found:
            raise ConfigError(f"{API_KEYS} {path}: one of its keys is that of {flag}")
    return found, notes


def _metric_labels(text: str | None) -> dict[str, str]:
    labels = load_mapping("--extra-metric-labels", text)
    for name, value in labels.items():
        if not _LABEL.match(name) or name.startswith("__") or not isinstance(value, str):
            raise ConfigError(f"--extra-metric-labels: {name!r} must be a label name with a text value")
        if name in OWN_LABELS:
            raise ConfigError(f"--extra-metric-labels: {name!r} is a label of the metrics themselves")
    return labels


def _page_size(args: argparse.Namespace) -> tuple[int, tuple[str, ...]]:
    if args.page_size is not None:
        return args.page_size, ()
    if not args.enable_hierarchical_cache:
        return 1, ()
    note = f"--page-size not given: using {DEFAULT_PAGE_SIZE} with the hierarchical cache"
    return DEFAULT_PAGE_SIZE, (note,)


def _storage_config(args: argparse.Namespace) -> ExtraConfig:
    extra = parse_extra_config(args.hicache_storage_backend_extra_config)
    if args.hicache_storage_backend is not None:
        load_storage_backend(args.hicache_storage_backend)
    if args.hicache_storage_required:
        if extra.hicache_storage_required is False:
            raise ConfigError(f"--hicache-storage-required, but {EXTRA_CONFIG_FLAG}: {REQUIRED_KEY} is false")
        extra = dataclasses.replace(extra, hicache_storage_required=True)
    if args.file_storage_path is None:
        return extra
    key = PATH_KEYS.get(args.hicache_storage_backend or "file")
    if key is None:
        raise ConfigError(f"--file-storage-path is for --hicache-storage-backend {' or '.join(PATH_KEYS)}")
    return extra.with_backend(**{key: args.file_storage_path})


def _cache_config(args: argparse.Namespace, name: str) -> tuple[HiCacheConfig, tuple[str, ...]]:
    page_size, notes = _page_size(args)
    given = {one.name: getattr(args, one.name) for one in settings_of(HiCacheConfig)}
    given |= {
        "page_size": page_size,
        "hicache_no_regret": args.hicache_no_regret == "on",
        "hicache_storage_backend_extra_config": _storage_config(args),
        "radix_eviction_policy_config": load_mapping(
            "--radix-eviction-policy-config", args.radix_eviction_policy_config
        ),
        "served_model_name": name,
    }
    config = HiCacheConfig(**given)
    _check_names(config)
    if not config.enable_hierarchical_cache:
        return of_device_alone(config), notes  # `parse_serve_args` says what was given for nothing
    config, warnings = normalise(config)
    return config, notes + warnings


def _host_flags(arguments: Sequence[str]) -> list[str]:
    """The flags of the host tier and below among `arguments`."""
    given = {argument.partition("=")[0] for argument in arguments}
    below = ("--hicache-", "--file-storage-path", "--disable-hicache-")
    return [flag.name for flag in FLAGS if flag.name.startswith(below) and flag.name in given]


def _check_names(config: HiCacheConfig) -> None:
    """The eviction policy exists; it, storage's guard and its wrappers take their settings. Before a model is
    loaded."""
    make_order(config.radix_eviction_policy, config.radix_eviction_policy_config)
    if config.hicache_storage_backend is not None:
        StoreSettings.read(config.hicache_storage_backend_extra_config.backend)


def _other_names(model_path: str) -> tuple[str, ...]:
    """By which a model without a served name is known beside its path: its folder's name."""
    name = Path(model_path).expanduser().resolve().name
    return (name,) if name and name != model_path else ()


def _model_path(text: str) -> str:
    path = Path(text).expanduser()
    if text == MODEL_NAME and not path.is_dir():
        return str(smollm2_path())
    if not path.is_dir():
        raise ConfigError(
            f"--model-path: {text} is not a directory, and not {MODEL_NAME}, which is known by name"
        )
    if not (path / "config.json").is_file():
        raise ConfigError(f"--model-path: {text} has no config.json, it is not a transformers checkpoint")
    return str(path)


def _engine_config(args: argparse.Namespace, cache: HiCacheConfig, name: str) -> EngineConfig:
    given = {field: getattr(args, one.name) for field, one in fields_of(EngineConfig)}
    return EngineConfig(**given | {"model_path": _model_path(args.model_path)}, cache=cache, model_name=name)
