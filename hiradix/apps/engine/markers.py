"""Whether a growing text has one of some texts in it, or may come to."""

from __future__ import annotations

from collections.abc import Sequence


class MarkerSearch:
    """`push` it piece by piece; `found` from the first text on that is there whole. Costs what is pushed."""

    def __init__(self, markers: Sequence[str]):
        self._markers = tuple(markers)
        self._keep = max(map(len, markers)) - 1
        self._tail = ""
        self.found = "" in self._markers

    def push(self, piece: str) -> None:
        """The text goes on with `piece`."""
        if self.found or not piece:
            return
        text = self._tail + piece
        self.found = any(marker in text for marker in self._markers)
        self._tail = text[-self._keep :] if self._keep > 0 else ""


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`, and is not all of it."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
