"""Makes neuronx-distributed's own source importable on a CPU, without any of AWS's packages.

What it takes of them is imported and not called by its layers, its loss and its choice of groups: a name of a stand-in
is another stand-in. The one that is called is `get_platform_target`, whose answer is read from the environment.
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
"""Folder of a checkout of github.com/aws-neuron/neuronx-distributed."""
PACKAGES = ("torch_neuronx", "libneuronxla", "neuronxcc", "nki", "nkilib")
PLATFORM_VARIABLE = "NEURON_PLATFORM_TARGET_OVERRIDE"


class _AnyClass(type):
    """Makes classes with any member."""

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
    """A module of any names: of classes where they begin in upper case, or else of such modules, which decorate."""

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
    """Put the source that NXD_SOURCE names, and stand-ins for what it imports, where imports find them. Nothing where
    the variable is absent. Raises `FileNotFoundError` where it names no checkout.
    """
    if SOURCE_VARIABLE not in os.environ or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    source = Path(os.environ[SOURCE_VARIABLE], "src")
    if not (source / "neuronx_distributed").is_dir():
        raise FileNotFoundError(f"{SOURCE_VARIABLE}={source.parent} has no src/neuronx_distributed")
    import torch_xla  # noqa: F401, PLC0415 - it asks for libneuronxla, and would start what it takes for that

    sys.path.insert(0, str(source))
    sys.meta_path.append(_Finder())
    vars(torch.classes)["neuron"] = _StandIn(
        "neuron"
    )  # C++ classes that torch_neuronx registers; annotations name them
