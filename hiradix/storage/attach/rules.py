"""Attaching over HTTP: a configuration that was prepared at start, by name, or one that a rule permits.

Whoever has the admin key is not the account that the server runs as. So over HTTP no file is read, no
folder written, no host spoken to and no module imported but those that were named on the command line:

    --attachable cold='{"backend": "s3", "url": "s3://bucket/pages"}'      {"name": "cold"}
    --attach-allow backend=disk,path=/data/kv                              disk, below /data/kv
    --attach-allow backend=redis,host=cache.internal:6379                  redis, on this server

Answers repeat nothing of files, of other servers, or of what exists where: they name a setting and a kind
of failure.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from hiradix.config import EXTRA_CONFIG_FLAG, ExtraConfig
from hiradix.config_files import load_mapping
from hiradix.errors import ConfigError
from hiradix.settings import MAX_PORT, TEXTS, OverHttp, Setting, Type, redact
from hiradix.storage.attach.tables import BACKEND_SETTINGS, KNOWN_KEYS, PERMITTABLE, settings_over_http
from hiradix.storage.backends.disk import config as disk_config
from hiradix.storage.backends.file import config as file_config
from hiradix.storage.backends.nixl.config import FILE_PLUGINS, PLUGINS
from hiradix.storage.kit.options import parse_size
from hiradix.storage.registry import load_storage_backend, storage_backend_names

ATTACHABLE, ALLOW = "--attachable", "--attach-allow"
BACKEND = "hicache_storage_backend"
EXTRA = "hicache_storage_backend_extra_config_json"
DEFAULT = "default"
"""The name of what was attached at start."""
NOT_ALLOWED = "not allowed over HTTP"
CLOSED_BACKENDS = "use --attachable: what its settings can do is not known here"
MAX_DEPTH = 4
MAX_TEXT = 1024
MAX_LOGGED = 2000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,63}")
_PART = re.compile(r",(?=(?:backend|path|file|host|url)=)")
_HOST = r"(?P<host>\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9](?:[A-Za-z0-9._\-]{0,253}))"
_PORT = r"(?::(?P<port>[0-9]{1,5}))?"
_USER = r"(?:[A-Za-z0-9._~!$&'()*+,;=:%\-]*@)?"
_ADDRESS = re.compile(_HOST + _PORT)
_REDIS = re.compile(rf"rediss?://{_USER}{_HOST}{_PORT}(?:/[0-9]{{0,5}})?")
_UNIX = re.compile(rf"unix://{_USER}(?P<path>/[A-Za-z0-9/._\-]+)")
_HTTP = re.compile(rf"(?P<scheme>https?)://{_HOST}{_PORT}(?:/[A-Za-z0-9/._~\-]*)?")
_METADATA = re.compile(rf"(?:(?:https?|redis|etcd)://)?{_HOST}{_PORT}(?:/[A-Za-z0-9/._\-]*)?")
_BUCKET = re.compile(
    r"(?P<scheme>s3|gs|az|abfs|abfss)://(?P<bucket>[A-Za-z0-9][A-Za-z0-9._\-]{0,254})"
    r"(?P<path>(?:/[A-Za-z0-9._=+\-]+)*)/?"
)
_REGION = re.compile(r"[a-z0-9\-]{1,64}")


class AttachRefused(ConfigError):
    """Raised when a request may not attach a store. Its text names the setting and the kind of failure, and
    may be sent to the client."""

    def __init__(self, param: str, kind: str):
        super().__init__(f"{param}: {kind}")
        self.param = param


@dataclass(frozen=True)
class Wanted:
    """A store to open: a backend by its registered name, and its settings as text that names no file."""

    backend: str
    text: str | None = field(repr=False)
    name: str | None = None  # of the prepared configuration that it is


@dataclass(frozen=True)
class Prepared:
    """A configuration that was given at start. keys: the cache's own and the backend's."""

    backend: str
    keys: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Rule:
    """The settings of one backend that one `--attach-allow` permits. hosts: a port of None is any."""

    backend: str
    folders: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    hosts: tuple[tuple[str, int | None], ...] = ()
    urls: tuple[str, ...] = ()


def parse_rule(text: str, flag: str = ALLOW) -> Rule:
    """A rule from `backend=NAME[,path=FOLDER][,file=FILE][,host=HOST[:PORT]][,url=s3://BUCKET/PREFIX]`, where
    all but the backend may stand more than once. Raises ConfigError that names the flag."""
    given: dict[str, list[str]] = {"backend": [], "path": [], "file": [], "host": [], "url": []}
    for part in _PART.split(text):
        key, is_pair, value = part.partition("=")
        if not is_pair or key not in given or not value:
            form = "backend=NAME[,path=FOLDER][,file=FILE][,host=HOST[:PORT]][,url=URL]"
            raise ConfigError(f"{flag} {text}: expected {form}, got {part!r}")
        given[key].append(value)
    if len(given["backend"]) != 1:
        raise ConfigError(f"{flag} {text}: one backend= is needed")
    (backend,) = given["backend"]
    if backend not in PERMITTABLE:
        known = ", ".join(PERMITTABLE)
        raise ConfigError(f"{flag} {text}: backend {backend}: {CLOSED_BACKENDS}; rules are for {known}")
    for path in (*given["path"], *given["file"]):
        if not os.path.isabs(path):
            raise ConfigError(f"{flag} {text}: {path} is no absolute path")
    hosts = []
    for host in given["host"]:
        found = _ADDRESS.fullmatch(host)
        if found is None:
            raise ConfigError(f"{flag} {text}: {host!r} is neither host nor host:port")
        hosts.append(_host(found, None, "host"))
    for url in given["url"]:
        if _bucket(url) is None:
            raise ConfigError(f"{flag} {text}: expected s3://BUCKET/PREFIX, got {url!r}")
    return Rule(backend, tuple(given["path"]), tuple(given["file"]), tuple(hosts), tuple(given["url"]))


def parse_prepared(flag: str, name: str, value: object) -> Prepared:
    """The configuration called `name`: an object, or its text, with `backend` and that backend's settings.

    Raises ConfigError that names flag and name.
    """
    where = f"{flag} {name}"
    if name == DEFAULT or _NAME.fullmatch(name) is None:
        raise ConfigError(f"{where}: a name is 1 to 64 of A-Z a-z 0-9 _ . - and not {DEFAULT!r}")
    if name in storage_backend_names():
        raise ConfigError(f"{where}: {name} is the name of a backend: choose another")
    keys = load_mapping(where, value) if isinstance(value, str) else value
    if not isinstance(keys, Mapping) or not isinstance(keys.get("backend"), str):
        raise ConfigError(f'{where}: expected an object with "backend", the name of a storage backend')
    rest = {str(key): item for key, item in keys.items() if key != "backend"}
    try:
        load_storage_backend(keys["backend"])
        ExtraConfig.from_mapping(rest)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return Prepared(keys["backend"], MappingProxyType(rest))


def default_of(backend: str | None, extra: ExtraConfig) -> dict[str, Prepared]:
    """The store that was attached at start, under its name; empty where there was none."""
    if backend is None:
        return {}
    in_opening = ("backend", "hicache_storage_required", "storage_identity")
    own = {key: value for key, value in vars(extra).items() if key not in in_opening}
    return {DEFAULT: Prepared(backend, MappingProxyType({**own, **extra.opening}))}


@dataclass(frozen=True)
class AttachRules:
    """All that requests over HTTP may attach. Empty: nothing."""

    prepared: Mapping[str, Prepared] = field(default_factory=lambda: MappingProxyType({}))
    rules: tuple[Rule, ...] = ()

    def backend_of(self, name: str) -> str:
        """The backend of the prepared configuration `name`, else `name`, which is a backend's then."""
        found = self.prepared.get(name)
        return name if found is None else found.backend

    def named(self, name: object) -> Wanted:
        """The prepared configuration of that name. Raises AttachRefused."""
        found = self.prepared.get(name) if isinstance(name, str) else None
        if found is None:
            known = ", ".join(self.prepared) or "none"
            raise AttachRefused("name", f"no configuration of this name was prepared; there are: {known}")
        return Wanted(found.backend, json.dumps(dict(found.keys), default=str), str(name))

    def wanted(self, backend: str, text: str | None) -> Wanted:
        """The store that a request's backend and settings name: a prepared configuration, where there are no
        settings and `backend` is its name, or the default's backend; else what a rule permits. Raises
        AttachRefused."""
        text = (text or "").strip()
        if not text:
            if backend in self.prepared:
                return self.named(backend)
            if DEFAULT in self.prepared and self.prepared[DEFAULT].backend == backend:
                return self.named(DEFAULT)
        if text.startswith("@"):
            raise AttachRefused(EXTRA, f"@file is {NOT_ALLOWED}")
        try:
            keys = json.loads(text or "{}")
        except (ValueError, RecursionError):
            raise AttachRefused(EXTRA, "not valid JSON") from None
        if not isinstance(keys, dict):
            raise AttachRefused(EXTRA, "must be an object")
        checked = self._checked(BACKEND, backend, keys, "", 0)
        return Wanted(backend, json.dumps(checked) if text or checked else None)

    def _checked(
        self, field_name: str, backend: str, keys: Mapping[str, Any], before: str, depth: int
    ) -> dict[str, Any]:
        """The settings with their paths resolved, where one rule permits all of them."""
        refused = AttachRefused(field_name, f"{NOT_ALLOWED}; see {ATTACHABLE} and {ALLOW}")
        rules = [rule for rule in self.rules if rule.backend == backend]
        if not rules or depth > MAX_DEPTH:
            raise refused
        first: AttachRefused | None = None
        for rule in rules:
            try:
                return self._permitted(rule, keys, before, depth)
            except AttachRefused as error:
                first = first or error
        raise first or refused

    def _permitted(self, rule: Rule, keys: Mapping[str, Any], before: str, depth: int) -> dict[str, Any]:
        known, found = settings_over_http(rule.backend, is_outermost=not before), dict[str, Any]()
        for key, value in keys.items():
            setting, shown = known.get(key), before + _shown(key)
            if setting is None:
                raise AttachRefused(shown, NOT_ALLOWED)
            if value is None:
                continue  # as if it were not there
            found[key] = self._one(rule, setting, shown, value, depth)
        _check_effects(rule, found, before)
        return found

    def _one(self, rule: Rule, setting: Setting, shown: str, value: Any, depth: int) -> Any:
        if setting.type is Type.STORE:
            if not isinstance(value, dict) or not isinstance(value.get("backend"), str):
                raise AttachRefused(shown, 'must be an object with "backend"')
            rest = {key: item for key, item in value.items() if key != "backend"}
            inside = self._checked(f"{shown}.backend", value["backend"], rest, f"{shown}.", depth + 1)
            return {"backend": value["backend"], **inside}
        if setting.type is Type.SIZES:
            if not isinstance(value, dict) or not all(isinstance(size, int | str) for size in value.values()):
                raise AttachRefused(shown, "must be an object of sizes")
            return value
        if not isinstance(value, str | int | float | bool):
            raise AttachRefused(shown, "must be text, a number or a bool")
        if isinstance(value, str) and (len(value) > MAX_TEXT or not value.isprintable()):
            raise AttachRefused(shown, "is too long, or no printable text")
        _check_value(setting, shown, value)
        if setting.type not in TEXTS:
            return value
        if not isinstance(value, str):
            raise AttachRefused(shown, "must be text")
        if setting.type is Type.FOLDER:
            return _within(shown, value, rule.folders)
        return _within(shown, value, rule.files) if setting.type is Type.FILE else value


