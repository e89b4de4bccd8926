"""`hiradix serve`: flags, the OpenAI-compatible HTTP API, admin endpoints, metrics."""
