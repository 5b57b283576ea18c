"""Describes and checks the platform of an image: Python, Ray, torch, and the libraries of CUDA or of the Neuron SDK.

`python -m services.common.hardware.image_platform` prints the platform, and exits with 4 where a library of the image
cannot be imported. The build of every image runs it with `--without-device`, in a layer that holds only this module and
those that it imports: an image without a library gets no tag, and a change of other code does not repeat the check.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from services.common.errors import DeviceError
from services.common.process.entry_point import run_program


class BackendEntry(NamedTuple):
    """A backend that runs the program on a device, described without an import of its libraries."""

    module: str
    """Name of the module in services/common/program/backends."""
    class_name: str
    graphs: tuple[str, ...]
    """Names of the graphs that the backend compiles for a recipe."""


NATIVE = BackendEntry("torch_native", "TorchNative", ("forward", "backward", "update", "evaluate", "activations"))
CUDA = NATIVE._replace(graphs=("forward", "backward", "evaluate", "activations"))  # torch has a kernel for the update
XLA = BackendEntry(
    "neuron_xla", "NeuronXla", ("micro-batch", "update", "check", "load", "evaluate", "activations", "norms")
)
BACKENDS = {"cpu": NATIVE, "cuda": CUDA, "neuron": NATIVE, "xla": XLA}
"""Backends by `parallel.device` of a recipe."""
NEURON_DEVICES = Path("/dev")
"""Folder in which the driver of a Trainium node lists its chips: neuron0, neuron1, ..."""

EVERY_SERVICE = (
    *("numpy", "prometheus_client", "psutil", "pyarrow", "pydantic"),
    *("ray", "rich", "typer", "urllib3", "xxhash"),
)
# Libraries by service, which its requirements name beyond those of every service.
LIBRARIES = {
    "tokenizer": (
        *("datasets", "fastokens", "fsspec", "huggingface_hub", "jinja2", "llvmlite", "numba"),
        *("s3fs", "sentencepiece", "tiktoken", "tokenizers"),
    ),
    "compiler": ("torch",),
    "trainer": (
        *("torch", "ray.train", "jinja2", "safetensors", "sentencepiece", "tensorboardX"),
        *("tiktoken", "tokenizers", "transformers"),
    ),
    "head": ("boto3", "kubernetes", "ray.train", "requests"),
}
# Libraries of the Neuron SDK by variant, for the services with the program. Whether all of them can be imported without
# a Neuron device is not documented.
NEURON_LIBRARIES = {
    "neuron": ("torch_xla", "torch_neuronx", "libneuronxla", "neuronxcc", "neuronx_distributed"),
    "trn2": ("torch_neuronx", "neuronxcc", "nki"),
}
# With this variable at 0, `import torch` does not load TorchNeuron (awsdocs-neuron latest, torch/index).
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
WITH_PROGRAM = ("compiler", "trainer")
DEVICES_OF_VARIANTS = {"cpu": "cpu", "cuda": "cuda", "neuron": "xla", "trn2": "neuron"}
"""The only `parallel.device` of recipes that images of a variant run."""

DISTRIBUTIONS = (
    *("ray", "torch", "numpy", "cuda-toolkit", "triton"),
    *("torch-xla", "torch-neuronx", "neuronx-cc", "nki", "neuronx-distributed"),
)
# Imports raise ImportError and OSError for a shared library that is missing or too old, and the others for a package
# that was built for another NumPy or another torch.
BROKEN = (ImportError, OSError, AttributeError, RuntimeError, TypeError, ValueError)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m services.common.hardware.image_platform",
        description="Print this image's platform and check its libraries.",
    )
    parser.add_argument(
        "--without-device",
        action="store_true",
        help="search for libraries that may need the device instead of importing them, on a machine that builds images",
    )
    arguments = parser.parse_args(argv)
    for name, found in describe_platform().items():
        print(f"{name:20} {found}")
    require_libraries(image_service(), image_variant(), without_device=arguments.without_device)
    return 0


def describe_platform() -> dict[str, str]:
    """Return the versions on which two processes must agree to work together, by name; `absent` where not installed."""
    versions = {name: version_of(name) for name in DISTRIBUTIONS}
    return {"variant": image_variant(), "python": platform.python_version(), **versions}


def image_variant() -> str:
    """Return the variant of this process's image; `cpu` outside of an image."""
    return os.environ.get("MILLRACE_VARIANT") or "cpu"


def image_service() -> str:
    """Return the service of this process's image; empty outside of an image, where all services run."""
    return os.environ.get("MILLRACE_SERVICE", "")


def require_backend(device: str) -> BackendEntry:
    """Return the backend for the recipe's device. Raises `DeviceError` where this image or node is for another device.

    On a Trainium node the CPU would train for weeks while the chips are paid for. Outside of an image, any device may
    be used.
    """
    own = DEVICES_OF_VARIANTS[image_variant()]
    if os.environ.get("MILLRACE_VARIANT") and device != own:
        [variant] = [name for name, each in DEVICES_OF_VARIANTS.items() if each == device]
        raise DeviceError(
            f"this is a {image_variant()} image, which runs --parallel.device={own} alone, and the recipe says "
            f"{device!r}. For that build make images VARIANT={variant}."
        )
    chips = neuron_chips()
    if chips and device == "cpu":
        raise DeviceError(
            f"this node has {len(chips)} Neuron devices, which parallel.device 'cpu' would leave idle. Use "
            f"--parallel.device=xla in a neuron image (trn1) or --parallel.device=neuron in a trn2 image (trn2, trn3)."
        )
    return BACKENDS[device]


def neuron_chips() -> list[str]:
    """Return the names of the chips that the driver lists on this node."""
    return sorted(path.name for path in NEURON_DEVICES.glob("neuron[0-9]*"))


def require_libraries(service: str, variant: str, without_device: bool = False) -> None:
    """Raise `DeviceError` where a library of the service's image cannot be imported.

    With `without_device`, libraries that may need the variant's device are searched for and not imported.
    """
    if without_device:
        os.environ[AUTOLOAD] = "0"
    own = LIBRARIES[service] if service else itertools.chain.from_iterable(LIBRARIES.values())
    for library in dict.fromkeys([*EVERY_SERVICE, *own]):
        _require(library, variant)
    if service in LIBRARIES.keys() - WITH_PROGRAM:
        return
    for library in NEURON_LIBRARIES.get(variant, ()):
        _require(library, variant, is_imported=not without_device)
    if variant == "cuda":  # neither import needs a GPU or its driver
        _require("triton", variant)
        torch = importlib.import_module("torch")
        if torch.version.cuda is None:  # it would refuse every recipe on every node
            raise DeviceError(f"torch {torch.__version__} was built without CUDA. {_rebuild(variant)}")


def _require(library: str, variant: str, is_imported: bool = True) -> None:
    try:
        if is_imported:
            importlib.import_module(library)
        elif importlib.util.find_spec(library) is None:
            raise ModuleNotFoundError(f"No module named {library!r}")
    except BROKEN as error:
        what = "absent" if isinstance(error, ModuleNotFoundError) and error.name in (None, library) else "broken"
        raise DeviceError(f"{library} is {what} on the {variant} variant ({error}). {_rebuild(variant)}") from error


def _rebuild(variant: str) -> str:
    return f"Rebuild the image: make images VARIANT={variant}; outside of an image, for cpu and cuda: make setup."


def version_of(distribution: str) -> str:
    """Return the version of an installed distribution; `absent` where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "absent"


if __name__ == "__main__":
    run_program(main)
