"""`python -m hiradix.apps.demo`: see `make demo`."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from hiradix.apps.bench.workload import make_workload
from hiradix.apps.demo.driver import Demo, DemoConfig
from hiradix.apps.demo.view import View
from hiradix.errors import CacheError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hiradix.apps.demo",
        description="Serve real conversations through three cache tiers, then with the cache off.",
    )
    parser.add_argument(
        "--model-path", type=Path, help="transformers checkpoint (default: SmolLM2-135M-Instruct)"
    )
    parser.add_argument(
        "--work-dir", type=Path, help="where pages, server log and result go (default: temporary)"
    )
    parser.add_argument("--storage-backend", default="disk", help="third tier (default: disk)")
    parser.add_argument("--storage-config", help="its keys, as JSON (default: a directory of the demo's own)")
    parser.add_argument("--num-threads", type=int, default=2, help="CPU threads of the model (default: 2)")
    return parser


def _model(view: View, given: Path | None) -> Path:
    if given is not None:
        return given
    os.environ.setdefault("TQDM_DISABLE", "1")  # the conversion's bars, read when tqdm is imported
    from hiradix.apps.engine.smollm2 import smollm2_path

    with view.working("preparing SmolLM2-135M-Instruct (converted once, about 15 s)"):
        return smollm2_path()


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status of the demo: 0 when every claim held, 1 when one did not, 2 when it could not run."""
    args = _parser().parse_args(arguments)
    view = View()
    started = time.monotonic()
    work_dir = args.work_dir or Path(tempfile.mkdtemp(prefix="hiradix-demo-"))
    try:
        workload = make_workload()
        model_path = _model(view, args.model_path)
        config = DemoConfig(
            model_path,
            work_dir,
            num_threads=args.num_threads,
            storage_backend=args.storage_backend,
            storage_config=args.storage_config,
        )
        num_conversations = len(workload.conversations)
        view.say(f"{num_conversations} conversations, {workload.num_requests} requests, work in {work_dir}")
        holds = asyncio.run(Demo(config, workload, view).run())
    except (CacheError, OSError) as error:
        view.say(f"the demo failed after {time.monotonic() - started:.0f} s: {error}")
        view.say(f"server log: {work_dir / 'server.log'}")
        return 2
    except KeyboardInterrupt:
        view.say("stopped")
        return 130
    for line in next_steps(model_path, args.model_path is None):
        view.say(line)
    return 0 if holds else 1


def next_steps(model_path: Path, is_default: bool) -> list[str]:
    """Three things to try after the demo, as commands that run."""
    from hiradix.apps.engine.smollm2 import MODEL_NAME

    name = MODEL_NAME if is_default else str(model_path)
    command = f"{sys.executable} -m hiradix.cli"
    return [
        "",
        "To try next:",
        f"  1. {command} serve --model-path {name} --enable-hierarchical-cache",
        "     serves it to any OpenAI or Anthropic client at http://127.0.0.1:30000",
        f"  2. {command} certify http://127.0.0.1:30000",
        "     asks that server, or any other, whether answers behind a hit are right",
        f"  3. {command} tour",
        "     the route that one page takes through the code",
    ]


if __name__ == "__main__":
    sys.exit(main())
