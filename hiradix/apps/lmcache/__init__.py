"""Translates LMCache's settings into ours: `hiradix config migrate`."""
