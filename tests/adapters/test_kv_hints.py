"""vLLM's envelope of hints: its actions of ours are the request's wishes, all else is refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hiradix.adapters.vllm.kv_hints import answers_of_hints
from hiradix.intents import Intent, IntentState, Receipt, Selector, Verb
from hiradix.intents.http import MAX_OF_REQUEST
from hiradix.tree import RadixKey

PROMPT = Selector.prefix(RadixKey([1, 2, 3, 4], cache_salt="alice"))


def action(kind: str, version: str = "1", **payload: Any) -> SimpleNamespace:
    return SimpleNamespace(action_id="a1", action_type=kind, action_version=version, payload=payload)


def answered(
    *actions: SimpleNamespace, selector: Selector = PROMPT
) -> tuple[list[dict[str, Any]], list[Intent]]:
    wishes: list[Intent] = []

    def submit(intent: Intent) -> Receipt:
        wishes.append(intent)
        return Receipt(len(wishes), intent, IntentState.ACCEPTED)

    envelope = SimpleNamespace(protocol_version="1", message_id="m", actions=list(actions))
    return answers_of_hints(envelope, selector, submit), wishes


def test_an_action_of_ours_is_a_wish_of_the_requests_tenant() -> None:
    [hold, bring], wishes = answered(
        action("hiradix.hold", ttl_s=60), action("hiradix.bring", target="storage")
    )
    assert [wish.verb for wish in wishes] == [Verb.HOLD, Verb.BRING] and wishes[0].ttl_s == 60.0
    assert {wish.asked_by for wish in wishes} == {"salt:alice"} and wishes[0].selector is PROMPT
    assert (hold["action_id"], hold["state"], bring["target"]) == ("a1", "accepted", "storage")
    assert answers_of_hints(None, PROMPT, pytest.fail) == []


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (action("pin", ttl_s=60), "action_type"),
        (action("hiradix.hold", "2", ttl_s=60), "action_version"),
        (action("hiradix.hold"), "ttl_s"),
        (action("hiradix.hold", ttl=60), "ttl"),
        (action("hiradix.forget"), "verb"),
    ],
)
def test_what_is_not_known_is_refused_by_name(wrong: SimpleNamespace, field: str) -> None:
    [answer], wishes = answered(wrong)
    assert answer["field"] == field and answer["message"].startswith(field) and not wishes


def test_hints_are_bounded_and_a_tenants() -> None:
    answers, wishes = answered(*[action("hiradix.locate")] * (MAX_OF_REQUEST + 3))
    assert len(wishes) == MAX_OF_REQUEST and answers[-1]["field"] == "kv_hints"
    [refused], none = answered(action("hiradix.locate"), selector=Selector.prefix(RadixKey([1, 2])))
    assert refused["field"] == "cache_salt" and not none
