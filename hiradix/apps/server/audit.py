"""The audit log: a line for each administrative act and for each key that is refused.

Lines of `hiradix.audit` are written at every `--log-level`. They have the peer's address and no part of any
key.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

AUDIT = logging.getLogger("hiradix.audit")
REFUSED_EVERY_S = 10.0
MAX_PEERS = 256
MAX_SHOWN = 200


def peer_of(scope: Mapping[str, Any]) -> str:
    """Address and port of the other end of the connection; what headers say of it is not believed."""
    client = scope.get("client")
    if not client:
        return "an unknown peer"
    host, port = client[0], client[1]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


def plain(text: object) -> str:
    """Text of a request as one short line of the log."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in str(text))
    return shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}..."


def act(scope: Mapping[str, Any], what: str, result: str) -> None:
    """Log an administrative act and what came of it."""
    AUDIT.info("%s by %s: %s", what, peer_of(scope), result)


class RefusedKeys:
    """Logs requests without a key that is needed: of each address one line in REFUSED_EVERY_S, with the
    number of those that had none meanwhile. Keeps MAX_PEERS addresses."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        # By address: when it was logged last, and how often it was not since.
        self._logged: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def tell(self, scope: Mapping[str, Any], why: str) -> None:
        """why: what is wrong with the key. O(1)."""
        now_s, host = self._clock(), str((scope.get("client") or ("",))[0])
        last_s, num_held = self._logged.pop(host, (float("-inf"), 0))
        if now_s - last_s < REFUSED_EVERY_S:
            self._logged[host] = last_s, num_held + 1
            return
        self._logged[host] = now_s, 0
        if len(self._logged) > MAX_PEERS:
            self._logged.popitem(last=False)
        more = f" (and {num_held} more of this address)" if num_held else ""
        path = plain(scope["path"])
        AUDIT.warning("%s %s by %s refused: %s%s", scope["method"], path, peer_of(scope), why, more)
