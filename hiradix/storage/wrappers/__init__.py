"""Backends around backends: compression, encryption, quantisation, quotas, retries."""
