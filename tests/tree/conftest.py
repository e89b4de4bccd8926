"""Says at the end of the run how much of the tree's state space was walked."""

from __future__ import annotations

from collections import Counter


def pytest_terminal_summary(terminalreporter) -> None:
    runs, moves, drawn = 0, 0, Counter()
    for report in terminalreporter.getreports("passed"):
        properties = dict(report.user_properties)
        runs += properties.get("tree_runs", 0)
        moves += properties.get("tree_moves", 0)
        drawn.update(properties.get("tree_drawn", {}))
    if runs:
        values = ", ".join(f"{value} {count}" for value, count in sorted(drawn.items()))
        terminalreporter.write_line(f"tree against page map: {runs} runs, {moves} moves ({values})")
