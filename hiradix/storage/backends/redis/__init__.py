"""The `redis` backend: Redis, Valkey or anything that speaks RESP."""
