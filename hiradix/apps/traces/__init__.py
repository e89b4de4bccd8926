"""Floor 6: recorded traffic, read from the forms it is published in: traces of requests, agents' sessions."""
