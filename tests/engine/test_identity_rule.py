"""The identity rule itself: ties are flagged and few, anything else fails."""

from __future__ import annotations

import pytest
import torch

from tests.identity import Identity, first_difference


def logprobs_of(gap: float) -> torch.Tensor:
    return torch.tensor([-1.0, -1.0 - gap, -9.0])


def judged(gap: float, equal: int = 400) -> Identity:
    identity = Identity()
    for _ in range(equal):
        identity.add("same", [1, 2], [1, 2], None)
    identity.compare([5], [2, 0, 2], [2, 1, 1], lambda tokens: logprobs_of(gap))
    return identity


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2
    assert first_difference([], [4]) == 0


def test_tie_is_flagged_not_hidden() -> None:
    identity = judged(gap=5e-5)
    assert identity.holds and len(identity.flagged) == 1 and identity.equal == 400


def test_clear_difference_fails() -> None:
    identity = judged(gap=2e-4)
    assert not identity.holds
    with pytest.raises(AssertionError, match="400 of 401 equal"):
        identity.assert_holds()


def test_more_than_one_tie_in_two_hundred_fails() -> None:
    assert judged(gap=5e-5, equal=199).holds
    assert not judged(gap=5e-5, equal=198).holds


def test_missing_end_is_no_tie() -> None:
    identity = Identity()
    identity.compare([5], [1, 2, 0], [1, 2], lambda tokens: logprobs_of(0.0))
    assert not identity.holds


def test_candidates_are_judged_after_the_common_beginning() -> None:
    asked: list[list[int]] = []

    def logprobs_after(tokens: list[int]) -> torch.Tensor:
        asked.append(tokens)
        return logprobs_of(0.0)

    Identity().compare([5, 6], [2, 2, 0], [2, 2, 1], logprobs_after)
    assert asked == [[5, 6, 2, 2]]


def test_nothing_compared_is_no_proof() -> None:
    with pytest.raises(AssertionError):
        Identity().assert_holds()
