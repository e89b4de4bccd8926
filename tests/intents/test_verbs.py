"""What each wish does to a cache with real bytes, and what its receipt says of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hiradix.cache.intents.removals import MAX_PAST
from hiradix.cache.intents.table import MAX_RECEIPT_TOKENS
from hiradix.intents import ANY_SESSION, COMMON, BadIntent, Intent, IntentState, Receipt, Selector, Verb
from hiradix.intents.limits import IntentLimits
from hiradix.tree import RadixKey, Tier
from hiradix.tree.merge import merge_path
from tests.intents.world import GENEROUS, WIDE, IntentWorld, key_of, prefix

LONG = key_of(1, 2, 3, 4, 5, 6)


def world(**changes: object) -> IntentWorld:
    return IntentWorld(replace(GENEROUS, **changes), seed=1)  # type: ignore[arg-type]


# -- locate ---------------------------------------------------------------------------------


def test_locate_says_how_far_each_tier_goes_and_changes_nothing():
    w = world()
    w.seed(LONG, key_of(1, 2, 9))
    before = w.cache.tree.render(), w.cache.counters
    found = w.found(key_of(1, 2, 3, 9, 9))
    assert (found["device"].tokens, found["host"].tokens) == (6, 6)
    assert found["host"].by_component == {"full": 3}
    assert w.found(key_of(7))["device"].tokens == 0
    assert (w.cache.tree.render(), w.cache.counters) == before, "a look splits no node and is no use"
    w.end()


def test_locate_is_no_use_for_the_order_of_eviction():
    w = world()
    w.seed(key_of(1, 2), key_of(3, 4))
    w.found(key_of(1, 2))
    w.cache.evict(2)
    assert w.found(key_of(1, 2))["device"].tokens == 0, "the coldest leaves, whoever looked at it"
    assert w.found(key_of(3, 4))["device"].tokens == 4
    w.end()


def test_locate_asks_storage_as_a_job():
    w = world()
    w.cache.attach_storage(w.stores)
    w.seed(LONG)
    wish = Intent(Verb.LOCATE, prefix(1, 2, 3, 4, 5, 6, 7), ("host", "storage"))
    receipt = w.cache.intents.submit(wish)
    assert receipt.state is IntentState.ACCEPTED and not receipt.found["storage"].is_known
    w.quiet()
    assert w.now(receipt).state is IntentState.DONE
    assert w.now(receipt).found["storage"].tokens == 12 and w.now(receipt).found["host"].tokens == 12
    w.end()


def test_locate_in_storage_without_one_is_refused_by_name():
    w = world()
    receipt = w.wish(Verb.LOCATE, prefix(1), "storage")
    assert (receipt.state, receipt.reason) == (IntentState.REFUSED, "no storage is attached")
    w.end()


# -- hold -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["device", "host"])
def test_what_is_held_survives_pressure_that_would_evict_it_ten_times_over(tier):
    w = world()
    w.seed(LONG)
    receipt = w.wish(Verb.HOLD, prefix(1, 2, 3, 4, 5, 6), tier, ttl_s=1000.0)
    assert receipt.state is IntentState.HELD and receipt.done.pages == receipt.total.pages == 6
    w.press(10 * w.setup.device_pages if tier == "device" else 10 * w.setup.host_pages)
    assert w.found(LONG)[tier].tokens == 12
    w.driver.advance(2000.0)
    w.cache.tick()
    assert w.now(receipt).state is IntentState.EXPIRED
    w.press(2 * w.setup.host_pages, base=5000)
    assert w.found(LONG)[tier].tokens == 0, "its lease has ended"
    w.end()


def test_a_hold_on_the_device_brings_what_the_host_has():
    w = world()
    w.seed(LONG)
    w.cache.evict(6)
    assert w.found(LONG)["device"].tokens == 0
    receipt = w.wish(Verb.HOLD, prefix(1, 2, 3, 4, 5, 6), "device")
    assert receipt.state is IntentState.HELD and w.found(LONG)["device"].tokens == 12
    assert w.serve(LONG) == 0
    assert w.now(receipt).saved_tokens == 12
    w.end()


def test_a_hold_brings_what_storage_has():
    w = world()
    w.cache.attach_storage(w.stores)
    w.seed(LONG)
    w.cache.reset()
    assert w.found(LONG)["host"].tokens == 0
    for tier in ("host", "device"):
        receipt = w.wish(Verb.HOLD, prefix(1, 2, 3, 4, 5, 6), tier)
        assert receipt.state is IntentState.HELD, receipt
        assert w.found(LONG)[tier].tokens == 12
    w.end()


def test_a_hold_on_the_host_copies_down_what_the_device_alone_has():
    w = world(write_policy="write_back")
    w.seed(LONG)
    assert w.found(LONG)["host"].by_component == {"full": 0}
    receipt = w.wish(Verb.HOLD, prefix(1, 2, 3, 4, 5, 6), "host")
    assert receipt.state is IntentState.HELD and w.found(LONG)["host"].by_component == {"full": 6}
    w.end()


def test_a_hold_of_nothing_is_refused():
    w = world()
    receipt = w.wish(Verb.HOLD, prefix(7, 8), "host")
    assert receipt.state is IntentState.REFUSED
    assert receipt.reason == "the rest is nowhere in the cache, and no storage is attached"
    assert w.wish(Verb.HOLD, Selector.everything(), "host").reason == "a hold is of a prefix or of a session"
    w.end()


def test_budgets_clip_a_hold_to_its_leading_pages():
    limits = IntentLimits(device_share=0.5, host_share=0.25, tenant_share=0.25)
    w = world(intents=limits)  # host: 12 pages for all, 3 for a tenant
    tenant = "salt:a"
    w.seed(key_of(*range(1, 9), salt="a"), key_of(*range(11, 15)))
    receipt = w.wish(Verb.HOLD, prefix(*range(1, 9), salt="a"), "host", asked_by=tenant)
    assert (receipt.state, receipt.done.pages, receipt.total.pages) == (IntentState.HELD, 3, 8)
    assert receipt.clipped == "salt:a may hold 3 pages in host, and holds 3"
    operators = w.wish(Verb.HOLD, prefix(*range(1, 9), salt="a"), "host")
    assert operators.done.pages == 8 and not operators.clipped, "pages of several leases count once"
    assert w.held(Tier.HOST) == 8 and w.held(Tier.HOST, tenant) == 3
    own = w.wish(Verb.HOLD, prefix(11, 12), "host", max_bytes=w.cache.intents.planner.page_bytes[0])
    assert own.done.pages == 1
    w.check()
    w.end()


def test_asked_again_a_lease_goes_on_with_the_new_end():
    w = world()
    w.seed(LONG)
    first = w.wish(Verb.HOLD, prefix(1, 2, 3), "host", ttl_s=10.0)
    w.quiet(5.0)
    again = w.wish(Verb.HOLD, prefix(1, 2, 3), "host", ttl_s=100.0)
    assert again.id == first.id and 90 < again.remaining_s <= 100
    shorter = w.wish(Verb.HOLD, prefix(1, 2, 3), "host", ttl_s=1.0)
    assert shorter.id == first.id
    w.quiet(2.0)
    assert w.now(first).state is IntentState.EXPIRED and w.held(Tier.HOST) == 0
    w.end()


def test_on_the_device_a_lease_gives_way_to_a_request_that_could_not_run_else():
    w = world()
    w.seed(LONG, key_of(11, 12, 13))
    old = w.wish(Verb.HOLD, prefix(1, 2, 3, 4, 5, 6), "device")
    young = w.wish(Verb.HOLD, prefix(11, 12, 13), "device")
    assert w.cache.evictable_pages() + w.device.available == w.setup.device_pages
    w.serve(key_of(*range(100, 100 + w.setup.device_pages - 6)))
    assert w.now(young).reason == "a request needed the room" and w.now(old).state is IntentState.HELD
    w.serve(key_of(*range(200, 200 + w.setup.device_pages)))
    assert w.now(old).state is IntentState.CANCELLED
    w.end()


def test_no_lease_outlives_its_end_where_room_is_made_between_ticks():
    w = world()
    w.seed(LONG)
    lease = w.wish(Verb.HOLD, prefix(1, 2, 3, 4, 5, 6), "device", ttl_s=10.0)
    w.driver.advance(11.0)
    w.cache.settle()  # as ranks agree on the clock, so does one
    w.cache.evict(w.setup.device_pages)
    assert w.now(lease).state is IntentState.EXPIRED and w.found(LONG)["device"].tokens == 0
    w.end()


# -- forget ---------------------------------------------------------------------------------


def test_forget_takes_what_only_the_prefix_and_its_continuations_have():
    w = world()
    w.cache.attach_storage(w.stores)
    shared, other = key_of(1, 2, 3, 4), key_of(1, 2, 9)
    w.seed(shared, other, key_of(1, 2, 3, 4, 5), key_of(1, 2, 3, 7))
    gone = {*w.names(key_of(1, 2, 3, 4, 5), 3)}
    assert gone <= set(w.storage.pages)
    receipt = w.wish(Verb.FORGET, prefix(1, 2, 3, 4), "device", "host", "storage")
    assert receipt.state is IntentState.DONE
    assert {tier: amount.pages for tier, amount in receipt.by_tier.items()} == {
        "device": 2, "host": 2, "storage": 2,
    }  # fmt: skip
    assert w.found(shared)["host"].tokens == 6, "page 3 is another prompt's too"
    assert w.found(other)["host"].tokens == 6 and w.found(key_of(1, 2, 3, 7))["host"].tokens == 8
    assert not gone & set(w.storage.pages)
    whole = w.wish(Verb.FORGET, prefix(1, 2, 3, 4), "device", "host", "storage", is_whole=True)
    assert whole.state is IntentState.DONE and not w.storage.pages
    assert w.found(other)["host"].tokens == 0
    w.end()


def test_forget_of_a_tenant_leaves_nothing_of_him_and_all_of_others():
    w = world()
    w.cache.attach_storage(w.stores)
    w.seed(key_of(1, 2, salt="a"), key_of(1, 2), key_of(3, 4, salt="a"), key_of(1, salt="b"))
    receipt = w.wish(Verb.FORGET, Selector.tenant_of("salt:a"), "device", "host", "storage")
    assert receipt.state is IntentState.DONE
    assert receipt.by_tier["storage"].pages == 4
    assert "cannot tell" in receipt.clipped, "a store without an account of tenants says so"
    left = set(w.names(key_of(1, 2))) | set(w.names(key_of(1, salt="b")))
    assert set(w.storage.pages) == left
    assert w.found(key_of(1, 2, salt="a"))["host"].tokens == 0
    assert w.found(key_of(1, 2))["host"].tokens == 4
    w.end()


def test_forget_of_everything_empties_all_tiers():
    w = world()
    w.cache.attach_storage(w.stores)
    w.seed(LONG, key_of(3, 4, salt="a"))
    receipt = w.wish(Verb.FORGET, Selector.everything(), "device", "host", "storage")
    assert receipt.state is IntentState.DONE and not receipt.clipped
    assert not w.storage.pages and w.device.available == w.setup.device_pages
    assert w.host.available == w.setup.host_pages
    w.end()


def test_forget_waits_for_what_is_in_use_and_nobody_finds_it_meanwhile():
    w = world()
    w.seed(LONG)
    running = w.run_request(LONG)
    receipt = w.wish(Verb.FORGET, prefix(1, 2, 3, 4, 5, 6), "device", "host", wait_s=10.0)
    assert receipt.state is IntentState.RUNNING and receipt.reason == "in use by requests or copies: 6 pages"
    assert w.cache.match(LONG).loadable_node.end == 0
    assert w.cache.is_blocked(key_of(1, 2, 3, 4, 5, 6, 7)) and not w.cache.is_blocked(key_of(2))
    late = w.wish(Verb.HOLD, prefix(1, 2, 3), "host")
    assert late.state is IntentState.REFUSED and late.reason == f"it is being forgotten by {receipt.id}"
    w.release(running)
    w.quiet()
    assert w.now(receipt).state is IntentState.DONE and w.found(LONG)["host"].tokens == 0
    w.end()


def test_a_forget_that_waits_too_long_says_what_stays():
    w = world()
    w.seed(LONG)
    running = w.run_request(key_of(1, 2, 3))
    receipt = w.wish(Verb.FORGET, prefix(1), "device", "host", wait_s=10.0)
    assert receipt.by_tier["device"].pages == 3, "what nobody uses has gone"
    w.quiet(11.0)
    assert w.now(receipt).state is IntentState.EXPIRED
    assert w.now(receipt).reason == "in use by requests or copies: 3 pages"
    assert w.cache.match(LONG).loadable_node.end == 3, "what stays can be used again"
    w.release(running)
    w.end()


def test_forget_goes_before_leases_of_the_same_owner_and_not_of_others():
    w = world()
    mine, theirs = "salt:a", "salt:b"
    w.seed(key_of(1, 2, 3, salt="a"))
    own = w.wish(Verb.HOLD, prefix(1, 2, 3, salt="a"), "host", asked_by=mine)
    operators = w.wish(Verb.HOLD, prefix(1, 2, salt="a"), "host")
    receipt = w.wish(Verb.FORGET, prefix(1, 2, 3, salt="a"), "device", "host", asked_by=mine)
    assert w.now(own).state is IntentState.CANCELLED and w.now(own).reason == f"forgotten by {receipt.id}"
    assert w.now(operators).state is IntentState.HELD
    assert (
        receipt.state is IntentState.DONE
        and receipt.clipped == "2 pages are held by others' leases, and stay"
    )
    not_his = w.wish(Verb.FORGET, prefix(1, salt="a"), "host", asked_by=theirs)
    assert not_his.reason == "not yours: a tenant names what is in his own namespaces"
    last = w.wish(Verb.FORGET, prefix(1, 2, 3, salt="a"), "device", "host")
    assert last.state is IntentState.DONE and w.now(operators).state is IntentState.CANCELLED
    assert w.found(key_of(1, 2, 3, salt="a"))["host"].tokens == 0
    w.end()


def test_a_fetch_that_is_under_way_brings_nothing_back():
    w = world()
    w.cache.attach_storage(w.stores)
    w.seed(LONG)
    w.cache.reset()
    assert w.cache.prefetcher.start("request", LONG, w.cache.tree.root)
    w.wish(Verb.FORGET, prefix(1, 2, 3, 4, 5, 6), "device", "host", "storage")
    assert w.found(LONG)["host"].tokens == 0 and not w.storage.pages
    assert w.cache.prefetcher.progress("request"), "its request goes on, and computes"
    w.end()


def test_a_forget_taken_before_a_reset_is_carried_out_after_it():
    w = world()
    w.cache.attach_storage(w.stores)
    w.seed(LONG)
    receipt = w.cache.intents.submit(
        Intent(Verb.FORGET, prefix(1, 2, 3, 4, 5, 6), ("device", "host", "storage"))
    )
    w.cache.reset()
    assert w.now(receipt).state is IntentState.ACCEPTED and w.storage.pages
    w.quiet()
    assert w.now(receipt).state is IntentState.DONE and not w.storage.pages
    w.end()


# -- bring ----------------------------------------------------------------------------------


def test_warm_then_request_all_from_the_host():
    w = world()
    w.cache.attach_storage(w.stores)
    w.seed(LONG)
    w.cache.reset()
    receipt = w.wish(Verb.BRING, prefix(1, 2, 3, 4, 5, 6), target="host")
    assert (receipt.state, receipt.done.pages) == (IntentState.DONE, 6)
    assert w.serve(LONG) == 0
    assert w.now(receipt).saved_tokens == 12
    more = w.wish(Verb.BRING, prefix(1, 2, 3, 4, 5, 6, 7, 8), target="host")
    assert more.state is IntentState.DONE and more.done.pages == 6 and more.total.pages == 8
    assert more.clipped
    w.end()


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_persist_brings_everything_to_storage_after_a_late_attach(policy):
    w = world(write_policy=policy)
    w.seed(LONG, key_of(1, 2, 9), key_of(3, salt="a"))
    w.cache.attach_storage(w.stores)
    assert not w.storage.pages
    receipt = w.wish(Verb.BRING, Selector.everything(), target="storage")
    for _ in range(4):
        w.quiet()
    receipt = w.now(receipt)
    assert receipt.state is IntentState.DONE and not receipt.clipped, receipt
    assert receipt.done.pages == receipt.total.pages == 8
    assert len(w.storage.pages) == 8
    w.cache.reset()
    w.wish(Verb.BRING, prefix(1, 2, 3, 4, 5, 6), target="host")
    assert w.serve(LONG) == 0
    w.end()


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("tiers", [("storage",), ("device", "host", "storage")])
def test_persist_of_everything_leaves_out_what_is_forgotten_meanwhile(policy, tiers):
    w = world(write_policy=policy, intents=replace(WIDE, pages_per_tick=2))
    w.seed(LONG, key_of(1, 2, 9), key_of(3, 4, salt="a"), key_of(5, salt="b"))
    w.cache.attach_storage(w.stores)
    bring = w.cache.intents.submit(Intent(Verb.BRING, Selector.everything(), target="storage"))
    w.cache.tick()
    forget = w.cache.intents.submit(Intent(Verb.FORGET, prefix(1, 2, 3, 4, 5, 6), tiers))
    for _ in range(4):
        w.quiet()
    assert w.now(forget).state is IntentState.DONE
    receipt = w.now(bring)
    assert receipt.state is IntentState.DONE
    assert receipt.clipped == f"4 pages are forgotten by {forget.id}", receipt
    stored = {name.split("-")[0] for name in w.storage.pages}
    assert not stored.intersection(w.names(LONG, 2))
    kept = (key_of(1, 2, 9), key_of(3, 4, salt="a"), key_of(5, salt="b"))
    assert all(stored.issuperset(w.names(key)) for key in kept)
    w.end()


def test_persist_leaves_out_what_is_being_forgotten_when_it_begins():
    w = world()
    w.seed(LONG, key_of(3, 4, salt="a"))
    running = w.run_request(LONG)
    w.cache.attach_storage(w.stores)
    forget = w.wish(Verb.FORGET, prefix(1, 2, 3, 4, 5, 6), "device", "host")
    assert forget.state is IntentState.RUNNING, "a request uses it"
    bring = w.wish(Verb.BRING, Selector.everything(), target="storage")
    assert (bring.state, bring.done.pages, bring.total.pages) == (IntentState.DONE, 2, 2)
    assert bring.clipped == f"6 pages are forgotten by {forget.id}"
    assert len(w.storage.pages) == 2
    w.release(running)
    w.quiet()
    w.end()


@pytest.mark.parametrize("is_early", [True, False])
def test_storage_forgets_what_a_request_that_ran_puts_there_again(is_early):
    """It was matched before, and its first use is counted while the names are told one after the other."""
    w = world(intents=replace(WIDE, pages_per_tick=2))
    w.cache.attach_storage(w.stores)
    key = key_of(1, 2, 3, salt="a")
    w.seed(key, key_of(1, 2, 9, salt="a"))
    wish = Intent(Verb.FORGET, Selector.prefix(RadixKey([], cache_salt="a")), ("storage",))
    forget = w.cache.intents.submit(wish)
    w.cache.tick()
    if not is_early:
        w.driver.run()  # storage has been told by then
    w.cache.inserted(w.cache.tree.find(key))
    w.quiet()
    assert w.now(forget).state is IntentState.DONE and not w.storage.pages
    w.end()


@pytest.mark.parametrize("tiers", [("storage",), ("host", "storage")])
def test_a_forget_waits_for_a_copy_that_is_on_its_way_down(tiers):
    w = world()
    w.cache.attach_storage(w.stores)
    w.driver.held.add("write")
    w.serve(LONG)
    forget = w.cache.intents.submit(Intent(Verb.FORGET, prefix(1, 2), tiers))
    w.quiet()
    assert w.now(forget).state is IntentState.RUNNING, "what is copied is stored next"
    w.driver.held.clear()
    w.quiet()
    assert w.now(forget).state is IntentState.DONE and not w.storage.pages
    w.end()


def test_storage_forgets_nodes_that_were_merged_into_one_that_it_was_told():
    w = world(intents=replace(WIDE, pages_per_tick=1))
    w.cache.attach_storage(w.stores)
    w.seed(key_of(1, 2, salt="a"), key_of(1, 2, 3, salt="a"))
    w.cache.tree.forget_stored()
    wish = Intent(Verb.FORGET, Selector.prefix(RadixKey([], cache_salt="a")), ("storage",))
    forget = w.cache.intents.submit(wish)
    w.cache.tick()  # tells the names of the deepest node
    tree = w.cache.tree
    merge_path(tree._residencies, tree.find(key_of(1, 2, 3, salt="a")))  # as an unlock does
    assert sum(1 for _ in tree.nodes()) == 1
    w.quiet()
    assert w.now(forget).state is IntentState.DONE and not w.storage.pages
    w.end()


def test_persist_of_what_another_forgets_ends():
    w = world(write_policy="write_back")
    w.seed(key_of(3, 4, salt="a"))
    w.cache.attach_storage(w.stores)
    bring = w.cache.intents.submit(Intent(Verb.BRING, Selector.tenant_of("salt:a"), target="storage"))
    w.cache.tick()
    own = Intent(Verb.FORGET, prefix(3, 4, salt="a"), ("storage",), asked_by="salt:a")
    forget = w.cache.intents.submit(own)
    w.quiet()
    ended = w.now(bring)
    assert (ended.state, ended.reason) == (IntentState.CANCELLED, f"forgotten by {forget.id}")
    assert w.now(forget).state is IntentState.DONE and not w.storage.pages
    w.end()


def test_persist_without_storage_is_refused_and_to_a_store_that_is_not_open():
    w = world()
    w.seed(LONG)
    receipt = w.wish(Verb.BRING, prefix(1), target="storage")
    assert (receipt.state, receipt.reason) == (IntentState.REFUSED, "no storage is attached")
    receipt = w.wish(Verb.BRING, prefix(1), target="cellar")
    assert receipt.reason == "target: no store 'cellar' is open; others than the cache's own: none"
    w.end()


# -- sessions, tenants, the table ---------------------------------------------------------------


def test_a_session_is_named_by_its_last_prompts():
    w = world()
    w.seed(LONG, key_of(11, 12))
    tree = w.cache.tree
    w.cache.intents.name_session("chat", tree.find(key_of(1, 2, 3)))
    w.cache.intents.name_session("chat", tree.find(LONG))
    w.cache.intents.name_session("chat", tree.find(key_of(11, 12)))
    session = Selector.session("chat")
    receipt = w.wish(Verb.LOCATE, session)
    assert receipt.found["device"].tokens == 16
    held = w.wish(Verb.HOLD, session, "host")
    assert held.state is IntentState.HELD and held.done.pages == 8
    gone = w.wish(Verb.FORGET, session, "device", "host")
    assert gone.state is IntentState.DONE and gone.by_tier["host"].pages == 8
    assert w.wish(Verb.FORGET, session, "device", "host").reason == "nothing is known of that session"
    w.end()


def test_the_ledger_says_what_each_tenant_has():
    w = world()
    w.seed(key_of(1, 2, salt="a"), key_of(5))
    w.wish(Verb.HOLD, prefix(1, 2, salt="a"), "host", asked_by="salt:a")
    size = w.cache.intents.planner.page_bytes[0]
    first, second = w.cache.intents.tenants()
    assert (first.tenant, first.device_bytes, first.host_bytes) == ("salt:a", 2 * size, 2 * size)
    assert dict(first.held_bytes) == {"device": 0, "host": 2 * size} and first.num_leases == 1
    assert dict(first.budget_bytes) == {"device": 6 * size, "host": 12 * size}
    assert (second.tenant, second.host_bytes) == ("", size)
    assert [w.cache.intents.tenants(name) for name in ("salt:a", "", "salt:b")] == [[first], [second], []]
    w.end()


def test_wishes_end_by_their_owner_or_the_operator_alone():
    w = world()
    w.seed(key_of(1, 2, salt="a"))
    lease = w.wish(Verb.HOLD, prefix(1, 2, salt="a"), "host", asked_by="salt:a")
    with pytest.raises(BadIntent, match=f"id: wish {lease.id} is another's"):
        w.cache.intents.cancel(lease.id, "salt:b")
    with pytest.raises(BadIntent, match="id: no wish 999 is known"):
        w.cache.intents.cancel(999)
    assert w.cache.intents.cancel(lease.id, "salt:a").state is IntentState.CANCELLED
    assert w.held(Tier.HOST) == 0
    w.end()


def test_the_table_is_bounded():
    limits = replace(WIDE, max_open=3, max_open_of_tenant=2, max_receipts=4)
    w = world(intents=limits)
    w.seed(*(key_of(page, salt="a") for page in range(1, 6)))
    asked = [w.wish(Verb.HOLD, prefix(page, salt="a"), "host", asked_by="salt:a") for page in range(1, 4)]
    assert asked[-1].reason == "2 leases of 'salt:a' have not ended"
    w.seed(*(key_of(page, salt="b") for page in range(1, 3)))
    asked = [w.wish(Verb.HOLD, prefix(page, salt="b"), "host", asked_by="salt:b") for page in range(1, 3)]
    assert [one.reason for one in asked] == ["", "3 leases have not ended"]
    for page in range(3, 6):
        assert w.wish(Verb.HOLD, prefix(page, salt="a"), "host").state is IntentState.HELD, "the operator's"
    assert w.wish(Verb.HOLD, prefix(2, salt="a"), "host").reason == "3 leases have not ended"
    for _ in range(10):
        w.found(key_of(1))
    assert len(w.cache.intents.receipts()) == 6 + 4
    w.end()


def test_leases_leave_room_for_forgets():
    w = world(intents=replace(WIDE, max_open=2, max_open_of_tenant=2))
    w.seed(*(key_of(page, salt="a") for page in range(1, 4)))
    for page in range(1, 3):
        w.wish(Verb.HOLD, prefix(page, salt="a"), "host", asked_by="salt:a", ttl_s=1000.0)
    gone = w.wish(Verb.FORGET, prefix(3, salt="a"), "device", "host", asked_by="salt:a")
    assert gone.state is IntentState.DONE and w.found(key_of(3, salt="a"))["host"].tokens == 0
    assert w.wish(Verb.FORGET, Selector.everything(), "device", "host").state is IntentState.DONE
    w.end()


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("tiers", lambda s: Intent(Verb.HOLD, s, ("storage",), ttl_s=1.0)),
        ("tiers", lambda s: Intent(Verb.HOLD, s, ("device", "host"), ttl_s=1.0)),
        ("tiers", lambda s: Intent(Verb.FORGET, s, ("cellar",))),
        ("ttl_s", lambda s: Intent(Verb.HOLD, s, ("host",))),
        ("ttl_s", lambda s: Intent(Verb.HOLD, s, ("host",), ttl_s=float("nan"))),
        ("ttl_s", lambda s: Intent(Verb.FORGET, s, ("host",), ttl_s=1.0)),
        ("wait_s", lambda s: Intent(Verb.FORGET, s, ("host",), wait_s=-1.0)),
        ("max_bytes", lambda s: Intent(Verb.BRING, s, target="host", max_bytes=-1)),
        ("target", lambda s: Intent(Verb.BRING, s)),
        ("target", lambda s: Intent(Verb.BRING, s, target="device")),
        ("target", lambda s: Intent(Verb.HOLD, s, ("host",), ttl_s=1.0, target="host")),
        ("is_move", lambda s: Intent(Verb.BRING, s, target="storage", is_move=True)),
        ("is_whole", lambda s: Intent(Verb.LOCATE, s, is_whole=True)),
        ("session", lambda s: Selector.session("")),
    ],
)
def test_a_wish_that_means_nothing_names_its_field(field, make):
    with pytest.raises(BadIntent, match=f"^{field}: ") as raised:
        make(Selector.prefix(RadixKey([1, 2])))
    assert raised.value.field == field


def test_a_lease_lets_go_of_what_a_failed_copy_has_left():
    w = world()
    w.seed(LONG)
    w.cache.evict(6)
    w.transport.faults = 1.0
    assert w.cache.load_back(w.cache.match(LONG)) == 6, "the tree has its device pages at once"
    lease = w.cache.intents.submit(Intent(Verb.HOLD, prefix(1, 2, 3, 4, 5, 6), ("device",), ttl_s=1000.0))
    w.cache.tick()
    assert w.now(lease).state is IntentState.HELD
    w.quiet()
    w.transport.faults = 0.0
    assert (w.now(lease).state, w.now(lease).reason) == (IntentState.FAILED, "a copy of what it held failed")
    w.quiet()
    assert w.device.available == w.setup.device_pages, "nobody keeps what was never copied"
    w.end()


def test_a_tenant_is_told_nothing_of_what_is_anothers():
    w = world()
    w.seed(key_of(1, 2, 3, salt="a"))
    for selector in (prefix(1, 2, 3, salt="a"), Selector.tenant_of("salt:a"), Selector.everything()):
        receipt = w.wish(Verb.LOCATE, selector, "device", "host", asked_by="salt:b")
        assert receipt.state is IntentState.REFUSED and not receipt.found
        assert receipt.reason == "not yours: a tenant names what is in his own namespaces"
    w.end()


def test_a_forget_that_was_not_applied_before_a_reset_is_applied_behind_it():
    w = world()
    w.cache.attach_storage(w.stores)
    w.seed(LONG)
    everything = Intent(Verb.FORGET, Selector.everything(), ("device", "host", "storage"))
    receipt = w.cache.intents.submit(everything)
    w.cache.reset()
    assert w.now(receipt).state is IntentState.ACCEPTED
    w.quiet()
    assert w.now(receipt).state is IntentState.DONE and not w.storage.pages
    w.end()


def test_a_request_that_runs_long_brings_nothing_back_however_many_wishes_came_since():
    w = world()
    began = w.cache.num_forgotten
    w.seed(LONG)
    w.wish(Verb.FORGET, prefix(1, 2, 3, 4, 5, 6), "device", "host")
    for page in range(MAX_PAST):
        w.cache.intents.submit(Intent(Verb.FORGET, prefix(page + 100), ("host",)))
        w.cache.tick()
    assert w.cache.was_forgotten_since(LONG, began)
    assert not w.cache.was_forgotten_since(LONG, w.cache.num_forgotten)
    w.end()


def test_a_fetch_that_others_wait_for_too_brings_back_their_part_alone():
    w = world()
    w.cache.attach_storage(w.stores)
    shared = key_of(1, 2, 3, 9)
    w.seed(LONG, shared)
    w.cache.reset()
    prefetcher = w.cache.prefetcher
    assert prefetcher.start("first", LONG, w.cache.tree.root)
    assert prefetcher.start("second", shared, w.cache.tree.root), "it waits for what the first one brings"
    prefetcher.forget(lambda key: bool(key.tokens[6] == 4))
    w.quiet()
    assert w.found(shared)["host"].tokens == 8 and w.found(LONG)["host"].tokens == 6
    assert prefetcher.progress("first") and prefetcher.progress("second")
    w.end()


def test_a_session_is_its_tenants_also_where_another_has_one_of_that_name():
    w = world()
    w.seed(key_of(1, 2, salt="a"), key_of(1, 2, salt="b"))
    intents = w.cache.intents
    intents.name_session("s", w.cache.tree.find(key_of(1, 2, salt="a")))
    wish = Intent(Verb.FORGET, Selector.session("s", "salt:a"), ("device", "host"), asked_by="salt:a")
    receipt = intents.submit(wish)
    intents.name_session("s", w.cache.tree.find(key_of(1, 2, salt="b")))  # before the tick
    w.quiet()
    assert w.now(receipt).state is IntentState.DONE
    assert w.found(key_of(1, 2, salt="a"))["host"].tokens == 0
    assert w.found(key_of(1, 2, salt="b"))["host"].tokens == 4
    w.end()


def test_a_bring_of_less_than_a_page_stores_nothing_of_its_namespace():
    w = world()
    w.seed(LONG)
    w.cache.attach_storage(w.stores)
    receipt = w.wish(Verb.BRING, Selector.prefix(RadixKey([1])), target="storage")
    assert receipt.state.is_end and not w.storage.pages
    w.end()


def test_a_clipped_lease_that_is_extended_holds_on_meanwhile():
    w = world()
    w.cache.attach_storage(w.stores)
    w.seed(key_of(1, 2, 3, 4))
    longer = prefix(1, 2, 3, 4, 5, 6)
    lease = w.wish(Verb.HOLD, longer, "device")
    assert (lease.state, lease.done.pages) == (IntentState.HELD, 4) and lease.clipped
    w.seed(key_of(11, 12, 13, 14))
    again = w.cache.intents.submit(Intent(Verb.HOLD, longer, ("device",), ttl_s=500.0))
    w.cache.tick()  # storage is asked for the rest
    assert again.id == lease.id
    tree = w.cache.tree
    tree.unlock(tree.lock(tree.match(key_of(11, 12, 13, 14)).device_node, Tier.DEVICE))
    w.cache.evict(4)  # others' pages can go, however late they were used
    assert w.found(key_of(1, 2, 3, 4))["device"].tokens == 8
    w.quiet()
    assert w.now(lease).state is IntentState.HELD and w.now(lease).remaining_s > 400.0
    assert w.held(Tier.DEVICE) == 4
    w.cache.intents.cancel(lease.id)
    w.cache.evict(4)
    assert w.found(key_of(1, 2, 3, 4))["device"].tokens == 0
    w.end()


def test_what_is_known_of_wishes_that_have_ended_is_bounded_in_tokens():
    w = world()
    began, size = w.cache.num_forgotten, MAX_RECEIPT_TOKENS // 4
    for page in range(6):
        key = RadixKey(np.full(size, page))
        w.cache.intents.submit(Intent(Verb.FORGET, Selector.prefix(key), ("host",)))
        w.cache.tick()
    kept = w.cache.intents.receipts()
    assert [receipt.id for receipt in kept] == [3, 4, 5, 6]
    assert w.cache.was_forgotten_since(LONG, began), "it may have been"
    assert not w.cache.was_forgotten_since(LONG, began + 2)
    w.end()


def test_a_fetch_of_what_is_forgotten_stops_no_later_one_of_the_same_handle():
    w = world()
    w.cache.attach_storage(w.stores)
    other = key_of(11, 12, 13)
    w.seed(LONG, other)
    w.cache.reset()
    prefetcher = w.cache.prefetcher
    assert prefetcher.start("one", LONG, w.cache.tree.root)
    assert prefetcher.start("one", other, w.cache.tree.root), "the first one's request is gone"
    prefetcher.forget(lambda key: bool(key.tokens[0] == 1))
    w.quiet()
    assert w.found(LONG)["host"].tokens == 0
    assert w.found(other)["host"].tokens == 6
    assert prefetcher.progress("one")
    w.end()


# -- leases of a session --------------------------------------------------------------------


def mark(
    w: IntentWorld, *pages: int, session: str = "s", ttl_s: float = 60.0, salt: str | None = "a"
) -> Receipt:
    """A hold as a request's mark of its prompt makes it; carried out, as far as it goes by itself."""
    owner = f"salt:{salt}" if salt else COMMON
    return w.wish(Verb.HOLD, prefix(*pages, salt=salt), "host", ttl_s=ttl_s, series=session, asked_by=owner)


