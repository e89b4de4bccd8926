"""Small tensors of the host, such as page ids, on their way to a device."""

from __future__ import annotations

import torch


def upload(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """`tensor`, which is on the CPU, on `device`; itself where that is the CPU.

    In the order of the calling thread's current stream, for what is launched there or waits for it. The
    caller does not wait: from memory that is not pinned it would, for everything on that stream. Torch keeps
    the pinned copy until the device has read it, so `tensor` may be changed at once.
    """
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
