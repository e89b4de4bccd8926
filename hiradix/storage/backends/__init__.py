"""The backends, a folder each; `hiradix.storage.registry` loads them by name."""
