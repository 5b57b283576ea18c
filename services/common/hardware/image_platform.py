"""Describes and checks the platform of an image: Python, Ray, torch, and the libraries of CUDA or of the Neuron SDK.

`python -m services.common.hardware.image_platform` prints the platform, and exits with 4 where a library of the image
cannot be imported. Run it first in a new image, before the image gets a node. The build of every image runs the same
check with `--without-device`, so that an image without a library gets no tag. The build's layer holds only this module
and the modules that it imports, so that a change of other code does not repeat the check.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import platform
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from services.common.errors import DeviceError
from services.common.process.entry_point import run_program


@dataclass(frozen=True)
class BackendEntry:
    """A backend that runs the program on a device, described without an import of its libraries."""

    module: str
    """Name of the module in services/common/program/backends."""
    class_name: str
    graphs: tuple[str, ...]
    """Names of the graphs that the backend compiles for a recipe."""


NATIVE = BackendEntry("torch_native", "TorchNative", ("forward", "backward", "update", "evaluate", "activations"))
CUDA = replace(NATIVE, graphs=("forward", "backward", "evaluate", "activations"))  # torch has a kernel for the update
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
        *("datasets", "fastokens", "fsspec", "huggingface_hub", "llvmlite", "numba"),
        *("s3fs", "sentencepiece", "tiktoken", "tokenizers"),
    ),
    "compiler": ("torch",),
    "trainer": (
        "torch",
        "ray.train",
        "safetensors",
        "sentencepiece",
        "tensorboardX",
        "tiktoken",
        "tokenizers",
        "transformers",
    ),
    "head": ("boto3", "kubernetes", "ray.train", "requests"),
}
# Libraries of the Neuron SDK by variant, for the services with the program. The neuron variant has those of the AWS
# Neuron training image, the trn2 variant TorchNeuron, the compiler and the language of kernels. Whether all of them can
# be imported without a Neuron device is not documented.
NEURON_LIBRARIES = {
    "neuron": ("torch_xla", "torch_neuronx", "libneuronxla", "neuronxcc", "neuronx_distributed"),
    "trn2": ("torch_neuronx", "neuronxcc", "nki"),
}
# With this variable at 0, `import torch` does not load TorchNeuron (awsdocs-neuron latest, torch/index).
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
# Libraries that the compiler and the trainer need for GPUs besides a torch built with CUDA, whose import loads CUDA's
# libraries, cuDNN and NCCL. Neither import needs a GPU or its driver.
CUDA_LIBRARIES = ("triton",)
WITH_PROGRAM = ("compiler", "trainer")


@dataclass(frozen=True)
class VariantDevice:
    """Describes the device on which the images of a variant compute."""

    device: str
    """The only `parallel.device` of recipes that the images run."""
    path: str
    """Words that say on which processors the program runs, and through which library."""
    node: str
    """Words for the nodes that have the device."""


DEVICES_OF_VARIANTS = {
    "cpu": VariantDevice("cpu", "on CPUs", "a node without accelerators"),
    "cuda": VariantDevice("cuda", "on NVIDIA GPUs", "a node with NVIDIA GPUs"),
    "neuron": VariantDevice("xla", "on NeuronCores through torch_xla", "a trn1 node"),
    "trn2": VariantDevice("neuron", "on NeuronCores through TorchNeuron", "a trn2 or trn3 node"),
}
"""Devices of images by the variant of the images."""

DISTRIBUTIONS = (
    *("ray", "torch", "numpy", "cuda-toolkit", "triton"),
    *("torch-xla", "torch-neuronx", "neuronx-cc", "nki", "neuronx-distributed"),
)
# Errors that imports of broken packages were seen to raise: ImportError and OSError for a shared library that is
# missing or too old, and the others for a package that was built for another NumPy or another torch.
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


def is_in_image() -> bool:
    """Tell whether this process runs in an image of Millrace, and not in the environment of a checkout."""
    return bool(os.environ.get("MILLRACE_VARIANT"))


def image_service() -> str:
    """Return the service of this process's image; empty outside of an image, where all services run."""
    return os.environ.get("MILLRACE_SERVICE", "")


