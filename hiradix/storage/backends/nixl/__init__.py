"""The `nixl` backend: files or objects, moved by NIXL's plugins."""
