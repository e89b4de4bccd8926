"""Random lives of a cache with wishes mixed in, beside a plain model of what was wished: sets of pages."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hiradix.intents import Intent, IntentState, Receipt, Selector, Verb
from hiradix.tree import RadixKey, Tier
from tests.cache.world import PAGE_SIZE, Running, Setup
from tests.intents.world import WIDE, IntentWorld, key_of

SALTS = (None, "a", "b")
OWNERS = ("", "salt:a", "salt:b")
FORGOTTEN = [("device", "host", "storage"), ("device",), ("host",), ("storage",)]
TIERS = {"device": Tier.DEVICE, "host": Tier.HOST}
Page = tuple[str | None, tuple[int, ...]]  # the salt, and all tokens up to its end

prompts = st.builds(
    lambda pages, salt: key_of(*pages, salt=salt),
    st.lists(st.integers(1, 3), min_size=1, max_size=6),
    st.sampled_from(SALTS),
)


def pages_of(key: RadixKey, count: int | None = None) -> set[Page]:
    """The first pages of `key`, each by all that decides it."""
    last = len(key) // PAGE_SIZE if count is None else count
    return {(key.cache_salt, tuple(key.tokens[: (page + 1) * PAGE_SIZE].tolist())) for page in range(last)}


class Wishes(RuleBasedStateMachine):
    """The rules are an engine's, an operator's and a tenant's moves; the invariants are what wishes promise."""

    @initialize(
        seed=st.integers(0, 1000),
        device=st.integers(8, 20),
        host=st.integers(6, 30),
        policy=st.sampled_from(["write_through", "write_through_selective", "write_back"]),
        has_storage=st.booleans(),
    )
    def begin(self, seed: int, device: int, host: int, policy: str, has_storage: bool) -> None:
        limits = replace(WIDE, tenant_share=0.4, pages_per_tick=4, max_open=12, max_ttl_s=40.0)
        self.w = IntentWorld(Setup(device, host, policy, intents=limits), seed)
        self.running: list[Running] = []
        self.ids: list[int] = []
        if has_storage:
            self.w.cache.attach_storage(self.w.stores)

    # -- an engine ------------------------------------------------------------------------

    @rule(key=prompts, keep=st.booleans())
    def serve(self, key: RadixKey, keep: bool) -> None:
        self.w.cache.tick()
        self.what_is_forgotten_is_gone()
        running = self.w.run_request(key)
        self.drop_ended_forgets()  # what they forgot may have been computed again since
        if running is not None and keep and len(self.running) < 2:
            self.running.append(running)
        elif running is not None:
            self.w.release(running)

    @precondition(lambda self: self.running)
    @rule()
    def end_request(self) -> None:
        self.w.release(self.running.pop(0))

    @rule(seconds=st.sampled_from([0.0, 0.1, 5.0, 31.0]))
    def go_on(self, seconds: float) -> None:
        self.w.quiet(seconds)

    @rule()
    def tick(self) -> None:
        self.w.cache.tick()

    @rule(count=st.integers(1, 6))
    def evict(self, count: int) -> None:
        self.w.cache.evict(count)

    @rule(faults=st.sampled_from([0.0, 0.3]))
    def weather(self, faults: float) -> None:
        self.w.storage.faults = self.w.transport.faults = faults

    @precondition(lambda self: not self.running)
    @rule()
    def reset(self) -> None:
        self.w.storage.faults = self.w.transport.faults = 0.0
        self.w.quiet()
        self.w.cache.reset()
        assert not any(self.now(number).state is IntentState.HELD for number in self.ids)

    # -- wishes ---------------------------------------------------------------------------

    @rule(key=prompts, tier=st.sampled_from(["device", "host"]), owner=st.sampled_from(OWNERS),
          ttl_s=st.sampled_from([1.0, 20.0, 100.0]))  # fmt: skip
    def hold(self, key: RadixKey, tier: str, owner: str, ttl_s: float) -> None:
        wish = Intent(Verb.HOLD, Selector.prefix(key), (tier,), ttl_s=ttl_s, wait_s=5.0, asked_by=owner)
        self.submit(wish)

    @rule(key=prompts, owner=st.sampled_from(OWNERS), is_whole=st.booleans(),
          tiers=st.sampled_from(FORGOTTEN))  # fmt: skip
    def forget(self, key: RadixKey, owner: str, is_whole: bool, tiers: tuple[str, ...]) -> None:
        wish = Intent(
            Verb.FORGET, Selector.prefix(key), tiers, wait_s=10.0, is_whole=is_whole, asked_by=owner
        )
        self.submit(wish)

    @rule(tenant=st.sampled_from(OWNERS[1:]))
    def forget_tenant(self, tenant: str) -> None:
        wish = Intent(Verb.FORGET, Selector.tenant_of(tenant), ("device", "host", "storage"), wait_s=10.0)
        self.submit(wish)

    @rule(key=prompts, where=st.sampled_from(["host", "storage"]))
    def bring(self, key: RadixKey, where: str) -> None:
        self.submit(Intent(Verb.BRING, Selector.prefix(key), target=where, wait_s=20.0))

    @rule(key=prompts)
    def locate(self, key: RadixKey) -> None:
        before = self.w.cache.tree.render()
        self.submit(Intent(Verb.LOCATE, Selector.prefix(key), ("device", "host", "storage")))
        assert self.w.cache.tree.render() == before

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.w.cache.intents.cancel(data.draw(st.sampled_from(self.ids)))

    def submit(self, wish: Intent) -> None:
        receipt = self.w.cache.intents.submit(wish)
        if receipt.id not in self.ids:
            self.ids.append(receipt.id)

    def now(self, number: int) -> Receipt:
        found = self.w.cache.intents.receipt(number)
        assert found is not None
        return found

    # -- what is promised -----------------------------------------------------------------

    @invariant()
    def all_invariants_hold(self) -> None:
        if hasattr(self, "w"):
            self.w.cache.check()

    @invariant()
    def what_is_held_is_there_and_within_its_budgets(self) -> None:
        if not hasattr(self, "w"):
            return
        held: dict[tuple[str, str | None], set[Page]] = {}
        for number in self.ids:
            receipt = self.now(number)
            if receipt.state is not IntentState.HELD:
                continue
            key, tier = receipt.intent.selector.key, receipt.intent.tiers[0]
            assert key is not None
            count = receipt.done.pages
            there = self.w.found(key)[tier].by_component["full"]
            assert there >= count, (receipt, there)
            for owner in (None, receipt.intent.asked_by):
                held.setdefault((tier, owner), set()).update(pages_of(key, count))
        setup, limits = self.w.setup, self.w.setup.intents
        for (tier, owner), pages in held.items():
            total = setup.device_pages if tier == "device" else setup.host_pages
            share = limits.device_share if tier == "device" else limits.host_share
            if owner:
                share *= limits.tenant_share
            assert len(pages) <= int(share * total), (tier, owner, len(pages))
            assert len(pages) == self.w.held(TIERS[tier], owner)

    @invariant()
    def what_is_forgotten_is_gone(self) -> None:
        """Of each forget that has just ended and left nothing out."""
        if not hasattr(self, "w"):
            return
        for number in list(self.ids):
            receipt = self.now(number)
            if receipt.verb is not Verb.FORGET or not receipt.state.is_end:
                continue
            self.ids.remove(number)
            if receipt.state is IntentState.DONE and not receipt.clipped.endswith("and stay"):
                self.check_gone(receipt)

    def drop_ended_forgets(self) -> None:
        for number in list(self.ids):
            if self.now(number).verb is Verb.FORGET and self.now(number).state.is_end:
                self.ids.remove(number)

    def check_gone(self, receipt: Receipt) -> None:
        selector = receipt.intent.selector
        for node in self.w.cache.tree.nodes():
            path = self.w.cache.tree.path_key(node)
            if selector.key is None:
                is_his = path.space.tenant == selector.name
            else:
                end = 1 if receipt.intent.is_whole else len(selector.key) // PAGE_SIZE
                is_his = pages_of(selector.key, end) <= pages_of(path)
            if is_his:
                tiers = [name for name, tier in TIERS.items() if node.resident(tier)]
                assert not set(tiers) & set(receipt.intent.tiers), (receipt, path, tiers)

    def teardown(self) -> None:
        if not hasattr(self, "w"):
            return
        for running in self.running:
            self.w.release(running)
        self.w.storage.faults = self.w.transport.faults = 0.0
        self.w.quiet()
        self.w.quiet(60.0)
        for number in self.ids:
            assert self.now(number).state is not IntentState.HELD, "no lease outlives its end"
        self.w.end()


TestWishes = Wishes.TestCase
TestWishes.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
