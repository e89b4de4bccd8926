"""Recorded traffic, read from the forms it is published in: traces of requests, agents' sessions."""
