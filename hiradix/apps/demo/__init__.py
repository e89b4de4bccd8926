"""The demo: a real server, real conversations, and the same prompts with the cache off."""
