"""Which transport serves an `--hicache-io-backend` on a device."""

from __future__ import annotations

import logging

import torch

from hiradix.errors import ConfigError
from hiradix.memory.transport import TorchTransport, Transport

logger = logging.getLogger(__name__)

IO_BACKENDS = ("kernel", "direct", "auto")


def choose_transport(io_backend: str, device: torch.device) -> Transport:
    """See `make_transport`."""
    if io_backend not in IO_BACKENDS:
        known = ", ".join(IO_BACKENDS)
        raise ConfigError(f"--hicache-io-backend {io_backend}: not one of the transports here ({known})")
    transport = _pick(io_backend, device)
    name, note = transport.name, transport.note
    logger.info("--hicache-io-backend %s on %s: %s transport, %s", io_backend, device, name, note)
    return transport


def _pick(io_backend: str, device: torch.device) -> Transport:
    return TorchTransport("pools on a CPU are copied with torch")
