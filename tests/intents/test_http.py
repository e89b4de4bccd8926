"""Wishes by paths and bodies: what becomes an intent, what is refused by which field, what is answered."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hiradix.errors import BadNamespace
from hiradix.intents import BadIntent, Intent, IntentState, Selector, SelectorKind
from hiradix.intents.http import IntentApi, IntentReply, answers_of_request, intent_of, plain_key, selector_of
from hiradix.intents.records import MAX_SELECTED_CHARS
from hiradix.tree import RadixKey, Tier
from tests.intents.world import GENEROUS, IntentWorld, key_of

LONG = key_of(1, 2, 3, 4, 5, 6)
HERE = {"tokens": LONG.token_ids}
ALICE = "salt:alice"
HALF = "\ud800"  # which JSON carries, and no answer can
Call = Callable[..., IntentReply]


@pytest.fixture
def w() -> Iterator[IntentWorld]:
    world = IntentWorld(replace(GENEROUS), seed=1)
    world.seed(LONG)
    yield world
    world.end()


@pytest.fixture
def call(w: IntentWorld) -> Call:
    api = IntentApi(lambda do: do(w.cache.intents))

    def asked(method: str, path: str, body: Any = None, asked_by: str = "") -> IntentReply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = api.answer(method, path, data, asked_by)
        json.dumps(answer.body, ensure_ascii=False).encode()
        return answer

    return asked


# -- what is answered ---------------------------------------------------------------------


def test_a_look_is_answered_at_once(call: Call) -> None:
    answer = call("POST", "/hicache/prefix/locate", {"selector": HERE})
    assert answer.status == 200 and answer.body["state"] == "done"
    assert {tier: found["tokens"] for tier, found in answer.body["found"].items()} == {
        "device": 12,
        "host": 12,
    }


def test_a_hold_is_accepted_then_held_then_ended(w: IntentWorld, call: Call) -> None:
    answer = call("POST", "/hicache/intents", {"verb": "hold", "selector": HERE, "ttl_s": 60})
    place = f"/hicache/intents/{answer.body['id']}"
    assert answer.status == 202 and answer.body["tiers"] == ["host"]
    w.quiet()
    held = call("GET", place)
    assert (held.status, held.body["state"], held.body["done"]["tokens"]) == (200, "held", 12)
    assert [one["id"] for one in call("GET", "/hicache/intents").body["intents"]] == [held.body["id"]]
    assert call("DELETE", place).body["state"] == "cancelled"
    assert call("GET", place).body["is_end"] and w.held(Tier.HOST) == 0


def test_forget_says_what_is_gone(w: IntentWorld, call: Call) -> None:
    answer = call("POST", "/hicache/prefix/forget", {"selector": HERE, "tiers": ["device", "host"]})
    w.quiet()
    gone = call("GET", f"/hicache/intents/{answer.body['id']}").body["by_tier"]
    assert {tier: amount["pages"] for tier, amount in gone.items()} == {"device": 6, "host": 6}
    assert w.found(LONG)["host"].tokens == 0


def test_what_cannot_be_done_here_is_refused_with_a_receipt(call: Call) -> None:
    answer = call("POST", "/hicache/prefix/bring", {"selector": HERE, "target": "elsewhere"})
    assert answer.status == 409 and "no store 'elsewhere'" in answer.body["reason"]


def test_tenants_see_their_own(w: IntentWorld, call: Call) -> None:
    w.seed(key_of(1, 2, salt="alice"))
    mine = {"selector": {"tokens": key_of(1, 2).token_ids, "cache_salt": "alice"}, "ttl_s": 60}
    answer = call("POST", "/hicache/prefix/hold", mine, ALICE)
    place = f"/hicache/intents/{answer.body['id']}"
    assert answer.status == 202 and call("GET", place, None, ALICE).status == 200
    for method in ("GET", "DELETE"):
        other, none = (call(method, at, None, "salt:bob") for at in (place, "/hicache/intents/999"))
        assert other.status == none.status == 404
        assert other.body["message"].replace(place.rpartition("/")[2], "999") == none.body["message"]
    assert call("GET", "/hicache/intents", None, "salt:bob").body["intents"] == []
    assert call("POST", "/hicache/prefix/hold", {"selector": HERE, "ttl_s": 60}, ALICE).status == 409
    assert {row["tenant"] for row in call("GET", "/hicache/tenants", None, ALICE).body["tenants"]} == {ALICE}
    assert len(call("GET", "/hicache/tenants").body["tenants"]) == 2


def test_a_scheduler_without_a_turn_is_503() -> None:
    def never(_: Any) -> Any:
        raise TimeoutError("the scheduler took no step in 10 s")

    answer = IntentApi(never).answer("GET", "/hicache/tenants")
    assert (answer.status, answer.body) == (503, {"message": "the scheduler took no step in 10 s"})


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/hicache/prefix/hold", 405),
        ("POST", "/hicache/prefix/steal", 404),
        ("PUT", "/hicache/intents", 405),
        ("POST", "/hicache/intents/1", 405),
        ("GET", "/hicache/intents/1", 404),
        ("DELETE", "/hicache/intents/1", 404),
        ("GET", "/hicache/intents/one", 404),
        ("POST", "/hicache/tenants", 405),
    ],
)
def test_paths_and_methods(call: Call, method: str, path: str, status: int) -> None:
    assert call(method, path).status == status


def test_which_paths_are_these() -> None:
    mine = ("/hicache/intents", "/hicache/intents/3", "/hicache/prefix/hold", "/hicache/tenants")
    assert all(map(IntentApi.has, mine))
    assert not any(
        map(IntentApi.has, ("/hicache/intentsx", "/hicache/storage-backend", "/hicache/prefix", "/"))
    )


# -- what becomes an intent ---------------------------------------------------------------


BAD: list[tuple[Any, str]] = [
    (b"{", "body"),
    ([], "body"),
    ({}, "verb"),
    ({"verb": "steal"}, "verb"),
    ({"verb": ["hold"]}, "verb"),
    ({"verb": "locate", "ttl": 3}, "ttl"),
    ({"verb": "locate", HALF: 3}, r"\ud800"),
    ({"verb": "locate"}, "selector"),
    *(
        ({"verb": "locate", "selector": selector}, field)
        for selector, field in (
            ({}, "selector"),
            ({"tokens": [1], "session": "s"}, "selector"),
            ({"token": [1]}, "selector.token"),
            ({"tokens": [1, -1]}, "selector.tokens"),
            ({"tokens": [True]}, "selector.tokens"),
            ({"tokens": [1.5]}, "selector.tokens"),
            ({"tokens": [2**63]}, "selector.tokens"),
            ({"tokens": [1], "cache_salt": 3}, "selector"),
            ({"text": "a"}, "selector.text"),
            ({"everything": False}, "selector.everything"),
            ({"everything": True, "cache_salt": "a"}, "selector.everything"),
            ({"tenant": "a", "cache_salt": "a"}, "selector.tenant"),
            ({"session": ""}, "session"),
            ({"session": "s" * (MAX_SELECTED_CHARS + 1)}, "selector.session"),
            ({"session": HALF}, "selector.session"),
            ({"tenant": HALF}, "selector.tenant"),
            ({HALF: 1}, r"selector.\ud800"),
        )
    ),
    ({"verb": "locate", "selector": HERE, "tiers": "cellar"}, "tiers"),
    ({"verb": "locate", "selector": {"session": "s", "cache_salt": 5}}, "selector"),
    ({"verb": "locate", "selector": HERE, "tiers": {"host": 1}}, "tiers"),
    ({"verb": "hold", "selector": HERE}, "ttl_s"),
    ({"verb": "hold", "selector": HERE, "ttl_s": "60"}, "ttl_s"),
    ({"verb": "hold", "selector": HERE, "ttl_s": True}, "ttl_s"),
    ({"verb": "hold", "selector": HERE, "ttl_s": -1}, "ttl_s"),
    ({"verb": "hold", "selector": HERE, "ttl_s": 60, "max_bytes": 1.5}, "max_bytes"),
    ({"verb": "forget", "selector": HERE, "is_whole": 1}, "is_whole"),
    ({"verb": "bring", "selector": HERE}, "target"),
    ({"verb": "bring", "selector": HERE, "target": "device"}, "target"),
    ({"verb": "bring", "selector": HERE, "target": HALF}, "target"),
    ({"verb": "locate", "selector": HERE, "asked_by": "salt:alice"}, "asked_by"),
]


def test_a_bad_field_is_400_and_named(call: Call) -> None:
    for body, field in BAD:
        answer = call("POST", "/hicache/intents", body)
        assert (answer.status, answer.body["field"]) == (400, field), (body, answer.body)
        assert answer.body["message"].startswith(field)
    assert call("GET", "/hicache/intents").body["intents"] == []


def test_the_path_and_the_body_say_the_same(call: Call) -> None:
    body = {"verb": "forget", "selector": HERE}
    assert call("POST", "/hicache/prefix/locate", body).body["field"] == "verb"


def test_selectors() -> None:
    key = selector_of({"tokens": [1, 2], "extra_key": "lora", "cache_salt": "s"}).key
    assert key is not None and key == RadixKey([1, 2], "lora", cache_salt="s")
    session = selector_of({"session": "chat", "cache_salt": "alice"})
    assert (session.kind, session.name, session.tenant) == (SelectorKind.SESSION, "chat", ALICE)
    assert selector_of({"tenant": ALICE}).name == ALICE
    assert selector_of({"everything": True}).kind is SelectorKind.EVERYTHING
    assert selector_of({"tokens": [], "cache_salt": "alice"}).tenant == ALICE, "a whole namespace"


def test_text_is_for_listeners_with_a_tokenizer() -> None:
    def encode(kind: str, value: Any) -> list[int]:
        if value == "bad":
            raise ValueError("no such role")
        return [len(kind), len(value)]

    key = selector_of({"messages": [{}, {}]}, plain_key, encode).key
    assert key is not None and key == [8, 2]
    with pytest.raises(BadIntent, match="^selector.text: no such role"):
        selector_of({"text": "bad"}, plain_key, encode)


def test_a_key_that_the_engine_cannot_name_is_the_selectors_fault() -> None:
    def refuse(*_: Any) -> RadixKey:
        raise BadNamespace("extra_key", "adapters go by their files")

    with pytest.raises(BadIntent, match="^selector: .*adapters go by their files"):
        selector_of({"tokens": [1]}, refuse)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    ["verb", "selector", "tiers", "ttl_s", "wait_s", "max_bytes", "target", "is_whole", "is_move"]
)
KNOWN = st.sampled_from(["hold", "locate", "forget", "bring", 60, ["host"], HERE, {"everything": True}, True])


@given(st.dictionaries(FIELDS, KNOWN | JSON, max_size=9))
def test_any_body_is_an_intent_or_names_a_field(body: dict[str, Any]) -> None:
    try:
        assert isinstance(intent_of(body, ""), Intent)
    except BadIntent as error:
        assert error.field and str(error)


# -- in a field of a request --------------------------------------------------------------


def test_a_request_wishes_about_its_own_prompt_as_its_tenant(w: IntentWorld) -> None:
    w.seed(key_of(1, 2, salt="alice"))
    own, submit = Selector.prefix(key_of(1, 2, salt="alice")), w.cache.intents.submit
    hold = {"verb": "hold", "ttl_s": 30}
    told = answers_of_request([hold, {"verb": "forget"}, hold | {"selector": HERE}, 3], own, submit)
    assert told[0]["asked_by"] == ALICE
    assert [one.get("field") for one in told] == [None, "verb", "selector", "wishes"]
    w.quiet()
    assert w.held(Tier.HOST, ALICE) == 2 and w.cache.intents.receipts()[0].state is IntentState.HELD
    assert answers_of_request([{}] * 9, own, submit)[0]["field"] == "wishes"
    assert answers_of_request(hold, Selector.prefix(LONG), submit)[0]["field"] == "cache_salt"
    assert answers_of_request([], Selector.prefix(LONG), submit) == [], "as where all are hints"
