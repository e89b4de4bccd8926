"""Measures how fast the engine computes prompts, from the times at which the scheduler plans steps alone."""

from __future__ import annotations

from collections.abc import Callable

from hiradix.policy.no_regret import NoRegret


class StepMeter:
    """Tells the no-regret gate what computing costs.

    An engine that has `num_overlapping` steps under way plans the next one when the oldest has ended. So
    what those steps compute takes no longer than from when the first of them is planned until so many later.
    A clock is read only around steps that compute prompts.
    """

    def __init__(
        self, gate: NoRegret, clock: Callable[[], float], page_size: int, num_overlapping: int
    ) -> None:
        self._gate = gate
        self._clock = clock
        self._page_size = page_size
        self._num_overlapping = num_overlapping
        self._num_steps = 0  # planned since the measurement began; 0: there is none
        self._num_tokens = 0
        self._began_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether a measurement is under way, so that the next step must be reported whatever it computes."""
        return self._num_steps > 0

    def planned(self, num_tokens: int, is_prompt: bool) -> None:
        """Note that a step was planned which computes `num_tokens` tokens. is_prompt: most of them are of
        prompts."""
        if self._num_steps == self._num_overlapping:
            self._gate.computed(self._num_tokens / self._page_size, self._clock() - self._began_s)
            self.forget()
        if self._num_steps or is_prompt:
            if not self._num_steps:
                self._began_s = self._clock()
            self._num_steps += 1
            self._num_tokens += num_tokens

    def forget(self) -> None:
        """Discard the measurement under way: the engine pauses, or waits for a load."""
        self._num_steps = self._num_tokens = 0