def require_backend(device: str) -> BackendEntry:
    """Return the backend for the recipe's device. Raises `DeviceError` where this image or node is for another device.

    No other device takes its place: on a Trainium node the CPU would train for weeks while the chips are paid for.
    Outside of an image, every device that torch finds may be used.
    """
    own = DEVICES_OF_VARIANTS[image_variant()]
    if is_in_image() and device != own.device:
        raise DeviceError(
            f"this is a {image_variant()} image, which runs the program only {own.path}, and parallel.device is "
            f"{device!r}. Use what its nodes are paid for: --parallel.device={own.device}. {_name_images_for(device)}"
        )
    chips = neuron_chips()
    if chips and device == "cpu":
        raise DeviceError(
            f"this node has {len(chips)} Neuron devices ({NEURON_DEVICES}/{chips[0]} ...), and parallel.device is "
            f"'cpu': they would be paid for and idle. Use them with --parallel.device=xla in a neuron image (trn1) or "
            f"--parallel.device=neuron in a trn2 image (trn2, trn3), or run on a node without them."
        )
    return BACKENDS[device]


def _name_images_for(device: str) -> str:
    """Return a sentence that names the image and the node on which a recipe for the device runs."""
    variant, its = next(each for each in DEVICES_OF_VARIANTS.items() if each[1].device == device)
    return (
        f"A recipe for {device} runs in an image of the {variant} variant, on {its.node}: make images VARIANT={variant}"
    )


def neuron_chips() -> list[str]:
    """Return the names of the chips that the driver lists on this node."""
    return sorted(path.name for path in NEURON_DEVICES.glob("neuron[0-9]*"))


def require_libraries(service: str, variant: str, without_device: bool = False) -> None:
    """Raise `DeviceError` where a library of the service's image cannot be imported.

    With `without_device`, libraries that may need the variant's device are searched for and not imported.
    """
    if without_device:
        os.environ[AUTOLOAD] = "0"
    for library in dict.fromkeys([*EVERY_SERVICE, *libraries_of(service)]):
        _require(library, variant)
    if service in LIBRARIES.keys() - WITH_PROGRAM:
        return
    for library in NEURON_LIBRARIES.get(variant, ()):
        _require(library, variant, is_imported=not without_device)
    if variant == "cuda":
        for library in CUDA_LIBRARIES:
            _require(library, variant)
        _require_cuda_build()


def libraries_of(service: str) -> tuple[str, ...]:
    """Return the libraries of a service beyond those of every service; without a service, the libraries of all."""
    if not service:
        return tuple(library for libraries in LIBRARIES.values() for library in libraries)
    if service not in LIBRARIES:
        raise DeviceError(f"MILLRACE_SERVICE is {service!r}, expected one of {', '.join(LIBRARIES)}")
    return LIBRARIES[service]


def _require(library: str, variant: str, is_imported: bool = True) -> None:
    try:
        if is_imported:
            importlib.import_module(library)
        elif importlib.util.find_spec(library) is None:
            raise ModuleNotFoundError(f"No module named {library!r}")
    except BROKEN as error:
        what = "absent" if isinstance(error, ModuleNotFoundError) and error.name in (None, library) else "broken"
        raise DeviceError(
            f"{library} is {what} on the {variant} variant ({error}). {_advice(library, variant)}"
        ) from error


def _require_cuda_build() -> None:
    """Raise `DeviceError` where torch was built without CUDA: such an image would refuse every recipe on every node."""
    torch = importlib.import_module("torch")
    if torch.version.cuda is None:
        raise DeviceError(
            f"torch {torch.__version__} was built without CUDA (torch.version.cuda is None), and the cuda variant "
            f"needs it. {_advice('torch', 'cuda')}"
        )


def _advice(library: str, variant: str) -> str:
    if library == "torch" or library in NEURON_LIBRARIES.get(variant, ()):
        if variant == "neuron":
            return (
                "The AWS Neuron training image has it, and this image is not built on that base. Build it on the base "
                "in images/platforms.toml: make images VARIANT=neuron"
            )
        if variant == "trn2":
            return (
                "The build takes it from the indexes of PyTorch and Neuron, at the version in images/torch-neuron.txt: "
                "make images VARIANT=trn2"
            )
    if image_service():
        return f"Build the image anew from its lock: make images STAGE={image_service()} VARIANT={variant}"
    return "Run `make setup`."


def version_of(distribution: str) -> str:
    """Return the version of an installed distribution; `absent` where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "absent"


if __name__ == "__main__":
    run_program(main)
