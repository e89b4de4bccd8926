"""Empty modules for what SGLang imports at its top and a text model on a CPU never calls: torchvision has no
CPU build beside torch's here. Python imports this file at every start."""

import enum
import importlib.abc
import importlib.machinery
import sys
import types

NAMES = {"torchvision", "torchaudio"}
INTERPOLATION = "NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS"


class Anything:
    """Takes every call and has every attribute."""

    def __init_subclass__(cls, **_):
        pass

    def __init__(self, *_, **__):
        pass

    def __call__(self, *arguments, **named):
        is_decorated = len(arguments) == 1 and callable(arguments[0]) and not named
        return arguments[0] if is_decorated else self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class EmptyModule(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if full in sys.modules:
            return sys.modules[full]
        if name == "InterpolationMode":
            return enum.Enum(name, INTERPOLATION)
        return type(name, (Anything,), {"__module__": self.__name__}) if name[:1].isupper() else Anything()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in NAMES or _asked_by("_is_package_available"):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = EmptyModule(spec.name)
        module.__path__, module.__version__, module.__file__ = [], "0.0.0", "<empty>"
        return module

    def exec_module(self, module):
        pass


def _asked_by(function, depth=9):
    """Whether a caller has that name: transformers must keep seeing these packages as not installed."""
    frame = sys._getframe()
    for _ in range(depth):
        frame = frame.f_back
        if frame is None:
            return False
        if frame.f_code.co_name == function:
            return True
    return False


sys.meta_path.append(Finder())
