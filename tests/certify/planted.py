"""Plants faults that can change an answer in a copy of our own server, and shows where `certify` sees each.

    python -m tests.certify.planted             every fault, as the table of docs/certify.md
    python -m tests.certify.planted salt        those whose name contains the word

Over HTTP alone: the copy serves, the code as it is asks. On demand, about half a minute each. The names are
those of the other tables of planted faults; what of them can change no answer is not here, as is what another
layer mends or turns into a miss.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

from tests.cache import planted as cache_table
from tests.certify.own import OwnServer, certified
from tests.e2e.tiny_model import write_tiny_model
from tests.planting import Fault, Planting, survey
from tests.simulation import kill_table
from tests.tree import mutation

NAMED = (
    "walk: a partial page counts as matched",
    "key: the namespace does not reach the root",
    "storage names ignore the namespace",
    "a page's copy loses part of what the other pool has",
    "a finished request frees pages that the tree took",
    "host copies are visible before they are made",
    "split: pages off by one",
    "adopt: slices off by one",
    "evict: a page is freed twice",
    "lock: locked data stays evictable",
    "split: the upper half is not locked",
    "what an allocation gives out is a view of the free list",
)
OWN = (
    Fault(
        "server: the salt does not reach the engine",
        "AddressedBody.namespace",
        "_1 = self.cache_salt",
        "_1 = None",
    ),
)


def faults() -> list[Fault]:
    """The named ones, in order, and those planted here alone."""
    known = [*mutation.FAULTS, *(bug.fault for bug in kill_table.BUGS), *cache_table.FAULTS]
    by_name = {fault.name: fault for fault in known}
    return [*(by_name[name] for name in NAMED), *OWN]


def seen(model: Path, copy: Path) -> str | None:
    """What `certify` says of a server that runs the copy's code; None if it calls it right."""
    with tempfile.TemporaryDirectory(prefix="hiradix-certify-") as folder:
        try:
            with OwnServer(Path(folder), model, copy) as server:
                code, record, text = certified(server)
        except AssertionError as error:
            return f"does not start: {str(error)[-80:]}"
        if code == 0:
            return None
        found = record.get("findings")
        if not isinstance(found, list) or not found:
            return f"status {code}: {str(record.get('verdict') or text.strip())[:110]}"
        answers = [finding for finding in found if finding["fault"] == "wrong answer"] or found
        arms = list(dict.fromkeys(finding["arm"] for finding in answers))
        return f"{answers[0]['fault']} in {', '.join(arms)}: {answers[0]['what'][:90]}"


def main(words: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="hiradix-certify-model-") as folder:
        model = write_tiny_model(Path(folder))
        chosen = [
            Planting((fault.name,), fault, partial(seen, model))
            for fault in faults()
            if not words or any(word in fault.name for word in words)
        ]
        return survey(("planted", "what certify says"), chosen)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
