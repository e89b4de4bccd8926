"""hiradix: one paged radix tree over device, host and storage KV-cache tiers."""

from __future__ import annotations

__version__ = "0.1.0"
