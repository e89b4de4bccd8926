"""What a request over HTTP may attach, and what each key can do."""
