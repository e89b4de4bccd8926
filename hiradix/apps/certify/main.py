"""Does a server with a prefix cache answer as it would without one? A verdict over HTTP alone.

Any OpenAI-compatible server, any cache. The exit status is 0 where every answer that a hit gave is the one a
cold prompt gets, 1 where one is not, 2 where too little could be judged.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from hiradix.apps.certify import report
from hiradix.apps.certify.client import ServerUnderTest
from hiradix.apps.certify.examiner import Examiner, OutOfTime, RunSettings
from hiradix.apps.certify.judge import FACTOR
from hiradix.apps.certify.ladder import Ladder, begun
from hiradix.apps.certify.record import Arm
from hiradix.errors import CacheError, ConfigError
from hiradix.settings import require_int

ARMS = "noise cold device split tail stream turns salt abort overload pressure flush restart".split()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hiradix certify", description=" ".join((__doc__ or "").split("\n\n")[0].split())
    )
    add = parser.add_argument
    add("url", metavar="URL", help="an OpenAI-compatible server, as http://HOST:PORT")
    add("--model", help="model to ask (default: the server's first)")
    add("--api-key", help="bearer key (default: $HIRADIX_API_KEY)")
    add(
        "--admin-api-key",
        help="bearer key to flush with, where it is another (default: $HIRADIX_ADMIN_API_KEY)",
    )
    add("--api", choices=("completions", "chat"), help="API to use (default: completions, else chat)")
    add("--minutes", type=float, default=10.0, help="arms that begin later are not run (default: 10)")
    add("--restart", metavar="COMMAND", help="shell command that restarts the server and returns")
    add("--restart-timeout", type=float, default=300.0, metavar="S", help="until it answers (default: 300)")
    add("--flush", metavar="URL", help="path or URL to POST to, or none (default: those of known servers)")
    add(
        "--pressure",
        type=int,
        metavar="TOKENS",
        help="other prompts that fill the device (default: find out)",
    )
    add("--prompt-tokens", type=int, default=640, help="about how long prompts are (default: 640)")
    add("--max-tokens", type=int, default=12, help="tokens of an answer (default: 12)")
    add("--concurrency", type=int, default=16, help="requests in flight in the arm overload (default: 16)")
    add("--timeout", type=float, default=120.0, metavar="S", help="of one request (default: 120)")
    add(
        "--settle", type=float, default=2.0, metavar="S", help="for writes to lower tiers to end (default: 2)"
    )
    add(
        "--factor",
        type=float,
        default=FACTOR,
        help=f"times the noise is what may differ (default: {FACTOR:g})",
    )
    add("--require", metavar="ARM,...", default="", help="arms that must be shown right, or all")
    add("--run", help="name of the run, from which prompts are drawn (default: a random one)")
    add("--json", type=Path, metavar="FILE", help="write the whole result here")
    add(
        "--repro",
        type=Path,
        default=Path("certify-wrong"),
        metavar="DIR",
        help="requests of wrong answers go here",
    )
    return parser


def _checked(args: argparse.Namespace) -> list[str]:
    """The required arms. ConfigError naming a flag that cannot be used."""
    try:
        parts = urlsplit(args.url)
        is_server = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        has_password = "@" in parts.netloc or "@" in urlsplit(args.flush or "").netloc
    except ValueError as error:
        raise ConfigError(f"{args.url}: {error}") from error
    if has_password:
        raise ConfigError("a URL must have no user and password, as reports name it: --api-key takes a key")
    if not is_server:
        raise ConfigError(f"{args.url}: expected http://HOST:PORT")
    require_int("--prompt-tokens", args.prompt_tokens, 64)
    require_int("--max-tokens", args.max_tokens, 1)
    require_int("--concurrency", args.concurrency, 1)
    if args.pressure is not None:
        require_int("--pressure", args.pressure, 1)
    for name in ("minutes", "restart_timeout", "timeout", "factor"):
        if not getattr(args, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')}: must be above 0")
    if not args.settle >= 0:
        raise ConfigError("--settle: must not be negative")
    required = ARMS if args.require == "all" else [name for name in args.require.split(",") if name]
    if unknown := set(required) - set(ARMS):
        raise ConfigError(f"--require: {', '.join(sorted(unknown))}: the arms are {', '.join(ARMS)}")
    if args.json is not None and (args.json.is_dir() or not args.json.parent.is_dir()):
        raise ConfigError(f"--json {args.json}: no such folder, or one itself")
    if args.repro.exists() and not args.repro.is_dir():
        raise ConfigError(f"--repro {args.repro}: not a folder")
    return required


def _tell(arm: Arm) -> None:
    print(f"{arm.name:9} {arm.state.value:12} {arm.reason}".rstrip(), file=sys.stderr, flush=True)


async def _climbed(args: argparse.Namespace, server: ServerUnderTest) -> tuple[Examiner, Ladder]:
    settings = RunSettings(
        run=args.run or secrets.token_hex(4),
        minutes=args.minutes,
        prompt_tokens=args.prompt_tokens,
        concurrency=args.concurrency,
        pressure_tokens=args.pressure,
        flush=args.flush,
        restart=args.restart,
        restart_timeout_s=args.restart_timeout,
        settle_s=args.settle,
        factor=args.factor,
    )
    async with server:
        examiner = Examiner(server, settings)
        await begun(examiner)
        ladder = Ladder(examiner, _tell)
        await ladder.climb()
        return examiner, ladder


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the verdict; the process's exit status."""
    args = _parser().parse_args(arguments)
    api_key = args.api_key or os.environ.get("HIRADIX_API_KEY")
    try:
        required = _checked(args)
        server = ServerUnderTest(
            args.url,
            model=args.model,
            api_key=api_key,
            api=args.api,
            admin_key=args.admin_api_key or os.environ.get("HIRADIX_ADMIN_API_KEY"),
            timeout_s=args.timeout,
            max_tokens=args.max_tokens,
        )
        examiner, ladder = asyncio.run(_climbed(args, server))
    except CacheError as error:
        print(f"hiradix certify: error: {error}", file=sys.stderr)
        return report.UNDECIDED
    except OutOfTime:
        said = f"--minutes {args.minutes:g}: over before anything was judged"
        print(f"hiradix certify: error: {said}", file=sys.stderr)
        return report.UNDECIDED
    except Exception:  # Python would end with 1, which says that the server is wrong
        traceback.print_exc()
        return report.UNDECIDED
    except KeyboardInterrupt:
        print("hiradix certify: stopped", file=sys.stderr)
        return report.UNDECIDED
    findings = [finding for arm in ladder.arms.values() for finding in arm.findings]
    print(f"{report.heading(examiner)}\n\n{report.table(ladder.arms)}")
    status, is_written = report.status(examiner, ladder.arms, required), True
    try:
        if findings:
            print(report.reproduction(findings, args.repro, api_key is not None))
        if args.json is not None:
            text = json.dumps(report.record(examiner, ladder.arms, required), indent=2, allow_nan=False)
            args.json.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        print(f"hiradix certify: error: the report could not be written: {error}", file=sys.stderr)
        is_written = False
    print(f"\n{report.verdict(examiner, ladder.arms, required)}")
    return status if is_written or status == report.WRONG else report.UNDECIDED
