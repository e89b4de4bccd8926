"""Tools for the author of a backend: seals, vectored IO, locks, registered memory, option parsing."""
