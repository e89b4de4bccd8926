"""Rules for attaching storage over HTTP, and the risk that each key carries."""
