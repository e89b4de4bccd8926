"""Prices a request: the seconds until its first token, from what each tier has of its prompt."""

from __future__ import annotations

from hiradix.policy.no_regret import GatedTransfer, NoRegret

UNMEASURED_RATE = 10_000.0  # tokens computed in a second, until that is measured
UNMEASURED_MOVE = 0.1  # of computing: what a load or a fetch is taken to cost until it is measured


class Prices:
    """Predicted seconds until a first token, from the costs that the no-regret gate measures while serving.

    Of agreed numbers only, so ranks decide alike. What is slower moved than computed is priced as computed,
    as the gate refuses to move it. page_size: tokens of one of the gate's pages.
    """

    def __init__(self, gate: NoRegret, page_size: int) -> None:
        self._gate = gate
        self._page_size = page_size

    def first_token_s(self, computed: int, loaded: int = 0, fetched: int = 0) -> float:
        """Tokens that are computed, loaded from the host, and fetched from storage and loaded then."""
        price_s = self._computing_s(computed)
        for num_tokens, moves in (
            (loaded, (GatedTransfer.LOAD,)),
            (fetched, (GatedTransfer.FETCH, GatedTransfer.LOAD)),
        ):
            if num_tokens > 0:
                computing_s = self._computing_s(num_tokens)
                moving_s = sum(self._moving_s(move, num_tokens, computing_s) for move in moves)
                price_s += min(computing_s, moving_s)
        return price_s

    def _computing_s(self, num_tokens: int) -> float:
        return self._gate.computing_s(num_tokens / self._page_size) or num_tokens / UNMEASURED_RATE

    def _moving_s(self, move: GatedTransfer, num_tokens: int, computing_s: float) -> float:
        num_pages = -(-num_tokens // self._page_size)
        return self._gate.predicted_s(move, num_pages) or UNMEASURED_MOVE * computing_s
