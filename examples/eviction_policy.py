"""An eviction policy of your own: of equally recent hours, what was hit least leaves first.

A policy is a key: small is evicted first, equal keys leave least recently used first. Leaves leave before
their ancestors whatever the key says, and what a request has locked is never asked about. Count in pushes,
not in seconds: ranks that see the same calls must evict the same pages. Once it is registered,
`--radix-eviction-policy NAME` chooses it.
"""

import numpy as np

from hiradix.policy.eviction import HeapOrder, Use, make_order, register_eviction_policy
from hiradix.tree import Node, RadixKey, RadixTree, Tier

PUSHES_AN_HOUR = 1000


def hourly_lfu(node: Node, use: Use) -> int:
    """The hour of the last use, then the number of hits (at most 999 count)."""
    return use.push // PUSHES_AN_HOUR * 1000 + min(node.hit_count, 999)


register_eviction_policy("hourly-lfu", lambda config: lambda context: HeapOrder(context, hourly_lfu))

if __name__ == "__main__":
    tree = RadixTree(page_size=2, order=make_order("hourly-lfu"))
    liked, other = RadixKey([1, 2, 3, 4]), RadixKey([5, 6, 7, 8])
    for key, pages in ((liked, [0, 1]), (liked, [0, 1]), (other, [2, 3])):  # `other` came last, and once
        tree.unlock(tree.insert(key, Tier.DEVICE, [np.array(pages)]).lock)

    print(tree.evict(0, Tier.DEVICE, 2)[0].pages)  # [2 3]
    print(tree.match(liked).device_node.end, tree.match(other).device_node.end)  # 2 0