# -- values -----------------------------------------------------------------------------


def _check_value(setting: Setting, shown: str, value: Any) -> None:
    permitted = setting.over_http or OverHttp()
    if any(type(value) is type(refused) and value == refused for refused in permitted.refused):
        raise AttachRefused(shown, f"this value is {NOT_ALLOWED}")
    if permitted.most is None:
        return
    try:
        number = parse_size(shown, value) if isinstance(value, str) else value
    except ConfigError:
        raise AttachRefused(shown, "bad value") from None
    if number > permitted.most:
        raise AttachRefused(shown, f"at most {permitted.most:.0f} over HTTP")


def _within(shown: str, path: str, permitted: Sequence[str]) -> str:
    """The path without links, where it lies in one of the permitted. Relative ones, and `~`, are of
    nobody's."""
    if os.path.isabs(path) and "\0" not in path:
        real = os.path.realpath(path)
        for prefix in map(os.path.realpath, permitted):
            if os.path.commonpath((real, prefix)) == prefix:
                return real
    raise AttachRefused(shown, NOT_ALLOWED)


def _host(found: re.Match[str], default_port: int | None, shown: str) -> tuple[str, int | None]:
    """Name and port of a match, in the one form that they are compared in."""
    name = found["host"].strip("[]").lower().rstrip(".")
    try:
        name = ipaddress.ip_address(name).compressed
    except ValueError:
        if ":" in name:
            raise AttachRefused(shown, NOT_ALLOWED) from None
    port = int(found["port"]) if found["port"] else default_port
    if port is not None and not 1 <= port <= MAX_PORT:
        raise AttachRefused(shown, NOT_ALLOWED)
    return name, port


