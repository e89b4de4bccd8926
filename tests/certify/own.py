"""Our own server with every tier, small enough that each is used, and a command that restarts it.

python -m tests.certify.own                    certify it with every arm required (`make certify`)
python -m tests.certify.own restart FOLDER     end the server of that folder and start it again
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from hiradix.apps.demo.process import free_port
from tests.e2e.tiny_model import write_tiny_model
from tests.planting import ROOT

DEADLINE_S = 180.0
STOP_S = 20.0
DEVICE_TOKENS = 3072
CERTIFY = ("--prompt-tokens", "320", "--max-tokens", "8", "--settle", "0.5", "--timeout", "60")


class OwnServer:
    """`hiradix serve` in processes of its own; as a context manager it answers inside and is gone behind.

    code: where hiradix is taken from. Its command and the process's number are in the folder, so that
    `restart` in another process ends it and starts the next.
    """

    def __init__(self, folder: Path, model: Path, code: Path = ROOT) -> None:
        self.folder = folder
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        disk = {"disk_storage_path": str(folder / "disk"), "prefetch_threshold": 16, "deadline_s": 60.0}
        command = [
            *(sys.executable, "-m", "hiradix.cli", "serve", "--port", str(port)),
            *("--model-path", str(model), "--served-model-name", "tiny", "--page-size", "16"),
            *(
                "--max-total-tokens",
                str(DEVICE_TOKENS),
                "--enable-hierarchical-cache",
                "--hicache-ratio",
                "2.5",
            ),
            *("--hicache-no-regret", "off", "--hicache-storage-prefetch-policy", "wait_complete"),
            *("--hicache-storage-backend", "disk"),
            *("--hicache-storage-backend-extra-config", json.dumps(disk)),
        ]
        state = {"command": command, "code": str(code), "url": self.url}
        (folder / "server.json").write_text(json.dumps(state))

    @property
    def restart_command(self) -> str:
        """For `hiradix certify --restart`."""
        here = f"cd {shlex.quote(str(ROOT))} && PYTHONPATH={shlex.quote(str(ROOT))}"
        restart = ("-m", "tests.certify.own", "restart", str(self.folder))
        return f"{here} {shlex.join([sys.executable, *restart])}"

    def __enter__(self) -> OwnServer:
        try:
            _start(self.folder)
        except BaseException:
            _stop(self.folder)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _stop(self.folder)


def _start(folder: Path) -> None:
    """Start and wait until it answers."""
    state = json.loads((folder / "server.json").read_text())
    environment = {**os.environ, "PYTHONPATH": state["code"], "HIRADIX_CHECK": "0", "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            state["command"], cwd=state["code"], env=environment, stdin=subprocess.DEVNULL, stdout=log,
            stderr=log, start_new_session=True,
        )  # fmt: skip
    (folder / "pid").write_text(str(process.pid))
    deadline = time.monotonic() + DEADLINE_S
    while True:
        assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()[-3000:]
        try:
            if httpx.get(f"{state['url']}/health", trust_env=False, timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)


def _stop(folder: Path) -> None:
    """End it; it is killed if it does not end."""
    try:
        pid = int((folder / "pid").read_text())
    except FileNotFoundError:
        return
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    while not _has_ended(pid):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.05)
    (folder / "pid").unlink()


def _has_ended(pid: int) -> bool:
    """Whether the process is gone, or is only waited for by its parent, which may be another one than we."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def certified(server: OwnServer, *flags: str, restart: bool = True) -> tuple[int, dict[str, Any], str]:
    """Exit status, record and output of a run over it."""
    file = server.folder / "certify.json"
    command = [sys.executable, "-m", "hiradix.cli", "certify", server.url, *CERTIFY, "--json", str(file)]
    if restart:
        command += ["--restart", server.restart_command]
    done = subprocess.run(
        [*command, "--repro", str(server.folder / "wrong"), *flags],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    record = json.loads(file.read_text()) if file.exists() else {}
    return done.returncode, record, done.stdout + done.stderr


def main(arguments: Sequence[str]) -> int:
    """`make certify`, or one restart."""
    if arguments[:1] == ["restart"]:
        _stop(Path(arguments[1]))
        _start(Path(arguments[1]))
        return 0
    with tempfile.TemporaryDirectory(prefix="hiradix-certify-") as name:
        folder = Path(name)
        with OwnServer(folder, write_tiny_model(folder / "model")) as server:
            code, _, text = certified(server, "--require", "all", *arguments)
            print(text)
            return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
