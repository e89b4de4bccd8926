"""The multi-turn benchmark: the demo's conversations against any servers, as JSON or a table.

The first URL is measured and recorded; every further URL gets the very same prompts and is compared with it.
Point the first at a server with the cache and the second at one without to get the demo's table as numbers.
A further server that cannot be measured is left out, by name; the others' numbers are there all the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hiradix import __version__
from hiradix.apps.bench.client import Answer, ChatServer, LoadSettings, Play, play_phase, replay
from hiradix.apps.bench.report import SOURCES, compare, percentile, rows, summary, tokens_by_source
from hiradix.apps.bench.workload import Size, Workload, make_workload
from hiradix.errors import CacheError, ConfigError
from hiradix.settings import require_int

DEFAULT_OUT = Path("build/bench/serve.json")
QUICK = Size(1, 1, 1, 1, 1, 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hiradix bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "urls", nargs="+", metavar="URL", help="OpenAI-compatible servers; the first is measured"
    )
    parser.add_argument("--concurrency", type=int, default=4, help="requests in flight (default: 4)")
    parser.add_argument("--max-tokens", type=int, default=8, help="tokens an answer (default: 8)")
    parser.add_argument("--top-logprobs", type=int, default=5, help="0 for servers without log probabilities")
    parser.add_argument("--model", help="model name to ask for (default: the server's first)")
    parser.add_argument("--api-key", help="bearer key of all servers")
    parser.add_argument("--quick", action="store_true", help="three conversations in place of thirteen")
    parser.add_argument("--table", action="store_true", help="print the rows as a table in place of JSON")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help=f"result rows (default: {DEFAULT_OUT})")
    return parser


def machine() -> Mapping[str, object]:
    """The machine and versions that the numbers were measured on."""
    return {
        "cpu": _cpu_name(),
        "num_cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "hiradix": __version__,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _ignore(answer: Answer) -> None:
    del answer


async def measure(
    urls: Sequence[str], workload: Workload, args: argparse.Namespace
) -> list[tuple[str, list[Answer]]]:
    """Answers of every URL to the same prompts, in the same order; the phases' restarts are left out.

    A further URL that fails is told on standard error and has no answers. Raises CacheError for the first.
    """
    limits = LoadSettings(args.concurrency, args.max_tokens, args.top_logprobs)
    play = Play(workload.conversations, limits.max_tokens)
    phases: list[list[Answer]] = []
    async with ChatServer(urls[0], limits, api_key=args.api_key, model=args.model) as server:
        for phase in workload.phases:
            phases.append(await play_phase(server, play, phase, _ignore))
    runs = [(urls[0], [answer for phase in phases for answer in phase])]
    for url in urls[1:]:
        try:
            async with ChatServer(url, limits, api_key=args.api_key, model=args.model) as server:
                replayed = [await replay(server, [a.request for a in phase], _ignore) for phase in phases]
        except CacheError as error:
            print(f"hiradix bench: {url} is left out: {error}", file=sys.stderr)
            continue
        runs.append((url, [answer for phase in replayed for answer in phase]))
    return runs


def bench_rows(urls: Sequence[str], runs: Sequence[Sequence[Answer]]) -> list[dict[str, object]]:
    """The result file's rows: the first server's numbers beside the others' on the same prompts.

    Times are grouped by where the first server had most of a prompt from, for every server alike. There is
    no row of times where nothing came from a source.
    """
    peers = runs[1:]
    out: list[dict[str, object]] = []

    def add(case: str, metric: str, unit: str, ours: object, others: Sequence[object]) -> None:
        if ours is None:
            return
        beside = {url: other for url, other in zip(urls[1:], others, strict=True) if other is not None}
        out.append({"case": case, "metric": metric, "unit": unit, "ours": ours, "peers": beside})

    tables = [rows(runs[0], peer) for peer in peers]
    tokens = [tokens_by_source(run) for run in runs]
    for i, row in enumerate(rows(runs[0], None)):
        if row.name in SOURCES:
            add(row.name, "prompt_tokens", "tokens", row.num_tokens, [t[row.name] for t in tokens[1:]])
        add(row.name, "ttft_p50", "s", row.ttft_p50_s, [table[i].off_p50_s for table in tables])
        add(row.name, "ttft_p95", "s", row.ttft_p95_s, [table[i].off_p95_s for table in tables])
    for q in (50, 95):
        totals = [percentile([a.total_s for a in run], q) for run in runs]
        add("all", f"total_p{q}", "s", totals[0], totals[1:])
    identical = [compare(runs[0], peer).num_identical for peer in peers]
    add("all", "identical_answers", "answers", len(runs[0]), identical)
    return out


def _report(urls: Sequence[str], runs: Sequence[Sequence[Answer]]) -> dict[str, Any]:
    first = {"url": urls[0], **summary(runs[0])}
    peers = [{"url": url, **summary(runs[0], run)} for url, run in zip(urls[1:], runs[1:], strict=True)]
    return {"machine": machine(), "server": first, "compared": peers}


def _check(args: argparse.Namespace) -> None:
    """ConfigError naming what cannot be measured, or not written down at the end."""
    require_int("--concurrency", args.concurrency, 1)
    require_int("--max-tokens", args.max_tokens, 1)
    require_int("--top-logprobs", args.top_logprobs)
    for url in args.urls:
        try:
            parts = urlsplit(url)
            is_server = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError as error:
            raise ConfigError(f"{url}: {error}") from error
        if not is_server:
            raise ConfigError(f"{url}: expected http://HOST:PORT")
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        was_there = args.out.exists()
        args.out.open("a").close()
        if not was_there:
            args.out.unlink()
    except OSError as error:
        raise ConfigError(f"--out {args.out}: {error.strerror or error}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the measurements, write the result rows; 1: answers differ, 2: a server could not be measured."""
    args = _parser().parse_args(arguments)
    try:
        _check(args)
        workload = make_workload(QUICK if args.quick else None)
        measured = asyncio.run(measure(args.urls, workload, args))
    except CacheError as error:
        print(f"hiradix bench: error: {error}", file=sys.stderr)
        return 2
    urls, runs = [url for url, _ in measured], [run for _, run in measured]
    result = bench_rows(urls, runs)
    print(_table(result, urls[1:]) if args.table else json.dumps(_report(urls, runs), indent=2))
    text = json.dumps({"machine": machine(), "rows": result}, indent=2, allow_nan=False)
    args.out.write_text(text + "\n", encoding="utf-8")
    if len(urls) < len(args.urls):
        return 2
    return 0 if all(compare(runs[0], run).holds for run in runs[1:]) else 1


def _table(rows: Sequence[Mapping[str, Any]], peers: Sequence[str]) -> str:
    """A line per row: the first server's number, then each other's."""
    lines = [["case", "metric", "measured", *peers]]
    for row in rows:
        values = [row["ours"], *(row["peers"].get(peer) for peer in peers)]
        shown = ["-" if value is None else f"{value:,.3f}".rstrip("0").rstrip(".") for value in values]
        lines.append([row["case"], f"{row['metric']}, {row['unit']}", *shown])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip() for line in lines)