def _check_host(rule: Rule, shown: str, pattern: re.Pattern[str], text: str, port: int | None) -> None:
    found = pattern.fullmatch(text)
    if found is not None:
        host = _host(found, port, shown)
        if any(host[0] == name and known in (None, host[1]) for name, known in rule.hosts):
            return
    raise AttachRefused(shown, NOT_ALLOWED)


def _bucket(url: str) -> tuple[str, str, str] | None:
    """Scheme, bucket and path with a slash at its end; None where it is read otherwise by others."""
    found = _BUCKET.fullmatch(url)
    if found is None or {".", ".."} & set(found["path"].split("/")):
        return None
    return found["scheme"], found["bucket"], found["path"] + "/"


# -- what settings do together, those that were not given included ------------------------


def _check_effects(rule: Rule, keys: dict[str, Any], before: str) -> None:
    backend = rule.backend
    if backend == "nixl":
        plugin = keys.get("plugin", PLUGINS[0])
        backend = "file" if plugin in FILE_PLUGINS else "s3"
        if plugin not in PLUGINS:
            raise AttachRefused(f"{before}plugin", "bad value")
    if backend in ("disk", "file"):
        _check_folder(rule, backend, keys, before)
    elif backend in ("redis", "valkey"):
        _check_redis(rule, keys, before)
    elif backend == "s3":
        _check_s3(rule, keys, before)
    elif backend == "mooncake":
        _check_mooncake(rule, keys, before)


