"""Wishes of requests inside the engine: alike on all ranks, and each with an answer."""

from __future__ import annotations

import json
from dataclasses import asdict

from hiradix.apps.engine.api import PromptWish, Scope
from hiradix.apps.engine.ranks import _scope


def test_a_requests_wishes_reach_the_other_ranks_as_they_are() -> None:
    hold = PromptWish("cache_control", {"verb": "hold", "ttl_s": 300.0}, 48)
    told = PromptWish("prompt_cache_key", answer={"state": "done"})
    keep = PromptWish("prompt_cache_retention", {"verb": "bring", "target": "storage"}, or_hold_s=86400.0)
    scope = Scope(cache_salt="alice", session="s", wishes=(hold, told, keep))
    assert _scope(json.loads(json.dumps(asdict(scope)))) == scope
    assert _scope(asdict(Scope())) == Scope()
