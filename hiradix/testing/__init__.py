"""Test suites for those who write parts of their own. They need pytest, and nothing else imports them."""
