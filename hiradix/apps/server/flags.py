"""From command-line arguments to one frozen `ServeConfig`. No torch here: a bad flag fails at once."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from hiradix.apps.engine.api import EngineConfig, most_of
from hiradix.apps.server.flag_table import FLAGS, Flag
from hiradix.apps.server.key_files import choose_key, read_tenants
from hiradix.browsers import Allowed, allowed
from hiradix.config import (
    DEFAULT_PAGE_SIZE,
    EXTRA_CONFIG_FLAG,
    MAX_PORT,
    RANK_TIMEOUT_S,
    REQUIRED_KEY,
    ExtraConfig,
    HiCacheConfig,
    load_mapping,
    normalise,
    of_device_alone,
    parse_extra_config,
    require_int,
    require_number,
    without_host_tier,
)
from hiradix.errors import ConfigError
from hiradix.events import KVEventsConfig, parse_kv_events_config
from hiradix.policy.eviction import make_order
from hiradix.storage import guard_limits, load_storage_backend
from hiradix.storage.attach.rules import ATTACHABLE, AttachRules, parse_prepared, parse_rule

_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*\Z")
MAX_SHUTDOWN_TIMEOUT_S = 3600.0
MAX_KEEP_ALIVE_S = 86400.0
MAX_DIST_TIMEOUT_S = 86400.0
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
    host: str = "127.0.0.1"
    port: int = 30000
    log_level: str = "info"
    shutdown_timeout_s: float = 9.0
    keep_alive_s: float = 75.0
    pages: Allowed = Allowed()
    api_key: str | None = field(default=None, repr=False)
    admin_api_key: str | None = field(default=None, repr=False)
    tenants: Mapping[str, str | None] = field(default_factory=dict, repr=False)
    api_keys_path: str | None = None
    needs_salt: bool = False
    extra_config_text: str | None = field(default=None, repr=False)
    metric_labels: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    tp_size: int = 1
    rank_timeout_s: float = RANK_TIMEOUT_S
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
    names = (flag.name, *flag.aliases)
    note = flag.note.replace("%", "%%")
    if flag.kind is None:
        parser.add_argument(*names, action="store_true", dest=flag.dest, help=note)
        return
    shown = flag.default_text or ("" if flag.default is None else str(flag.default))
    if flag.repeats:
        parser.add_argument(
            *names,
            dest=flag.dest,
            type=flag.kind,
            action="append",
            default=[],
            metavar=flag.metavar,
            help=note,
        )
        return
    parser.add_argument(
        *names,
        dest=flag.dest,
        type=flag.kind,
        default=flag.default,
        choices=flag.choices or None,
        required=flag.required,
        metavar=None if flag.choices else flag.metavar or flag.dest.rsplit("_", 1)[-1].upper(),
        help=f"{note} (default: {shown})" if shown else note,
    )


def make_parser() -> argparse.ArgumentParser:
    """The parser of `hiradix serve`; on a bad argument it raises ConfigError instead of exiting."""
    parser = _Parser(prog="hiradix serve", description="Serve a model over HTTP.", allow_abbrev=False)
    for flag in FLAGS:
        _add(parser, flag)
    return parser


PATH_KEYS = {"disk": "disk_storage_path", "file": "file_storage_path"}
"""Which key of a backend `--file-storage-path` stands for."""


def parse_serve_args(arguments: Sequence[str]) -> ServeConfig:
    """The configuration of `arguments`; raises ConfigError with one line that names the flag."""
    args = make_parser().parse_args(list(arguments))
    require_int("--port", args.port, 0, MAX_PORT)
    require_number("--shutdown-timeout", args.shutdown_timeout, maximum=MAX_SHUTDOWN_TIMEOUT_S)
    require_number("--keep-alive-timeout", args.keep_alive_timeout, 1, MAX_KEEP_ALIVE_S)
    require_int("--tp-size", args.tp_size, 1)
    if not 0 < args.dist_timeout <= MAX_DIST_TIMEOUT_S:
        raise ConfigError(
            f"--dist-timeout must be above 0 and at most {MAX_DIST_TIMEOUT_S:g}, got {args.dist_timeout}"
        )
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
        extra_config_text=args.hicache_storage_backend_extra_config,
        metric_labels=_metric_labels(args.extra_metric_labels),
        notes=notes,
        tp_size=args.tp_size,
        rank_timeout_s=args.dist_timeout,
        kv_events=parse_kv_events_config(args.kv_events_config),
        attach=_attach_rules(args),
    )


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
    config = HiCacheConfig(
        page_size=page_size,
        enable_hierarchical_cache=args.enable_hierarchical_cache,
        disable_radix_cache=args.disable_radix_cache,
        hicache_ratio=args.hicache_ratio,
        hicache_size=args.hicache_size,
        hicache_host_memory_fraction=args.hicache_host_memory_fraction,
        hicache_write_policy=args.hicache_write_policy,
        hicache_io_backend=args.hicache_io_backend,
        hicache_mem_layout=args.hicache_mem_layout,
        hicache_host_memory_mode=args.hicache_host_memory_mode,
        hicache_storage_backend=args.hicache_storage_backend,
        hicache_storage_prefetch_policy=args.hicache_storage_prefetch_policy,
        hicache_storage_identity=args.hicache_storage_identity,
        hicache_no_regret=args.hicache_no_regret == "on",
        hicache_storage_backend_extra_config=_storage_config(args),
        radix_eviction_policy=args.radix_eviction_policy,
        radix_eviction_policy_config=load_mapping(
            "--radix-eviction-policy-config", args.radix_eviction_policy_config
        ),
        served_model_name=name,
    )
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
    """The eviction policy exists; it and storage's guard take their settings; before a model is loaded."""
    make_order(config.radix_eviction_policy, config.radix_eviction_policy_config)
    if config.hicache_storage_backend is not None:
        guard_limits(config.hicache_storage_backend_extra_config.backend)


def _model_path(text: str) -> str:
    path = Path(text).expanduser()
    if not path.is_dir():
        raise ConfigError(f"--model-path: {text} is not a directory")
    if not (path / "config.json").is_file():
        raise ConfigError(f"--model-path: {text} has no config.json, it is not a transformers checkpoint")
    return str(path)


def _engine_config(args: argparse.Namespace, cache: HiCacheConfig, name: str) -> EngineConfig:
    counts: dict[str, Any] = {
        "max_total_tokens": args.max_total_tokens,
        "max_running_requests": args.max_running_requests,
        "max_waiting_requests": args.max_queued_requests,
        "context_length": args.context_length,
        "num_threads": args.num_threads,
        "max_mamba_cache_size": args.max_mamba_cache_size,
        "chunked_prefill_size": None if args.chunked_prefill_size == -1 else args.chunked_prefill_size,
    }
    for field_name, value in counts.items():
        if value is not None:
            flag = "max_queued_requests" if field_name == "max_waiting_requests" else field_name
            least = 2 if field_name == "context_length" else 1  # a token of a prompt and one of its answer
            require_int(f"--{flag.replace('_', '-')}", value, least, most_of(field_name))
    if args.swa_full_tokens_ratio is not None and not 0 < args.swa_full_tokens_ratio <= 1:
        raise ConfigError(f"--swa-full-tokens-ratio must be in (0, 1], got {args.swa_full_tokens_ratio}")
    return EngineConfig(
        swa_full_tokens_ratio=args.swa_full_tokens_ratio,
        model_path=_model_path(args.model_path),
        dtype=args.dtype,
        device=args.device,
        cache=cache,
        check=args.check_invariants,
        model_name=name,
        seed=args.random_seed,
        **counts,
    )
