"""SGLang's kernels, which exist for CUDA only: every name can be imported, and raises an error when it is called.

SGLang's attention in torch calls none of them. Memory that SGLang asks to pin is not pinned, which needs a driver.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

__version__ = "999.0.0"  # SGLang compares it with a minimum


class _Missing:
    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __call__(self, *_: object, **__: object) -> None:
        raise NotImplementedError(f"{self.__name__} has no build for CPU")

    def __getattr__(self, name: str) -> Any:
        return _member_of(self.__name__)(name)


def _member_of(parent: str) -> Callable[[str], Any]:
    def find(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{parent}.{name}")

    return find


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, *_: object, **__: object) -> importlib.machinery.ModuleSpec | None:
        inside = name.startswith(f"{__name__}.")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if inside else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__dict__["__getattr__"] = _member_of(spec.name)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, pin_memory: bool = False, **fields: Any) -> Any:  # noqa: ARG001
        return make(*args, **fields)

    return made


def _same(tensor: Any, *_: object) -> Any:
    return tensor


sys.meta_path.append(_Submodules())
__getattr__ = _member_of(__name__)
if not torch.cuda.is_available():
    setattr(torch.Tensor, "pin_memory", _same)  # noqa: B010
    for _name in ("tensor", "empty", "zeros"):
        setattr(torch, _name, _unpinned(getattr(torch, _name)))
