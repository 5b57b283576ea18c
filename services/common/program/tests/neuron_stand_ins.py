"""Stand-ins for AWS's packages, with which neuronx-distributed's own source can be imported on a CPU.

Its layers, its loss and its choice of groups import names from those packages without calling them, so every attribute
of a stand-in is another stand-in. They do call `get_platform_target`, which here reads the environment.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

SOURCE_VARIABLE = "NXD_SOURCE"
"""Variable that names the folder of a checkout of github.com/aws-neuron/neuronx-distributed."""
PACKAGES = ("torch_neuronx", "libneuronxla", "neuronxcc", "nki", "nkilib")
PLATFORM_VARIABLE = "NEURON_PLATFORM_TARGET_OVERRIDE"


class _AnyClass(type):
    """Metaclass of classes that have every member."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _AnyInstance:
    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, key: Any) -> Any:
        return self


class _StandIn(ModuleType):
    """A module with every name: a class where the name begins in upper case, otherwise another such module."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any = _StandIn(f"{self.__name__}.{name}")
        if name[0].isupper():
            value = _AnyClass(name, (_AnyInstance,), {})
        elif name == "get_platform_target":
            value = _read_platform
        setattr(self, name, value)
        return value

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return arguments[0] if arguments and callable(arguments[0]) else self


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".", maxsplit=1)[0] in PACKAGES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _read_platform(*arguments: Any, **options: Any) -> str:
    return os.environ.get(PLATFORM_VARIABLE, "trn1")


def install() -> None:
    """Make the source that NXD_SOURCE names importable, with stand-ins for the packages that it imports.

    Does nothing where the variable is absent. Raises `FileNotFoundError` where it names no checkout.
    """
    if SOURCE_VARIABLE not in os.environ or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    source = Path(os.environ[SOURCE_VARIABLE], "src")
    if not (source / "neuronx_distributed").is_dir():
        raise FileNotFoundError(f"{SOURCE_VARIABLE}={source.parent} names a folder without src/neuronx_distributed")
    import torch_xla  # noqa: F401, PLC0415 - before the stand-ins: it would start that of libneuronxla

    sys.path.insert(0, str(source))
    sys.meta_path.append(_Finder())
    # torch_neuronx registers C++ classes under this name, and annotations refer to them.
    vars(torch.classes)["neuron"] = _StandIn("neuron")
