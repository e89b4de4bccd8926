"""A first token's price: what is measured, what is taken until then, and what is never moved."""

import pytest

from hiradix.policy.no_regret import GatedTransfer, NoRegret
from hiradix.policy.prices import UNMEASURED_MOVE, UNMEASURED_RATE, Prices

PAGE = 16
COMPUTING_S = 0.01  # a page
LOADING_S = 0.0005
FETCHING_S = 0.002


def measured(*, load_s: float = LOADING_S, fetch_s: float = FETCHING_S) -> NoRegret:
    gate = NoRegret(page_size=PAGE)
    for pages in (4, 8, 16, 32) * 8:
        gate.computed(pages, pages * COMPUTING_S)
        gate.moved(GatedTransfer.LOAD, pages, pages * load_s)
        gate.moved(GatedTransfer.FETCH, pages, pages * fetch_s)
    return gate


def test_until_anything_is_measured_the_missing_tokens_decide() -> None:
    prices = Prices(NoRegret(page_size=PAGE), PAGE)
    computed_s = 1600 / UNMEASURED_RATE
    assert prices.first_token_s(1600) == pytest.approx(computed_s)
    assert prices.first_token_s(0, 1600) == pytest.approx(UNMEASURED_MOVE * computed_s)
    assert prices.first_token_s(0, 0, 1600) == pytest.approx(2 * UNMEASURED_MOVE * computed_s)
    assert prices.first_token_s(0) == 0.0


def test_each_tier_costs_what_was_measured_of_it() -> None:
    prices, pages = Prices(measured(), PAGE), 20
    tokens = pages * PAGE
    assert prices.first_token_s(tokens) == pytest.approx(pages * COMPUTING_S)
    assert prices.first_token_s(0, tokens) == pytest.approx(pages * LOADING_S)
    assert prices.first_token_s(0, 0, tokens) == pytest.approx(pages * (LOADING_S + FETCHING_S))
    parts = [
        prices.first_token_s(tokens),
        prices.first_token_s(0, tokens),
        prices.first_token_s(0, 0, tokens),
    ]
    assert prices.first_token_s(tokens, tokens, tokens) == pytest.approx(sum(parts))


def test_a_part_of_a_page_is_computed_in_a_part_of_its_time() -> None:
    prices = Prices(measured(), PAGE)
    assert prices.first_token_s(PAGE // 4) == pytest.approx(COMPUTING_S / 4)


def test_what_moves_slower_than_it_is_computed_is_priced_as_computed() -> None:
    slow = 3 * COMPUTING_S
    tokens, computed_s = 20 * PAGE, 20 * COMPUTING_S
    from_host = Prices(measured(load_s=slow, fetch_s=slow), PAGE)
    assert from_host.first_token_s(0, tokens) == pytest.approx(computed_s)
    from_storage = Prices(measured(fetch_s=slow), PAGE)
    assert from_storage.first_token_s(0, 0, tokens) == pytest.approx(computed_s)
    assert from_storage.first_token_s(0, tokens) == pytest.approx(20 * LOADING_S)


def test_prices_are_of_agreed_numbers() -> None:
    """Two ranks that measured differently give one price: the least speed is every rank's."""
    sources: list[list] = []

    def rank() -> NoRegret:
        own: list = []
        sources.append(own)

        def share(source):  # the least of all ranks' sources in the same place
            place = len(own)
            own.append(source)
            return lambda: min(one[place]() for one in sources)

        return NoRegret(share=share, page_size=PAGE)

    gates = [rank(), rank()]
    for gate, seconds in zip(gates, (COMPUTING_S, 3 * COMPUTING_S), strict=True):
        for pages in (4, 8, 16, 32) * 4:
            gate.computed(pages, pages * seconds)
    speeds = [Prices(gate, PAGE).first_token_s(320, 160, 160) for gate in gates]
    assert speeds[0] == speeds[1]
    assert speeds[0] > 20 * 3 * COMPUTING_S