def test_a_mark_that_moves_on_is_one_lease_with_a_new_end():
    w = world(intents=IntentLimits(host_share=1.0, tenant_share=1.0))
    w.seed(key_of(1, 2, 3, 4, 5, 6, salt="a"))
    first = mark(w, 1, 2)
    assert (first.state, first.done.pages) == (IntentState.HELD, 2)
    w.driver.advance(50.0)
    second = mark(w, 1, 2, 3, 4)
    assert second.id == first.id and (second.state, second.done.pages) == (IntentState.HELD, 4)
    assert second.remaining_s > 55.0 and len(w.cache.intents.book.leases) == 1
    assert mark(w, 1, 2, 3, 4).id == first.id, "the same again"
    system = mark(w, 1, ttl_s=3600.0)
    assert system.id != first.id, "another time to live is another lease"
    assert mark(w, 1, ttl_s=3600.0).id == system.id
    assert mark(w, 1, 2, 3, 4, 5, session="t").id not in (first.id, system.id), "another session's"
    w.end()


def test_a_session_holds_four_prompts_that_do_not_continue_each_other():
    w = world(intents=IntentLimits(host_share=1.0, tenant_share=1.0, max_open_of_tenant=4))
    w.seed(*(key_of(1, n, salt="a") for n in range(2, 8)))
    leases = [mark(w, 1, n) for n in range(2, 6)]
    assert mark(w, 1, 2).id == leases[0].id, "renewed: the second is the oldest now"
    mark(w, 1, 6)
    states = [w.now(lease).state for lease in leases]
    assert states == [IntentState.HELD, IntentState.CANCELLED, IntentState.HELD, IntentState.HELD]
    assert "session" in w.now(leases[1]).reason
    assert w.cache.intents.end_series("salt:a", "t") == 0
    assert w.cache.intents.end_series("salt:a", "s") == 4 and not w.cache.intents.book.leases
    w.end()