def _check_folder(rule: Rule, backend: str, keys: dict[str, Any], before: str) -> None:
    """A folder that was not given is the user's own, and one in the environment beats both."""
    is_disk = backend == "disk"
    key = disk_config.PATH_KEY if is_disk else file_config.PATH_KEY
    path = keys.get(key) or (disk_config if is_disk else file_config).default_path()
    if not is_disk:
        path = os.environ.get(file_config.PATH_ENV) or path
    keys[key] = _within(before + key, os.path.abspath(os.path.expanduser(path)), rule.folders)


def _check_redis(rule: Rule, keys: Mapping[str, Any], before: str) -> None:
    sentinels = [part.strip() for part in str(keys.get("sentinels", "")).split(",") if part.strip()]
    for sentinel in sentinels:
        _check_host(rule, f"{before}sentinels", _ADDRESS, sentinel, None)
    if sentinels and "url" not in keys:
        return  # they say where the server is
    url, shown = str(keys.get("url", BACKEND_SETTINGS["redis"]["url"].default)), f"{before}url"
    if (socket := _UNIX.fullmatch(url)) is not None:
        _within(shown, socket["path"], rule.folders)
        return
    _check_host(rule, shown, _REDIS, url, 6379)


def _check_s3(rule: Rule, keys: Mapping[str, Any], before: str) -> None:
    """Check an S3 bucket: buckets of a permitted endpoint are permitted; those of a provider only by `url=`,
    as anyone has one there. An endpoint decides for `s3://` alone: libraries have other names for those of
    others."""
    bucket, endpoint = _bucket(str(keys.get("url", ""))), keys.get("endpoint")
    if bucket is None:
        raise AttachRefused(f"{before}url", NOT_ALLOWED)
    if (region := keys.get("region")) is not None and _REGION.fullmatch(str(region)) is None:
        raise AttachRefused(f"{before}region", NOT_ALLOWED)
    if endpoint:
        port = 80 if str(endpoint).startswith("http:") else 443
        _check_host(rule, f"{before}endpoint", _HTTP, str(endpoint), port)
    if endpoint and bucket[0] == "s3" and not rule.urls:
        return
    for known in map(_bucket, rule.urls):
        if known is not None and bucket[:2] == known[:2] and bucket[2].startswith(known[2]):
            return
    raise AttachRefused(f"{before}url", NOT_ALLOWED)


def _check_mooncake(rule: Rule, keys: Mapping[str, Any], before: str) -> None:
    address = str(keys.get("master_server_address", ""))
    _check_host(rule, f"{before}master_server_address", _ADDRESS, address, None)
    for name, pattern in (("metadata_server", _METADATA), ("local_hostname", _ADDRESS)):
        default = BACKEND_SETTINGS["mooncake"][name].default
        if (text := str(keys.get(name, default))) != default:
            _check_host(rule, before + name, pattern, text, None)


# -- answers over HTTP, and lines of the log ---------------------------------------------

