"""The `hiradix` command. Subcommands load what they need when they run, so `--help` is fast."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

import hiradix

USAGE = """usage: hiradix {serve,config,ctl,bench,certify,storage,replay,size,tour} ...

  serve    serve a model over HTTP through a three-tier prefix cache
  config   check, show and explain the settings of serve; settings of LMCache as ours
  ctl      look into a running cache and command it: locate, hold, forget, bring
  bench    play multi-turn conversations against a server and report cached tokens and latency
  certify  find out over HTTP whether a server with any prefix cache answers rightly
  storage  list, check, empty, copy or time a store of pages
  replay   play traces through the real cache: policies by capacities, hits, writes, time to first token
  size     how many agents a machine carries, or what more memory would buy for the traffic of a trace
  tour     the route that one page takes through the code, from the device to storage and back

`hiradix COMMAND --help` lists the flags of a command; `hiradix --version` says the version.
"""


NOT_READ = 141  # what a shell has for a process whose output nobody reads


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; the process's exit status."""
    try:
        status = _run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except BrokenPipeError:
        with contextlib.suppress(OSError):  # what is buffered still is not to be written at the exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOT_READ
    return status


EXTRAS = {
    "serve": "engine,server", "bench": "server", "certify": "server", "storage": "engine", "replay": "engine",
    "size": "engine", "tour": "engine",
}  # fmt: skip
"""What of `pip install 'hiradix[...]'` each command needs."""


def _lacks(command: str, error: ModuleNotFoundError) -> int:
    """Say what a command needs that is not installed. Another's missing module is an error like any other."""
    name = (error.name or "").partition(".")[0]
    if command not in EXTRAS or not name or name == "hiradix":
        raise error
    print(
        f"hiradix {command}: error: {name} is not installed: pip install 'hiradix[{EXTRAS[command]}]'",
        file=sys.stderr,
    )
    return 2


def _run(arguments: list[str]) -> int:
    command = arguments[0] if arguments else ""
    try:
        return _command(arguments)
    except ModuleNotFoundError as error:
        return _lacks(command, error)


def _command(arguments: list[str]) -> int:
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if command == "serve":
        from hiradix.apps.server.serve import serve

        return serve(rest)
    if command == "config":
        from hiradix.apps.configure.main import main as config

        return config(rest)
    if command == "ctl":
        from hiradix.apps.ctl import main as ctl

        return ctl(rest)
    if command == "bench":
        from hiradix.apps.bench.main import main as bench

        return bench(rest)
    if command == "certify":
        from hiradix.apps.certify.main import main as certify

        return certify(rest)
    if command == "replay":
        from hiradix.apps.replay.main import main as replay

        return replay(rest)
    if command == "size":
        from hiradix.apps.replay.size import main as size

        return size(rest)
    if command == "storage":
        from hiradix.apps.storage_tools import main as storage

        return storage(rest)
    if command == "tour":
        from hiradix.apps.tour import main as tour

        return tour(rest)
    if command in ("-h", "--help", "--version"):
        print(f"hiradix {hiradix.__version__}" if command == "--version" else USAGE, end="\n")
        return 0
    print(f"hiradix: error: unknown command {command!r}\n\n{USAGE}" if command else USAGE, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
