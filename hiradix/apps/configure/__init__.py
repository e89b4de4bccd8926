"""`hiradix config`: what the settings are, what counts of them, and what others' become."""
