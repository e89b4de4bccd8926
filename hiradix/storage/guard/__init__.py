"""The guard before every backend: deadlines, circuit breakers, checksums, joining later."""
