"""The `file` backend: one file per page, bounded, shared by processes."""
