"""The demo's output: progress while it works, and one table at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hiradix.apps.bench.client import Answer
from hiradix.apps.bench.report import LONG_PROMPT_TOKENS, TIERS, Identity, Row, long_rows, rows, source_of

EVERY = 8  # without a terminal: one progress line for so many answers


class View:
    """The demo's output. On a terminal phases are live bars; elsewhere they are plain lines."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)

    def say(self, text: str) -> None:
        """One plain line."""
        self.console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def phase(self, title: str, num_requests: int) -> Iterator[PhaseProgress]:
        """Progress of one phase; call the result once per answer."""
        if not self.console.is_terminal:
            yield PhaseProgress(self, title, num_requests)
            return
        columns = (
            TextColumn("{task.description:<26}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, TextColumn("{task.fields[last]}"), console=self.console) as bars:
            yield PhaseProgress(self, title, num_requests, bars)

    @contextmanager
    def working(self, text: str) -> Iterator[None]:
        """Say what is going on while the block runs."""
        if not self.console.is_terminal:
            self.say(f"{text} ...")
            yield
            return
        with self.console.status(text):
            yield


class PhaseProgress:
    """Counts answers of one phase and shows each one's size, source and time to first token."""

    def __init__(self, view: View, title: str, num_requests: int, bars: Progress | None = None) -> None:
        self._view = view
        self._title = title
        self._num_requests = num_requests
        self._num_done = 0
        self._bars = bars
        self._task = bars.add_task(title, total=num_requests, last="") if bars else None

    def __call__(self, answer: Answer) -> None:
        """One more answer."""
        self._num_done += 1
        size = f"{answer.prompt_tokens} tokens"
        last = f"{answer.request.label}: {size}, {source_of(answer)}, {answer.ttft_s:.2f} s"
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, completed=self._num_done, last=last)
        elif self._num_done % EVERY == 0 or self._num_done == self._num_requests:
            self._view.say(f"  {self._title}: {self._num_done}/{self._num_requests}  ({last})")


def _time(value_s: float | None) -> str:
    return "-" if value_s is None else f"{value_s:.2f}"


def _add(table: Table, heading: str, part: Sequence[Row]) -> None:
    total = sum(row.num_tokens for row in part if row.name != "all")
    reused = sum(row.num_tokens for row in part if row.name in TIERS)
    table.add_row(heading)
    for row in part:
        share = f"{row.num_tokens / reused:.0%}" if row.name in TIERS and reused else ""
        of_all = f"{row.num_tokens / total:.0%}" if total else ""
        times = (row.ttft_p50_s, row.ttft_p95_s, row.off_p50_s, row.off_p95_s)
        cells = (str(row.num_requests), f"{row.num_tokens:,}", of_all, share, *map(_time, times))
        table.add_row(f"  {row.name}", *cells, end_section=row.name == "all")


def result_table(ours: Sequence[Answer], reference: Sequence[Answer]) -> Table:
    """The one table, 80 columns wide: tokens by source, time to first token with the cache and without.

    A request stands in the row of the source that most of its prompt came from; the "off" columns are the
    same prompts with the cache off.
    """
    title = "Prompt tokens by source; time to first token in seconds"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("source", "reqs", "tokens", "all", "reused", "p50", "p95", "off p50", "off p95"):
        table.add_column(name, justify="left" if name == "source" else "right", no_wrap=True)
    _add(table, "all prompts", rows(ours, reference))
    _add(table, f"{LONG_PROMPT_TOKENS:,}+ tokens", long_rows(ours, reference))
    return table


def show_verdict(view: View, claims: Mapping[str, bool], identity: Identity) -> None:
    """Print each claim with yes or NO, every answer that differs, and last the line that matters."""
    for claim, holds in claims.items():
        view.say(f"{'yes' if holds else 'NO '}  {claim}")
    for difference in identity.differences:
        view.say(f"  {difference}")
    view.say(identity.line())
