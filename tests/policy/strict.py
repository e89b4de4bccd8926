"""An admission policy that must be told everything in the only order that is right."""

from __future__ import annotations

from collections.abc import Mapping

from hiradix.policy.admission import AdmissionPolicy, WaitingRequest


class Strict(AdmissionPolicy):
    """Hands on to a real policy what is called in the only order that is right, once each."""

    def __init__(self, real: AdmissionPolicy) -> None:
        self.real = real
        self.capacity = real.capacity
        self.name, self.reads_prices = real.name, real.reads_prices
        self.follows_sessions = real.follows_sessions
        self.state: dict[str, str] = {}
        self.running: dict[str, int] = {}
        self.session: dict[str, str] = {}
        self.now_s = 0.0

    @property
    def waiting(self) -> dict[str, WaitingRequest]:  # type: ignore[override]
        return self.real.waiting

    def _at(self, now_s: float) -> None:
        assert now_s >= self.now_s, "time goes on"
        self.now_s = now_s

    def _move(self, rid: str, before: tuple[str, ...], after: str) -> None:
        assert self.state.get(rid, "new") in before, (rid, self.state.get(rid), after)
        self.state[rid] = after

    def add(self, request: WaitingRequest) -> None:
        self._move(request.rid, ("new",), "waits")
        self._at(request.arrived_s)
        assert request.cold_price_s > 0 and request.footprint > 0
        self.session[request.rid] = request.session
        self.real.add(request)

    def start(self, rid: str, now_s: float) -> None:
        self._move(rid, ("waits",), "started")
        self._at(now_s)
        self.real.start(rid, now_s)

    def computed(self, rid: str, served_s: float) -> None:
        self._move(rid, ("started",), "answering")
        assert served_s > 0
        self.running[self.session[rid]] = self.running.get(self.session[rid], 0) + 1
        self.real.computed(rid, served_s)

    def end(self, session: str, now_s: float, stop: str = "") -> None:
        self._at(now_s)
        assert self.running[session] > 0, "no answer of it was begun"
        assert stop in ("end_turn", "tool_use", "length", "abort", "")
        self.running[session] -= 1
        self.real.end(session, now_s, stop)

    def remove(self, rid: str, now_s: float) -> None:
        self._move(rid, ("waits", "started"), "gone")
        self._at(now_s)
        self.real.remove(rid, now_s)

    def forget(self, session: str) -> None:
        assert not self.running.get(session)
        self.real.forget(session)

    def is_in(self, session: str) -> bool:
        return self.real.is_in(session)

    @property
    def num_in(self) -> int:
        return self.real.num_in

    def take_left(self) -> list[str]:
        return self.real.take_left()

    def order(self, now_s: float, prices: Mapping[str, float]) -> list[str]:
        assert now_s >= self.now_s, "it is asked as of now, or of when a prefill has ended"
        assert not self.reads_prices or all(price > 0 for price in prices.values())
        assert set(prices) <= set(self.waiting)
        found = self.real.order(now_s, prices)
        assert len(found) == len(set(found)) and set(found) <= set(self.waiting)
        return found

    def assert_closed(self) -> None:
        """Nobody waits or runs."""
        assert set(self.state.values()) <= {"answering", "gone"}
        assert not any(self.running.values()) and not self.waiting
