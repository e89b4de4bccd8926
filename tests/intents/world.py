"""A whole cache with real bytes and simulated time (`tests.cache.world`), whose requests may be refused a place
in the tree while what they compute is being forgotten."""

from __future__ import annotations

from hiradix.intents import Found, Intent, IntentState, Receipt, Selector, Verb
from hiradix.intents.limits import IntentLimits
from hiradix.tree import RadixKey, Tier
from hiradix.tree.hashing import hash_pages
from tests.cache.world import PAGE_SIZE, Admitted, Running, Setup, World

WIDE = IntentLimits(device_share=0.5, host_share=0.5, tenant_share=0.5)
GENEROUS = Setup(device_pages=24, host_pages=48, intents=WIDE)


def key_of(*pages: int, salt: str | None = None) -> RadixKey:
    """A key of pages that are each one number."""
    return RadixKey([token for page in pages for token in (page, page + 1000)], cache_salt=salt)


def prefix(*pages: int, salt: str | None = None) -> Selector:
    return Selector.prefix(key_of(*pages, salt=salt))


class IntentWorld(World):
    """See the module's docstring."""

    def _compute(self, one: Admitted) -> Running:
        if not self.cache.is_blocked(one.key):
            return super()._compute(one)
        self.cache.count_use(one.lock.node)
        self.device.free(one.pages)
        self.known.add(one.key)
        return Running(one.key, one.lock, len(one.pages))

    def serve(self, key: RadixKey) -> int:
        """One request from its arrival to its end; how many pages it had to compute."""
        running = self.run_request(key)
        assert running is not None, "the device has no room"
        self.release(running)
        return running.num_computed

    def seed(self, *keys: RadixKey) -> None:
        """Serve these, and let everything go down as far as it goes."""
        for key in keys:
            self.serve(key)
        self.quiet()

    def quiet(self, seconds: float = 0.0) -> None:
        """Time passes, and all that is under way ends."""
        self.driver.advance(seconds)
        for _ in range(12):
            self.cache.start_loading()
            self.driver.run()
            self.cache.tick()

    def wish(self, verb: Verb, selector: Selector, *tiers: str, **more: object) -> Receipt:
        """Submit a wish and let it be carried out, as far as it goes by itself."""
        if verb is Verb.HOLD:
            more = {"ttl_s": 60.0, **more}
        receipt = self.cache.intents.submit(Intent(verb, selector, tiers, **more))  # type: ignore[arg-type]
        self.quiet()
        return self.now(receipt)

    def now(self, receipt: Receipt) -> Receipt:
        """What has become of it by now."""
        found = self.cache.intents.receipt(receipt.id)
        assert found is not None
        return found

    def found(self, key: RadixKey) -> dict[str, Found]:
        """How far a prefix is there."""
        receipt = self.cache.intents.submit(Intent(Verb.LOCATE, Selector.prefix(key)))
        assert receipt.state is IntentState.DONE
        return dict(receipt.found)

    def names(self, key: RadixKey, first: int = 0) -> list[str]:
        """What storage calls the pages of `key` from page `first` on."""
        rows = self.cache.tree.rows_behind(key, key.space.seed, 0, len(key) // PAGE_SIZE)
        return [digest.hex() for digest in hash_pages(rows)][first:]

    def press(self, num_pages: int, base: int = 500) -> None:
        """Serve prompts that nobody shares, of so many pages together, four at a time."""
        for start in range(base, base + num_pages, 4):
            self.serve(key_of(*range(start, start + 4)))
            self.quiet()

    def held(self, tier: Tier, tenant: str | None = None) -> int:
        """Backbone pages that leases hold."""
        return self.cache.intents.book.held(tier, tenant)[0]

    def end(self) -> None:
        """Everything ends, and nothing is held."""
        for receipt in self.cache.intents.receipts():
            self.cache.intents.cancel(receipt.id)
        self.assert_drained()
