"""What a backend's author builds with: seals, vectored IO, locks, registered memory, option parsing."""
