"""Requests that a foreign web page makes a browser send to a server on this machine, recognised by their
headers.

A page needs no key for that and reads no answer: it asks, and what it asks for is done. So requests that
carry no valid key are refused where they name another host than this server's (a name that resolves to it
since a moment ago), come from another origin, or have a body of a type that pages may send anywhere.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from hiradix.errors import ConfigError

Headers = Iterable[tuple[bytes, bytes]]
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is of this machine alone."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Allowed:
    """hosts: names in `Host` beside loopback ones; None: any. origins: pages that may ask."""

    hosts: frozenset[str] | None = None
    origins: frozenset[str] = frozenset()

    def refusal(self, method: str, headers: Headers) -> str | None:
        """The reason to refuse a request without a valid key, beginning with the header's name; None if it is
        allowed."""
        found: dict[bytes, bytes] = {}
        for name, value in headers:
            found.setdefault(name.lower(), value)
        host = found.get(b"host", b"").decode("latin-1").strip().lower()
        if b"host" in found and self.hosts is not None and not self._is_ours(host):
            return "Host: not a name of this server; --allowed-hosts adds some"
        origin = found.get(b"origin")
        if origin is not None:
            return self._of_page(method, host, origin, found)
        if found.get(b"sec-fetch-site", b"none").lower() not in (b"none", b"same-origin"):
            return "Sec-Fetch-Site: sent by a page of another origin"
        if b"referer" in found and _place(found[b"referer"].decode("latin-1").lower()) != host:
            return "Referer: sent by a page of another origin"
        return None

    def _of_page(self, method: str, host: str, origin: bytes, found: dict[bytes, bytes]) -> str | None:
        page = origin.decode("latin-1").strip().lower()
        if page not in self.origins and (not host or _place(page) != host):
            return "Origin: another page's; --allowed-origins adds some"
        kind = found.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if method not in SAFE_METHODS and method != "DELETE" and kind != b"application/json":
            return "Content-Type: with an Origin it must be application/json"
        return None

    def _is_ours(self, host: str) -> bool:
        name = _name(host)
        return is_loopback(name) or (self.hosts is not None and name in self.hosts)


def allowed(bound: str, hosts: str | None, origins: str | None) -> Allowed:
    """The names and origins allowed to a server on the address `bound`, from lists with commas. A server that
    others reach, too, has names that are not known here: any is allowed unless there is a list. Raises
    ConfigError naming the flag."""
    given = {_name(name) for name in _listed(hosts)}
    found: frozenset[str] | None = None
    if "*" not in given and (given or is_loopback(bound.strip("[]").lower())):
        found = frozenset({*given, bound.strip("[]").lower()})
    pages = frozenset(_origin(page) for page in _listed(origins))
    for page in pages:
        parts = urlsplit(page)
        if (
            parts.scheme not in ("http", "https")
            or f"{parts.scheme}://{parts.netloc}" != page
            or not parts.netloc
        ):
            raise ConfigError(f"--allowed-origins {page}: expected http://HOST[:PORT] or https://HOST[:PORT]")
    return Allowed(found, pages)


def _listed(text: str | None) -> list[str]:
    return [part.strip().lower() for part in (text or "").split(",") if part.strip()]


def _origin(page: str) -> str:
    """An origin as browsers send it: without the port that its scheme has anyway."""
    scheme = page.partition("://")[0]
    return page.removesuffix(_DEFAULT_PORTS.get(scheme, "\0"))


def _name(host: str) -> str:
    """A host without its port, brackets, and dot at the end."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name = host.partition(":")[0] if host.count(":") == 1 else host
    return name.rstrip(".")


def _place(address: str) -> str:
    """Host and port of a page, as `Host` would have them; "" of what has none, such as `null`."""
    scheme, is_address, rest = address.partition("://")
    place = rest.partition("/")[0] if is_address else ""
    return place.removesuffix(_DEFAULT_PORTS.get(scheme, "\0"))
