"""Finds the CPUs near a CUDA device: memory that they touch first lies on the device's NUMA node."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch

from hiradix.memory.host_memory import ReadText, read_text

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NumaNode:
    """A NUMA node and those of its CPUs that this process may run on."""

    number: int
    cpus: frozenset[int]


def node_of(device: torch.device, read: ReadText = read_text) -> NumaNode | None:
    """The node a CUDA device is attached to; None on a CPU, where the machine does not say, or (with a warning)
    where the process may not run on any CPU of that node."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    ids = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    found = [number for number in ids if number is not None]
    return node_at("{:04x}:{:02x}:{:02x}.0".format(*found), read) if len(found) == len(ids) else None


def node_at(pci_address: str, read: ReadText = read_text) -> NumaNode | None:
    """The node of the device at a PCI address such as 0000:3b:00.0."""
    text = (read(f"/sys/bus/pci/devices/{pci_address}/numa_node") or "").strip()
    if not text.lstrip("-").isdigit() or int(text) < 0:
        return None
    cpus = cpu_list(read(f"/sys/devices/system/node/node{text}/cpulist") or "")
    allowed = cpus & frozenset(os.sched_getaffinity(0))
    if not allowed:
        logger.warning("host pool: this process may not run on NUMA node %s, which the device is on", text)
        return None
    return NumaNode(int(text), allowed)


def cpu_list(text: str) -> frozenset[int]:
    """The numbers of a list such as 0-3,8,10-11."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
