"""`hiradix bench`: the multi-turn benchmark against any OpenAI-compatible server."""
