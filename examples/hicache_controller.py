"""Pages between device, host and storage by hand, with the controller that every cache of hiradix uses.

It moves pages and knows nothing of what they contain: which pages hold which prefix, and which may leave, is
its caller's to know. The classes in `hiradix.prefix_cache` know it from a radix tree.
"""

import tempfile

import numpy as np
import torch

from hiradix.memory import DevicePool, HostPool, KVShape, PageAllocator, TorchTransport
from hiradix.storage import PageFingerprint, StorageContext, Stores
from hiradix.storage.opening import open_storage
from hiradix.transfer import HiCacheController, Result
from hiradix.tree.hashing import PageRows

PAGE, LAYERS, DEADLINE_S = 16, 2, 10.0


class Tiers:
    """Two pools, what is free of each, and the controller between them."""

    def __init__(self) -> None:
        shape = KVShape(num_layers=LAYERS, num_kv_heads=2, head_dim=16, v_head_dim=16, dtype=torch.float32)
        self.device, self.host = DevicePool(shape, 32, PAGE), HostPool(shape, 32, PAGE)
        self.device_free, self.host_free = PageAllocator(32), PageAllocator(32)
        self.controller = HiCacheController(
            self.device, self.host, transport=TorchTransport(),
            device_free=self.device_free, host_free=self.host_free,
        )  # fmt: skip

    def ended(self, ticket: int) -> Result:
        """A ticket's outcome. A server polls once per step instead of waiting."""
        if not self.controller.wait([ticket], DEADLINE_S):
            raise TimeoutError(f"ticket {ticket}")
        (result,) = self.controller.poll()
        return result


def main(folder: str) -> None:
    tiers = Tiers()
    controller, tokens = tiers.controller, np.arange(4 * PAGE).reshape(4, PAGE)
    pages = tiers.device_free.alloc(4)
    slots = torch.from_numpy(pages[:, None] * PAGE + np.arange(PAGE)).flatten()
    for layer in range(LAYERS):  # what a forward pass does
        tiers.device.k_buffer[layer][slots] = float(layer + 1)

    # Device to host. The copy waits for all work that the compute stream was given before.
    host_pages = tiers.host_free.alloc(4)
    result = tiers.ended(controller.write(pages, host_pages))
    print(result.kind.value, result.num_pages, controller.evict_device(pages))  # write 4 4

    # Host to device, layer by layer: the pool's getters wait for the layer they are asked for.
    pages = tiers.device_free.alloc(4)
    ticket = controller.load(host_pages, pages)
    controller.layer_done_counter.set_consumer(controller.start_loading())
    print([tiers.device.get_key_buffer(n)[pages[3] * PAGE, 0, 0].item() for n in range(LAYERS)])  # [1.0, 2.0]
    print(tiers.ended(ticket).error)  # None

    # Host to storage: a page's name is the hash of its tokens and of all before them.
    keys = {"file_storage_path": folder}
    store = open_storage("file", StorageContext(PageFingerprint("my-model"), keys, tiers.host.page_bytes))
    controller.attach(Stores([store]))
    stored = tiers.ended(controller.write_storage(PageRows(b"", tokens), host_pages))
    print(stored.num_pages, len(stored.hashes), controller.evict_host(host_pages))  # 4 4 4

    # Storage to host: two more pages are asked for than storage has.
    asked = PageRows(b"", np.concatenate([tokens, tokens[:2]]))
    host_pages = tiers.host_free.alloc(6)
    operation = controller.prefetch(asked, host_pages)
    while not operation.is_done and controller.wait_any(DEADLINE_S):
        controller.poll()
    print(operation.num_hit_pages, operation.num_pages)  # 4 4
    print(controller.evict_host(host_pages[operation.num_pages :]), tiers.host_free.available)  # 2 28

    # Who does not want to wait any longer ends a prefetch early; its pages are free once it is done.
    operation = controller.prefetch(asked, tiers.host_free.alloc(6))
    controller.terminate_prefetch(operation)
    while not operation.is_done and controller.wait_any(DEADLINE_S):
        controller.poll()
    print(controller.evict_host(operation.host_pages))  # 6

    print(controller.detach(DEADLINE_S))  # True
    store.close()
    print(controller.reset(DEADLINE_S), controller.close(DEADLINE_S))  # True True


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
