"""Policies: numbers in, decisions out. Eviction, when to write and fetch, no-regret, who is served next."""
