"""Control while an engine serves: which storage is attached, and wishes, in the words of `hiradix serve`.

    GET     /hicache/storage-backend    what is attached or asked for, and figures
    PUT     the same                    attach: {"hicache_storage_backend": NAME,
                                                 "hicache_storage_backend_extra_config_json": TEXT,
                                                 "hicache_storage_prefetch_policy": NAME}
                                        or, of a prepared configuration, {"name": NAME}
    DELETE  the same                    detach
    ...     /hicache/intents, /hicache/prefix/VERB, /hicache/tenants
                                        wishes: see `hiradix.intents.http`; with a key only
    GET     /explain/ID, /explain?last=N
                                        where the tokens of recent requests came from, and why what was computed
                                        had to be: see `hiradix.explain`; with a key only

Engines have no place for endpoints of a cache, so this is a listener of its own in the scheduler's process,
on loopback, if a port is set. An attach is taken up with vLLM's next step: the answer is 202. Only
configurations that `attachable` or `attach_allow` permit may be attached, and as `default` the one that was
attached at start. SGLang has endpoints of its own for that.
"""

from __future__ import annotations

import hmac
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote

from hiradix.browsers import allowed
from hiradix.config import PREFETCH_POLICIES, ExtraConfig, parse_extra_config
from hiradix.errors import ConfigError
from hiradix.explain import PATH as EXPLAIN
from hiradix.explain import RecentExplanations
from hiradix.intents.http import IntentApi
from hiradix.settings import MAX_PORT, redact, require_choice
from hiradix.storage.attach.rules import AttachRefused, AttachRules
from hiradix.storage.registry import load_storage_backend

logger = logging.getLogger(__name__)
AUDIT = logging.getLogger("hiradix.audit")
REFUSED_EVERY_S = 10.0
PAGES = allowed("127.0.0.1", None, None)
"""Whose web pages may ask where there is no key: nobody's."""

PORT_ENV = "HIRADIX_ADMIN_PORT"
"""Where an engine's command line has no place for a port."""
PATH = "/hicache/storage-backend"
NAME, KEYS = "hicache_storage_backend", "hicache_storage_backend_extra_config_json"
POLICY, PREPARED = "hicache_storage_prefetch_policy", "name"
MAX_BODY_BYTES = 1 << 20
MAX_DIGITS = 20  # of a length


@dataclass(frozen=True)
class AdminCalls:
    """The callables behind the admin endpoints; all may be called on any thread.

    ask: attach the named backend with its keys, prefetching by the named policy or as before; detach where
    the name is None. show: for GET. Both None where an engine has endpoints of its own for storage. rules: what
    may be attached. intents: what wishes are asked of; None: no wishes here. explanations: of recent requests;
    None: nothing is explained here.
    """

    ask: Callable[[str | None, ExtraConfig, str | None], None] | None = None
    show: Callable[[], Mapping[str, Any]] | None = None
    api_key: str | None = field(default=None, repr=False)
    rules: AttachRules = field(default_factory=AttachRules)
    intents: IntentApi | None = None
    explanations: RecentExplanations | None = None


