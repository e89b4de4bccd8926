"""Our classes by SGLang's own calls, over SGLang's own pools, allocators, keys and records, in its process.

They do what they do over ours: then whatever the other tests here compare holds for these too.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.differential import ours
from tests.differential.compare import explain, parting, play_on_peer
from tests.differential.door import NEWEST, OLDEST
from tests.differential.streams import Setup, Stream, draw

SETUPS = [
    *(("turns", Setup(size, 80)) for size in (1, 4, 16)),
    *(
        ("held", Setup(size, 40, 30.0, policy))
        for size in (1, 16)
        for policy in ("write_through", "write_back")
    ),
    *(("anywhere", Setup(size, 80, window=12, num_window_pages=45)) for size in (1, 4)),
]


@pytest.fixture(scope="module", params=[OLDEST, NEWEST])
def played(request: Any) -> list[tuple[Stream, list[dict[str, Any]]]]:
    streams = [stream for kind, setup in SETUPS for stream in draw(kind, setup, range(3))]
    return list(zip(streams, play_on_peer(streams, f"door {request.param}")))


def test_over_upstreams_own_objects_ours_do_the_same(played: list[tuple[Stream, Any]]) -> None:
    for stream, seen in played:
        own = ours.run(stream)
        at = parting(seen, own)
        assert at is None, explain(stream, seen, own, at)
        assert all(step["exact"] for step in seen)
    assert any("H" in tiers for _, seen in played for step in seen for tiers in step["pages"].values())
