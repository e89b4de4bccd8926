"""The cache inside SGLang and vLLM; each adapter is imported in its engine only."""
