"""The `tier` backend: a near store over a far one."""
