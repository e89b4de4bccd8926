"""Lets SGLang's prefix-cache modules be imported where there is no GPU.

`install_sglang` puts an unpacked wheel on the path, serves mocks for modules that are imported at the top of
some file but never run by the prefix cache on CPU tensors, and gives torch.cpu the event and stream surface
of torch.cuda, complete at once.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
import types
from collections.abc import Iterator, Sequence

# What SGLang imports and the prefix cache never runs. Mocked where it is not installed:
LIGHT = (
    "IPython", "PIL", "aiohttp", "blake3", "cachetools", "compressed_tensors", "diskcache", "einops",
    "interegular", "llguidance", "modelscope", "numba", "orjson", "outlines", "partial_json_parser",
    "prometheus_client", "pybase64", "requests", "setproctitle", "tqdm", "uvicorn", "xgrammar", "zmq",
)  # fmt: skip
# Always:
HEAVY = (
    "IPython", "sgl_kernel", "flashinfer", "torchvision", "transformers", "decord", "torch_memory_saver",
    "tvm_ffi", "sglang.srt.layers", "sglang.srt.distributed", "sglang.srt.model_executor",
    "sglang.srt.configs", "sglang.jit_kernel", "sglang.srt.utils.custom_op", "sglang.srt.metrics",
)  # fmt: skip
HEAVY_SINCE_0_5_15 = (
    "sglang.kernels", "sglang.srt.observability", "sglang.srt.utils.hf_transformers_patches",
    "sglang.srt.managers.schedule_batch", "sglang.srt.server_args",
    "sglang.srt.mem_cache.deepseek_v4_memory_pool",
)  # fmt: skip


class Anything:
    """Accepts every use an import-time statement can make of it; as a decorator it changes nothing."""

    def __init_subclass__(cls, **options: object) -> None:
        pass

    def __init__(self, *args: object, **options: object) -> None:
        pass

    def __call__(self, *args: object, **options: object) -> object:
        if len(args) == 1 and callable(args[0]) and not options and not isinstance(args[0], Anything):
            return args[0]
        return self

    def __getitem__(self, item: object) -> object:
        return self

    def __class_getitem__(cls, item: object) -> type:
        return cls

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __bool__(self) -> bool:
        return False

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        return (Anything,)

    def __iter__(self) -> Iterator[object]:
        return iter(())

    def __or__(self, other: object) -> object:
        return self

    __ror__ = __or__


class MockModule(types.ModuleType):
    """A module that has whatever is asked of it: classes by capital letter, else `Anything`."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if full in sys.modules:
            return sys.modules[full]
        if name[:1].isupper():
            return type(name, (Anything,), {"__module__": self.__name__})
        return Anything()


class MockFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serves the named modules and all below them."""

    def __init__(self, names: Sequence[str]):
        self._names = tuple(names)

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if any(name == mocked or name.startswith(mocked + ".") for mocked in self._names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = MockModule(spec.name)
        module.__path__ = []  # type: ignore[attr-defined]
        module.__version__ = "99.0.0"  # type: ignore[attr-defined]
        module.__file__ = "<mock>"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class MockKernel:
    """What `triton.jit` leaves: it may be defined, not launched."""

    def __init__(self, function: object):
        self.fn = function
        self.__name__ = getattr(function, "__name__", "kernel")

    def __getitem__(self, grid: object) -> object:
        raise NotImplementedError(f"kernel {self.__name__} launched on a CPU")


def mock_triton() -> types.ModuleType:
    """A `triton` that survives @triton.jit and tl.constexpr annotations."""
    triton = MockModule("triton")
    triton.__path__ = []  # type: ignore[attr-defined]
    triton.__version__ = "3.5.0"  # type: ignore[attr-defined]
    triton.__file__ = "<mock>"
    triton.jit = lambda fn=None, **options: MockKernel if fn is None else MockKernel(fn)  # type: ignore
    triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()  # type: ignore[attr-defined]
    triton.cdiv = lambda a, b: -(-a // b)  # type: ignore[attr-defined]
    triton.autotune = triton.heuristics = lambda *a, **k: lambda fn: fn  # type: ignore[attr-defined]
    triton.__spec__ = importlib.machinery.ModuleSpec("triton", None, is_package=True)
    return triton


def install_sglang(version: str) -> None:
    """See the module's docstring. Before torch is imported."""
    from install import wheel_folder

    heavy = HEAVY if version == "0.5.9" else (*HEAVY, *HEAVY_SINCE_0_5_15)
    absent = [name for name in LIGHT if importlib.util.find_spec(name) is None]
    sys.path.insert(0, str(wheel_folder(version)))
    sys.modules["triton"] = mock_triton()
    sys.meta_path.insert(0, MockFinder([*heavy, *absent, "triton"]))
    patch_streams()
    logging.getLogger().setLevel(logging.ERROR)


class Event:
    """A torch.cuda.Event that has always happened."""

    def __init__(self, *args: object, **options: object):
        pass

    def record(self, stream: object = None) -> None:
        pass

    def wait(self, stream: object = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: object) -> float:
        return 0.0


class Stream:
    """A torch.cuda.Stream with nothing in it."""

    cuda_stream = 0

    def __init__(self, *args: object, **options: object):
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def record_event(self, event: object = None) -> object:
        return event or Event()

    def query(self) -> bool:
        return True


def patch_streams() -> None:
    """torch.cpu's part of `install_sglang`."""
    import torch

    current = Stream()
    torch.cpu.Event = Event  # type: ignore[misc, assignment]
    torch.cpu.Stream = Stream  # type: ignore[misc, assignment]
    torch.cpu.current_stream = lambda device=None: current  # type: ignore[assignment]
    torch.cpu.stream = lambda stream=None: contextlib.nullcontext()  # type: ignore