def test_without_a_session_only_what_is_continued_is_replaced():
    w = world(intents=IntentLimits(host_share=1.0, tenant_share=1.0))
    w.seed(*(key_of(1, n, 9, salt=None) for n in range(2, 9)))
    leases = [mark(w, 1, n, session=ANY_SESSION, salt=None) for n in range(2, 9)]
    assert all(w.now(lease).state is IntentState.HELD for lease in leases), "each its own"
    assert mark(w, 1, 4, 9, session=ANY_SESSION, salt=None).id == leases[2].id
    w.end()


def test_of_prompts_that_leave_one_in_the_same_step_each_is_held():
    w = world(intents=IntentLimits(host_share=1.0, tenant_share=1.0))
    w.seed(*(key_of(1, 2, n, salt="a") for n in range(3, 6)))
    first = mark(w, 1, 2, session=ANY_SESSION)
    wishes = [
        Intent(
            Verb.HOLD, prefix(1, 2, n, salt="a"), ("host",), ttl_s=60.0, series=ANY_SESSION, asked_by="salt:a"
        )
        for n in range(3, 6)
    ]
    asked = [w.cache.intents.submit(wish) for wish in wishes]
    w.quiet()
    assert [one.id == first.id for one in asked] == [True, False, False], "one goes on, others are new"
    assert [w.now(one).done.pages for one in asked] == [3, 3, 3]
    assert w.held(Tier.HOST) == 5
    w.end()


def test_requests_of_no_tenant_name_what_is_nobodys_within_one_tenants_budget():
    w = world(intents=IntentLimits(host_share=0.5, tenant_share=0.25))  # of 48 pages
    w.seed(key_of(*range(1, 9)), key_of(1, 2, salt="a"))
    held = mark(w, *range(1, 9), salt=None)
    assert held.done.pages == 6 and "common may hold 6 pages" in held.clipped
    theirs = Intent(Verb.HOLD, prefix(1, 2, salt="a"), ("host",), ttl_s=60.0, asked_by=COMMON)
    assert w.cache.intents.submit(theirs).state is IntentState.REFUSED
    w.end()
