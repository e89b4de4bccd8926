"""Made-up prompts: token ids without meaning, equal where they are to share."""

from __future__ import annotations

import random

from tests.e2e.tiny_model import VOCAB_SIZE


def tokens(count: int, seed: object) -> list[int]:
    """`count` ids, the same for the same seed. Special tokens are left out."""
    rng = random.Random(str(seed))
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(count)]


def prompts(count: int, num_tokens: int, seed: object) -> list[list[int]]:
    """Prompts that share nothing."""
    return [tokens(num_tokens, (seed, number)) for number in range(count)]


def families(count: int, num_prefixes: int, seed: object) -> list[list[int]]:
    """Prompts of many lengths that share one of a few prefixes, as turns of conversations do."""
    rng = random.Random(str(seed))
    prefixes = [tokens(rng.randrange(100, 260), (seed, "prefix", n)) for n in range(num_prefixes)]
    made = []
    for number in range(count):
        prefix = prefixes[rng.randrange(num_prefixes)]
        kept = rng.choice((len(prefix), len(prefix) // 2))
        made.append(prefix[:kept] + tokens(rng.randrange(1, 120), (seed, "own", number)))
    return made