class _Sparing:
    """Limits how often refused keys are logged: one in REFUSED_EVERY_S. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last_s, self._num_held = -REFUSED_EVERY_S, 0

    def count(self) -> int | None:
        """The number of refusals since the last that was logged; None if this one is not to be logged either."""
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._last_s < REFUSED_EVERY_S:
                self._num_held += 1
                return None
            self._last_s, held, self._num_held = now_s, self._num_held, 0
            return held


class _Listener(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, calls: AdminCalls):
        self.calls, self.refused = calls, _Sparing()
        super().__init__(("127.0.0.1", port), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Listener
    timeout = 10.0

    def do_GET(self) -> None:
        show = self.server.calls.show
        if self._is_for_storage() and show is not None:
            self._answer(200, redact(show()))

    def do_POST(self) -> None:
        if self._is_for_storage():
            self._answer(405, {"message": f"{PATH}: GET, PUT or DELETE"})

    def do_PUT(self) -> None:
        ask = self.server.calls.ask
        if not self._is_for_storage() or ask is None:
            return
        try:
            asked = _parsed(self.rfile.read(self._length()), self.server.calls.rules)
        except ConfigError as error:
            self._log("attach of storage", f"refused: {error}")
            self._answer(400, {"message": str(error)})
            return
        ask(*asked)
        self._log(f"attach of storage {asked[0]}", "asked")
        self._answer(202, {"message": f"{asked[0]} is attached with the next step"})

    def do_DELETE(self) -> None:
        ask = self.server.calls.ask
        if self._is_for_storage() and ask is not None:
            ask(None, ExtraConfig(), None)
            self._log("detach of storage", "asked")
            self._answer(202, {"message": "storage is detached with the next step"})

    def _is_for_storage(self) -> bool:
        """Whether the request is about storage and may be made; any other one is answered here."""
        if not self._may():
            return False
        if self._is_wish():
            self._wish()
        elif self._is_explain():
            self._explain()
        else:
            return True
        return False

    @property
    def _place(self) -> str:
        return self.path.partition("?")[0]

    def _is_wish(self) -> bool:
        return self.server.calls.intents is not None and IntentApi.has(self._place)

    def _wish(self) -> None:
        """Answer a wish. Whoever has the key is the operator."""
        wishes = self.server.calls.intents
        if wishes is None:
            return
        given = self.rfile.read(self._length())
        answer = wishes.answer(self.command, self._place, given)
        if self.command != "GET":
            state = answer.body.get("state", "refused")
            self._log(f"{self.command} {self._place}"[:200], f"{answer.status}: {state}")
        self._answer(answer.status, answer.body)

    def _is_explain(self) -> bool:
        is_asked = self._place == EXPLAIN or self._place.startswith(EXPLAIN + "/")
        return self.server.calls.explanations is not None and is_asked

    def _explain(self) -> None:
        explanations = self.server.calls.explanations
        if explanations is None:
            return
        if self.command != "GET":
            self._answer(405, {"message": f"{EXPLAIN}: GET"})
            return
        try:
            if self._place == EXPLAIN:
                last = parse_qs(self.path.partition("?")[2], keep_blank_values=True).get("last", [None])[-1]
                self._answer(200, explanations.latest(last))
            else:
                self._answer(200, explanations.one(unquote(self._place.removeprefix(EXPLAIN + "/"))))
        except ConfigError as error:
            self._answer(400 if self._place == EXPLAIN else 404, {"message": str(error)})

    def _may(self) -> bool:
        calls = self.server.calls
        has_storage = calls.ask is not None and self._place == PATH
        if not (has_storage or self._is_wish() or self._is_explain()):
            there = [PATH] * (calls.ask is not None)
            there += ["/hicache/intents, /hicache/prefix/VERB, /hicache/tenants"] * (
                calls.intents is not None
            )
            there += [EXPLAIN] * (calls.explanations is not None)
            self._answer(404, {"message": f"there is only {', '.join(there)}"})
            return False
        if calls.api_key is None and not has_storage:
            what = "wishes need" if self._is_wish() else "explanations need"
            self._answer(403, {"message": f"admin_api_key: {what} one, and this server was started without"})
            return False
        given = self.headers.get("Authorization", "").encode("latin-1")  # the bytes that came
        if self.server.calls.api_key is not None and not hmac.compare_digest(
            given, f"Bearer {self.server.calls.api_key}".encode()
        ):
            if (num_held := self.server.refused.count()) is not None:
                more = f" (and {num_held} more)" if num_held else ""
                self._log(f"{self.command} {PATH}", f"refused: a wrong key, or none{more}")
            self._answer(401, {"message": "the admin key is needed"})
            return False
        why = (
            None
            if self.server.calls.api_key is not None
            else PAGES.refusal(self.command, self._raw_headers())
        )
        if why is not None:
            self._answer(403, {"message": why})
        return why is None

    def _raw_headers(self) -> list[tuple[bytes, bytes]]:
        return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self.headers.items()]

    def _length(self) -> int:
        text = self.headers.get("Content-Length", "0")
        is_number = text.isascii() and text.isdigit() and len(text) < MAX_DIGITS
        return min(int(text), MAX_BODY_BYTES) if is_number else 0

    def _answer(self, status: int, body: Mapping[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _log(self, what: str, outcome: str) -> None:
        shown = "".join(letter if letter.isprintable() else "?" for letter in outcome[:500])
        AUDIT.warning("%s by %s:%d: %s", what, *self.client_address[:2], shown)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)


class AdminServer:
    """The listener, on 127.0.0.1. Port 0 takes a free one. Raises ConfigError when the port is taken."""

    def __init__(self, port: int, calls: AdminCalls) -> None:
        try:
            self._server = _Listener(port, calls)
        except OSError as error:
            raise ConfigError(f"admin_port {port}: {error}") from error
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="hiradix-admin", daemon=True).start()
        logger.info("hiradix: admin endpoint on 127.0.0.1:%d", self.port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def port_of_environment(environment: Mapping[str, str]) -> int | None:
    """The port that PORT_ENV says, 0 for a free one; None without it. ConfigError: it is none."""
    text = environment.get(PORT_ENV)
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and int(text) <= MAX_PORT):
        raise ConfigError(f"{PORT_ENV}: expected a port, got {text!r:.40}")
    return int(text)


def _parsed(body: bytes, rules: AttachRules) -> tuple[str, ExtraConfig, str | None]:
    """The backend's name, its configuration and a prefetch policy. Raises ConfigError naming the field, with
    nothing in its text that the body or the command line did not say."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        raise ConfigError("the body is no JSON") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{NAME}: the name of a storage backend is needed")
    for key in values:
        if key not in (NAME, KEYS, POLICY, PREPARED):
            raise ConfigError(f"{key:.64}: not known here; known: {NAME}, {KEYS}, {POLICY}, {PREPARED}")
    name, text, policy = values.get(NAME), values.get(KEYS), values.get(POLICY)
    if text is not None and not isinstance(text, str):
        raise ConfigError(f"{KEYS} must be text")
    if policy is not None:
        require_choice(POLICY, policy, PREFETCH_POLICIES)
    if PREPARED in values:
        if name is not None or text is not None:
            raise ConfigError(f"{PREPARED}: stands for {NAME} and {KEYS}, which are not given beside it")
        wanted = rules.named(values[PREPARED])
    elif isinstance(name, str) and name:
        wanted = rules.wanted(name, text)
    else:
        raise ConfigError(f"{NAME}: the name of a storage backend is needed")
    try:
        load_storage_backend(wanted.backend)
    except ConfigError as error:
        logger.warning("hiradix: %s", error)
        raise AttachRefused(NAME, "its library cannot be imported; the log says more") from error
    return wanted.backend, parse_extra_config(wanted.text), policy
