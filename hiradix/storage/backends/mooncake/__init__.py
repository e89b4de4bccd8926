"""The `mooncake` backend: pages in the memory that members of a store lend it."""
