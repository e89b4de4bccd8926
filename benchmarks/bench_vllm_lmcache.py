"""LMCache 0.5.6 beside us in `bench_vllm`: its server, and vLLM with its connector in a process of its own.

LMCache has two connectors for vLLM. The one inside the engine (LMCacheConnectorV1) has no code for CPUs:
"RuntimeError: No supported cpu connector found.", and vLLM goes on without a cache. The other
(LMCacheMPConnector) keeps pages in a server of its own, and runs on a CPU in one of the server's transfer
modes (`engine_driven`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hiradix.apps.demo.process import free_port
from tests.storage_servers.servers import can_connect
from tests.vllm.player import Player

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "peers" / "lmcache-vllm"
WHEELS = ("lmcache==0.5.6", "aiofile==3.12.3", "caio==0.12.10")
PATHS = os.pathsep.join((str(FOLDER), str(ROOT)))
START_S = 120.0
ENVIRONMENT = {
    "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING", "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
}  # fmt: skip


def install() -> None:
    """The wheels alone, beside what vLLM's environment has: 85 MB, once. That environment has no pip; the
    Python that it was made from has."""
    if not FOLDER.is_dir():
        python = sys.executable if find_spec("pip") else str(Path(sys.base_prefix, "bin", "python3"))
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        subprocess.run([*pip, "--target", str(FOLDER), *WHEELS], check=True, env=environment)


class LMCacheServer:
    """LMCache's server on loopback, with pages of `chunk` tokens in `size_gb` of memory."""

    def __init__(self, size_gb: float, chunk: int, log: Path) -> None:
        install()
        self.port, http_port = free_port(), free_port()
        command = [
            sys.executable, "-m", "lmcache.cli.main", "server", "--chunk-size", str(chunk),
            "--host", "127.0.0.1", "--port", str(self.port),
            "--http-host", "127.0.0.1", "--http-port", str(http_port),
            "--l1-size-gb", str(size_gb), "--no-l1-use-lazy", "--disable-observability", "--max-workers", "2",
            "--supported-transfer-mode", "engine_driven", "--eviction-policy", "LRU",
        ]  # fmt: skip
        with log.open("wb") as out:
            environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": PATHS}
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
        deadline = time.monotonic() + START_S
        while not can_connect(self.port):
            assert self.process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)

    @property
    def connector(self) -> dict[str, Any]:
        """vLLM's transfer config."""
        keys = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self.port}
        return {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": keys}

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)


class LMCachePlayer(Player):
    """vLLM that finds LMCache."""

    module = "benchmarks.bench_vllm_lmcache"
    environment = {**ENVIRONMENT, "PYTHONPATH": PATHS}


def main() -> None:
    """As `tests.vllm.play`. vLLM looks through all modules for Triton kernels to replace, of which there are
    none here, and fails at one that LMCache imports (llvmlite's): so it is kept from looking."""
    import vllm.triton_utils.dispatcher as dispatcher

    from tests.vllm.play import main as play

    dispatcher._rebind_kernels = lambda kernels: None
    play()


if __name__ == "__main__":
    main()
