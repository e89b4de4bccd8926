"""One outcome for all workers, once the last has answered: the fewest pages any did, the longest any took."""

from __future__ import annotations

from dataclasses import dataclass, field

from hiradix.adapters.vllm.orders import OrderOutcome, OrderStage, Ticket


@dataclass
class WorkerQuorum:
    """Answers that are not complete yet, by ticket and stage."""

    num_workers: int
    _open: dict[tuple[Ticket, OrderStage], tuple[int, OrderOutcome]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._open)

    def add(self, outcome: OrderOutcome) -> OrderOutcome | None:
        """The answer of all workers once this is the last one's, else None."""
        at = (outcome.ticket, outcome.stage)
        seen, so_far = self._open.pop(at, (0, outcome))
        least = OrderOutcome(
            outcome.ticket,
            outcome.stage,
            min(outcome.num_pages, so_far.num_pages),
            outcome.hashes or so_far.hashes,
            outcome.error or so_far.error,
            max(outcome.seconds, so_far.seconds),
        )
        if seen + 1 == self.num_workers:
            return least
        self._open[at] = (seen + 1, least)
        return None
