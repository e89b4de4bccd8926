"""`hiradix ctl`: look into a running cache and command it, over HTTP.

    hiradix ctl [--url URL] locate --text "You are ..."
    hiradix ctl hold --tokens 1,2,3 --ttl 600            hiradix ctl release 7
    hiradix ctl forget --tenant salt:alice               hiradix ctl bring --session s1 --target storage
    hiradix ctl status [7]    tenants    explain [ID]    flush    health

The same paths are there in `hiradix serve`, in vLLM and in SGLang where the connector listens. The key is read
from the variable HIRADIX_ADMIN_API_KEY or from a file, never from an argument. With --wait a command returns
when what it asked for has ended, and its exit status says whether that was well and in time: 0, or 1.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from hiradix.config_files import checked_key, read_secret_file
from hiradix.errors import ConfigError

KEY: Final = "HIRADIX_ADMIN_API_KEY"
URL: Final = "http://127.0.0.1:30000"
TIMEOUT_S: Final = 60.0
POLL_S: Final = 0.2
ANSWER_S: Final = 1.0  # that the last question of a --wait may take longer than that
UNDER_WAY: Final = ("accepted", "running")
WELL: Final = ("done", "held")
BADLY: Final = ("refused", "expired", "failed")
VERBS: Final = {
    "locate": "how much of it is there, in which tier",
    "hold": "keep it in a tier, for a time",
    "forget": "delete it, in all tiers or in some",
    "bring": "have it in another tier or store, too",
}


class Refused(Exception):
    """Raised when the server refuses or does not answer. The text is for people."""


class AdminClient:
    """A client of a server's administrative paths. key: sent as a bearer token. timeout_s: of each request."""

    def __init__(self, url: str, key: str | None, timeout_s: float = TIMEOUT_S):
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url {url!r}: must begin with http:// or https://")
        self._url = url.rstrip("/")
        self._headers = {"content-type": "application/json"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self._timeout_s = timeout_s

    def ask(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        """Send a request; the answer's JSON, or its text if it is none. timeout_s: in place of the client's.
        Raises Refused."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers, method=method)
        try:
            try:
                with urllib.request.urlopen(request, timeout=timeout_s or self._timeout_s) as answer:
                    return _read(answer.read())
            except urllib.error.HTTPError as error:
                raise Refused(f"{error.code}: {_message(_read(error.read()))}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:  # also in the midst of an answer
            raise Refused(f"{self._url} does not answer: {error}") from None


def _read(data: bytes) -> Any:
    text = data.decode("utf-8", "replace")
    try:
        return json.loads(text)
    except ValueError:
        return text.strip()


def _message(answer: Any) -> str:
    if isinstance(answer, dict):
        error = answer.get("error")
        if isinstance(error, dict):
            return str(error.get("message"))
        return str(answer.get("message") or answer.get("reason") or error or answer)
    return str(answer)


def selector_of(given: argparse.Namespace) -> dict[str, Any]:
    """The selector in the flags, as the server's JSON. ConfigError names the flag."""
    selector: dict[str, Any] = {}
    if given.tokens is not None:
        try:
            selector["tokens"] = [int(token) for token in given.tokens.split(",")]
        except ValueError:
            raise ConfigError(
                f"--tokens {given.tokens[:40]!r}: must be numbers with commas between"
            ) from None
    if given.text is not None:
        selector["text"] = given.text
    if given.messages is not None:
        try:
            selector["messages"] = json.loads(Path(given.messages).read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"--messages {given.messages}: {error}") from error
    if given.session is not None:
        selector["session"] = given.session
    if given.tenant is not None:
        selector["tenant"] = given.tenant
    if given.everything:
        selector["everything"] = True
    for name in ("extra_key", "cache_salt"):
        if getattr(given, name) is not None:
            selector[name] = getattr(given, name)
    return selector


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "hiradix ctl", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default=URL, help=f"the server ({URL})")
    parser.add_argument("--key-file", help=f"a file with the admin key; otherwise the variable {KEY}")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    commands = parser.add_subparsers(dest="command", required=True)
    for verb, text in VERBS.items():
        one = commands.add_parser(verb, help=text)
        what = one.add_argument_group("whose pages (one of these)")
        what.add_argument("--tokens", metavar="1,2,3", help="a prefix, as token ids")
        what.add_argument("--text", help="a prefix, as text")
        what.add_argument("--messages", metavar="FILE", help="a prefix, as messages in a JSON file")
        what.add_argument("--session", help="a session's last prompts")
        what.add_argument("--tenant", help="all of a tenant: salt:SALT, key:KEY")
        what.add_argument("--everything", action="store_true", help="all there is")
        one.add_argument("--extra-key", help="the prefix's adapter")
        one.add_argument("--cache-salt", help="the prefix's salt")
        one.add_argument(
            "--tier", action="append", choices=("device", "host", "storage"), help="may be repeated"
        )
        one.add_argument(
            "--wait", type=_seconds, metavar="SECONDS", help="return when it has ended, at most so late"
        )
        one.add_argument("--max-bytes", type=int, help="no more than so many bytes")
        if verb == "hold":
            one.add_argument(
                "--ttl", type=float, required=True, metavar="SECONDS", help="how long it is kept"
            )
        if verb == "forget":
            one.add_argument("--whole", action="store_true", help="also pages that other prompts share")
        if verb == "bring":
            one.add_argument("--target", required=True, help="host, storage, or the name of another store")
            one.add_argument("--move", action="store_true", help="and no more where it was")
    for name, text in {"release": "end a lease, or stop what runs", "cancel": "the same"}.items():
        commands.add_parser(name, help=text).add_argument("id", type=int)
    commands.add_parser("status", help="one wish, or all that are known").add_argument(
        "id", type=int, nargs="?"
    )
    commands.add_parser("tenants", help="who has how much, in which tier")
    explain = commands.add_parser("explain", help="where a request's tokens came from; the latest ones")
    explain.add_argument("id", nargs="?")
    explain.add_argument("--last", type=int, default=20)
    commands.add_parser("flush", help="empty device and host")
    commands.add_parser("health", help="whether the server serves")
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: must be a number of seconds, at least 0")
    return value


def _wish(server: AdminClient, given: argparse.Namespace) -> Any:
    body: dict[str, Any] = {"selector": selector_of(given)}
    if given.tier:
        body["tiers"] = given.tier
    if given.max_bytes is not None:
        body["max_bytes"] = given.max_bytes
    if given.command == "hold":
        body["ttl_s"] = given.ttl
    if given.command == "forget" and given.whole:
        body["is_whole"] = True
    if given.command == "bring":
        body |= {"target": given.target, "is_move": given.move}
    until = time.monotonic() + (given.wait or 0.0)
    receipt = _receipt(server.ask("POST", f"/hicache/prefix/{given.command}", body))
    while receipt["state"] in UNDER_WAY and (left_s := until - time.monotonic()) > 0:
        time.sleep(min(POLL_S, left_s))
        patience_s = min(TIMEOUT_S, left_s + ANSWER_S)
        receipt = _receipt(server.ask("GET", f"/hicache/intents/{receipt['id']}", timeout_s=patience_s))
    return receipt


def _receipt(answer: Any) -> dict[str, Any]:
    if isinstance(answer, dict) and {"id", "state"} <= answer.keys():
        return answer
    raise Refused(f"the answer is no receipt, but {answer!r:.80}: is --url a cache's?")


def _answer(server: AdminClient, given: argparse.Namespace) -> Any:
    match given.command:
        case "release" | "cancel":
            return server.ask("DELETE", f"/hicache/intents/{given.id}")
        case "status":
            return server.ask("GET", "/hicache/intents" + ("" if given.id is None else f"/{given.id}"))
        case "tenants":
            return server.ask("GET", "/hicache/tenants")
        case "explain":
            return server.ask(
                "GET", f"/explain/{quote(given.id, safe='')}" if given.id else f"/explain?last={given.last}"
            )
        case "flush":
            return server.ask("POST", "/flush_cache")
        case "health":
            server.ask("GET", "/health")
            return "it serves"
    return _wish(server, given)


def _shown(answer: Any) -> str:
    """An answer as text for people: one line per receipt, tenant or request."""
    if isinstance(answer, str):
        return answer
    for rows in ("intents", "tenants", "requests"):
        if rows in answer:
            return "\n".join(_shown(row) for row in answer[rows]) or f"no {rows}"
    if "spans" in answer:
        head = f"{answer['id']}: {answer['prompt_tokens']} tokens"
        return "\n".join([head, *(_span(span) for span in answer["spans"])])
    if "verb" in answer:
        parts = [f"{answer['id']} {answer['verb']} {answer['selector']}: {answer['state']}"]
        parts += [f"{tier} {found['tokens']} tokens" for tier, found in answer.get("found", {}).items()]
        if answer["done"]["tokens"]:
            parts.append(f"{answer['done']['tokens']} of {answer['total']['tokens']} tokens")
        parts += [answer[name] for name in ("clipped", "reason") if answer.get(name)]
        return ", ".join(parts)
    return json.dumps(answer)


def _span(span: dict[str, Any]) -> str:
    why = f"{span.get('reason', '')}  {span.get('detail', '')}"
    return f"  {span['start']:>8} {span['end']:>8}  {span['source']:<8} {why}".rstrip()


def _key(given: argparse.Namespace) -> str | None:
    if given.key_file is not None:
        text, _ = read_secret_file("--key-file", given.key_file)
        return checked_key(f"--key-file {given.key_file}", text.strip())
    text = os.environ.get(KEY, "").rstrip("\r\n")
    return checked_key(KEY, text) if text else None


def main(arguments: Sequence[str]) -> int:
    """Run one command: 0, or 1 where the server refuses or a wish ends badly, or with --wait not in time, or 2
    for wrong arguments."""
    given = _parser().parse_args(arguments)
    try:
        answer = _answer(AdminClient(given.url, _key(given)), given)
    except ConfigError as error:
        print(f"hiradix ctl: error: {error}", file=sys.stderr)
        return 2
    except Refused as error:
        print(f"hiradix ctl: {error}", file=sys.stderr)
        return 1
    print(json.dumps(answer, indent=2) if given.json else _shown(answer))
    state = answer.get("state", "") if isinstance(answer, dict) else ""
    if getattr(given, "wait", None) is not None:
        return int(state not in WELL)
    return int(state in BADLY)
