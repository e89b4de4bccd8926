"""The value of hits in time: a model of the time to first token, from rates a user can measure."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hiradix.apps.replay.lab import CellResult
from hiradix.errors import ConfigError

_PERCENT = 0.01


@dataclass(frozen=True)
class Machine:
    """prefill_rate: tokens/s. bytes_per_token: of KV. host_rate, storage_rate: bytes/s to the device, to the
    host. overhead_s: of any request. Transfers and prefill of one request follow each other; no queueing.
    """

    prefill_rate: float = 10_000.0
    bytes_per_token: float = 131_072.0
    host_rate: float = 20e9
    storage_rate: float = 3e9
    overhead_s: float = 0.02

    def ttft_s(self, result: CellResult, span: slice = slice(None)) -> npt.NDArray[np.float64]:
        """Seconds to the first token of each request of `span`.

        Where fetching from storage would take longer than computing it, it is computed.
        """
        hits = {name: tokens[span] for name, tokens in result.played.hits.items()}
        found = hits["device"] + hits["host"] + hits["storage"]
        prefill = (result.prompt_tokens[span] - found) / self.prefill_rate
        host = (hits["host"] + hits["storage"]) * self.bytes_per_token / self.host_rate
        stored = hits["storage"] * self.bytes_per_token / self.storage_rate
        fetch: npt.NDArray[np.float64] = np.minimum(stored, hits["storage"] / self.prefill_rate)
        return fetch + self.overhead_s + prefill + host


_RATES = {
    "prefill_rate": "tokens/s", "bytes_per_token": "of KV; a recording says its own", "host_rate": "bytes/s",
    "storage_rate": "bytes/s",
}  # fmt: skip


def add_machine_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that `machine_of` reads."""
    for name, unit in _RATES.items():
        flag, default = f"--{name.replace('_', '-')}", getattr(Machine, name)
        parser.add_argument(flag, type=float, help=f"{unit} (default: {default:g})")


def machine_of(args: argparse.Namespace, bytes_per_token: float | None = None) -> Machine:
    """The machine that the flags say; ConfigError names a bad one. bytes_per_token: where no flag says it."""
    given = {name: getattr(args, name) for name in _RATES if getattr(args, name) is not None}
    for name, value in given.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} must be > 0, got {value:g}")
    own = {} if bytes_per_token is None else {"bytes_per_token": float(bytes_per_token)}
    return Machine(**own | given)


def summary_ms(seconds: npt.NDArray[np.float64]) -> dict[str, float]:
    """Mean and percentiles in ms."""
    shown = {"mean": float(seconds.mean())}
    for percent in (50, 90, 99):
        shown[f"p{percent}"] = float(np.quantile(seconds, percent * _PERCENT))
    return {name: round(value * 1000, 1) for name, value in shown.items()}
