"""hiradix as SGLang's prefix cache: `--radix-cache-backend hiradix`. See docs/sglang.md.

plugin   the entry point that SGLang loads in each of its processes; light
support  which SGLang, and which of its options, can be served
build    SGLang's flags and pools, put together to a cache of ours
ports    small views of either side in the other's terms
front    what the classes of both contracts have in common
cache    the class for SGLangs with `checkpoint` (0.5.23); `tiers` has its lower tiers
legacy   the class for SGLangs with `cache_finished_req` (0.5.15)
events   our KV events as SGLang's records
meters   our counters as SGLang's metrics
"""
