"""Servers of ours that are forked from a process which has imported everything: see `tests.warm`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hiradix.apps.demo.process import ServerProcess
from tests.warm import FORKS, Forked, fork

FORKS.set_forkserver_preload(["tests.e2e.warm_imports"])


class WarmServer(ServerProcess):
    """A ServerProcess whose interpreter has all imports behind it; its signals and its end are the same."""

    def _spawn(self) -> Any:
        begin = self.command.index("serve")
        return Forked(fork(_serve, self.command[begin:], self.log))


def _serve(arguments: Sequence[str], log: Path) -> None:
    """In the child."""
    from hiradix.cli import main

    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(main(list(arguments)))