_OURS = re.compile(  # of fixed texts, and of what the request itself said
    r"Reject attach: scheduler is not idle\. #queue-req=\d+ #running-req=\d+"
    r"|HiCache storage backend is already enabled with backend '[\w.\-]*'\. "
    r"Cannot attach different backend '[\w.\-]*'\. Detach first\."
    r"|Invalid hicache_(?:storage_prefetch|write)_policy: '[\w.\-]{0,64}'\. Expected one of \[[\w', ]*\]\."
    r"|Hierarchical cache is not enabled\."
    r"|The engine was not idle within [\d.e+]+ s\."
)
_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("connect: timed out", re.compile(r"not open within|timed out|TimeoutError")),
    ("connect: refused", re.compile(r"connection refused|errno 111|os error 111", re.IGNORECASE)),
    ("connect: unknown host", re.compile(
        r"name or service not known|name resolution|nodename nor|getaddrinfo|dns error|failed to lookup",
        re.IGNORECASE)),
    ("connect: not admitted", re.compile(
        r"wrongpass|noauth|authenticationerror|invalid username-password|access ?denied|forbidden|unauthori",
        re.IGNORECASE)),
    ("connect: TLS failed", re.compile(r"certificate|\bssl\b|\btls\b", re.IGNORECASE)),
    (f"{BACKEND}: its library cannot be imported", re.compile(r"cannot import|pip install", re.IGNORECASE)),
)  # fmt: skip
_FLAG = re.escape(EXTRA_CONFIG_FLAG)
_KEY = re.compile(rf"((?:{_FLAG}: (?:upper|lower): )*){_FLAG}: ([a-z0-9_]+)")  # of a half of a tier: in it
_BAD_VALUE = re.compile(
    _KEY.pattern + r":? (?:must|expected|unknown value|is (?:no|too|empty|required|less)|needs)"
)
_POLICY = re.compile(r"Invalid (hicache_\w+_policy): ")


def over_http(message: str) -> str:
    """The answer to a client whose attach failed with `message`: a setting or a step, and the kind of
    failure.

    Made of fixed words alone, whatever the message has of files, of addresses and of other servers' answers.
    """
    if _OURS.fullmatch(message.strip()):
        return message
    if (policy := _POLICY.match(message)) is not None:
        return f"{policy[1]}: bad value; the server's log says more"
    bad = _named(_BAD_VALUE, message)
    if bad:
        return f"{bad[-1]}: bad value; the server's log says more"
    for kind, pattern in _KINDS:
        if pattern.search(message):
            return f"{kind}; the server's log says more"
    return f"{next(iter(_named(_KEY, message)), BACKEND)}: could not be used; the server's log says more"


def _named(pattern: re.Pattern[str], message: str) -> list[str]:
    """The known keys that it finds, as a request has them: `lower.url`."""
    return [
        before.replace(f"{EXTRA_CONFIG_FLAG}: ", "").replace(": ", ".") + name
        for before, name in pattern.findall(message)
        if name in KNOWN_KEYS
    ]


def in_log(message: str, text: str | None) -> str:
    """The message for the log, in one line: without what is secret in the settings `text`."""
    try:
        values = json.loads(text or "{}")
    except (ValueError, RecursionError):
        values = {}
    for secret in sorted(_secrets(values), key=len, reverse=True):
        message = message.replace(secret, "***")
    shown = str(redact(message))[:MAX_LOGGED]
    return "".join(letter if letter.isprintable() else " " for letter in shown)


def _secrets(values: Any, key: str = "") -> Collection[str]:
    if isinstance(values, Mapping):
        return {secret for name, item in values.items() for secret in _secrets(item, str(name))}
    is_hidden = isinstance(values, str) and len(values) > 2 and redact(values, key) == "***"
    return {values} if is_hidden else set()


def _shown(key: str) -> str:
    """A key of a request, where it can be one."""
    return key if re.fullmatch(r"[A-Za-z0-9_.\-]{1,64}", key) else "a key"


def rules_of(
    prepared: Mapping[str, Any],
    allowed: Sequence[str],
    where: Callable[[str], str],
    start: Mapping[str, Prepared] | None = None,
) -> AttachRules:
    """The rules of the settings `attachable` and `attach_allow`. Raises ConfigError.

    where: how an error names either. start: what is attached at the start, under its name.
    """
    own = {name: parse_prepared(where("attachable"), name, value) for name, value in prepared.items()}
    rules = tuple(parse_rule(text, where("attach_allow")) for text in allowed)
    return AttachRules({**(start or {}), **own}, rules)
