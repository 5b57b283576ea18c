"""What a service runs on: Python, Ray, torch, its libraries, and the variant's own: CUDA's, or those of the Neuron SDK.

`python -m services.common.hardware.image_platform` prints that platform and exits with 4 where a
library of the image cannot be imported: the first thing to run in a new image, before it is given a node. Each image is
built through the same check with `--without-device`: no image that lacks a library gets a tag. That check sees only
this module and the modules that it imports, so that a change of other code does not repeat it.
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
    """What runs the program on a device, described without its libraries."""

    module: str
    """Of services/common/program/backends."""
    class_name: str
    graphs: tuple[str, ...]
    """That it compiles for a recipe."""


NATIVE = BackendEntry("torch_native", "TorchNative", ("forward", "backward", "update", "evaluate"))
CUDA = replace(NATIVE, graphs=("forward", "backward", "evaluate"))  # torch has a kernel for the update
XLA = BackendEntry("neuron_xla", "NeuronXla", ("micro-batch", "update", "check", "load", "evaluate"))
BACKENDS = {"cpu": NATIVE, "cuda": CUDA, "neuron": NATIVE, "xla": XLA}
"""By the recipe's name of the device."""
NEURON_DEVICES = Path("/dev")
"""Where the driver of a Trainium node shows its chips: neuron0, neuron1, ..."""

EVERY_SERVICE = ("numpy", "psutil", "pyarrow", "pydantic", "ray", "rich", "xxhash")
# By the service whose image it is: what its requirements name beyond those of every service.
LIBRARIES = {
    "tokenizer": (
        *("datasets", "fastokens", "fsspec", "huggingface_hub", "llvmlite", "numba"),
        *("s3fs", "sentencepiece", "tiktoken", "tokenizers"),
    ),
    "compiler": ("torch",),
    "trainer": (
        "torch",
        "plotly",
        "ray.train",
        "safetensors",
        "sentencepiece",
        "tensorboardX",
        "tiktoken",
        "tokenizers",
    ),
    "head": ("boto3", "fsspec", "kubernetes", "pandas", "requests"),
}
# What the AWS Neuron training image brings to the services with the program. Whether all of them can be imported where
# there is no Neuron device is not documented.
NEURON_LIBRARIES = ("torch_xla", "torch_neuronx", "libneuronxla", "neuronxcc", "neuronx_distributed")
# What the compiler and the trainer need for GPUs besides a torch that was built with CUDA, whose import loads CUDA's
# libraries, cuDNN and NCCL. Neither import needs a GPU or its driver.
CUDA_LIBRARIES = ("triton",)
WITH_PROGRAM = ("compiler", "trainer")

DISTRIBUTIONS = (
    *("ray", "torch", "numpy", "cuda-toolkit", "triton"),
    *("torch-xla", "torch-neuronx", "neuronx-cc", "neuronx-distributed"),
)
# What the import of a broken package has been seen to raise: a shared library that is missing or too old (ImportError,
# OSError), and a package built for another NumPy or another torch (the others).
BROKEN = (ImportError, OSError, AttributeError, RuntimeError, TypeError, ValueError)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m services.common.hardware.image_platform", description="What this image runs on."
    )
    parser.add_argument(
        "--without-device",
        action="store_true",
        help="look up the libraries that may need the device, and do not import them: for a machine that builds images",
    )
    arguments = parser.parse_args(argv)
    for name, found in describe_platform().items():
        print(f"{name:20} {found}")
    require_libraries(image_service(), image_variant(), without_device=arguments.without_device)
    return 0


def describe_platform() -> dict[str, str]:
    """Name to version of what decides whether two processes can work together; `absent` where there is none."""
    versions = {name: _version_of(name) for name in DISTRIBUTIONS}
    return {"variant": image_variant(), "python": platform.python_version(), **versions}


def image_variant() -> str:
    """The variant of the image that this runs in; `cpu` outside of one."""
    return os.environ.get("MILLRACE_VARIANT") or "cpu"


def is_in_image() -> bool:
    """Does this run in an image of ours, and not in a checkout's environment?"""
    return bool(os.environ.get("MILLRACE_VARIANT"))


def image_service() -> str:
    """The service whose image this runs in; empty outside of one, where all of them run."""
    return os.environ.get("MILLRACE_SERVICE", "")


def require_backend(device: str) -> BackendEntry:
    """What runs the program on the recipe's device. Raises `DeviceError` where this image or this node is for another.

    There is no other device instead: on a Trainium node the CPU would train for weeks while the chips are paid for.
    Outside of an image each device that torch finds may be used.
    """
    variant = image_variant()
    if variant == "neuron" and device != "xla":
        raise DeviceError(
            f"this is a neuron image, which runs the program through torch_xla alone, and parallel.device is "
            f"{device!r}. Use the chips: --parallel.device=xla. {_home_of(device)}"
        )
    if variant == "cuda" and device != "cuda":
        raise DeviceError(
            f"this is a cuda image, which runs the program on NVIDIA GPUs alone, and parallel.device is {device!r}: "
            f"the node's GPUs would be paid for, and idle. Use them: --parallel.device=cuda. {_home_of(device)}"
        )
    if device == "cuda" and variant != "cuda" and is_in_image():
        raise DeviceError(
            f"this is a {variant} image, and parallel.device is 'cuda': its torch may be built without CUDA, and "
            f"it asks the node for no GPU. {_home_of(device)}"
        )
    chips = neuron_chips()
    if chips and device == "cpu":
        raise DeviceError(
            f"this node has {len(chips)} Neuron devices ({NEURON_DEVICES}/{chips[0]} ...), and parallel.device is "
            f"'cpu': they would be paid for, and idle. Use them with --parallel.device=xla in a neuron image, or run "
            f"on a node without them."
        )
    return BACKENDS[device]


def _home_of(device: str) -> str:
    """A sentence that says where a recipe for the device runs, told where it does not."""
    if device == "neuron":
        return "A recipe for neuron runs in no image, but where TorchNeuron is installed."
    variant, node = {
        "cpu": ("cpu", "a node without accelerators"),
        "cuda": ("cuda", "a node with NVIDIA GPUs"),
        "xla": ("neuron", "a Trainium node"),
    }[device]
    return f"A recipe for {device} runs in an image of the {variant} variant, on {node}: make images VARIANT={variant}"


def neuron_chips() -> list[str]:
    """Names of the chips that the driver shows on this node."""
    return sorted(path.name for path in NEURON_DEVICES.glob("neuron[0-9]*"))


def require_libraries(service: str, variant: str, without_device: bool = False) -> None:
    """Raises `DeviceError` when a library that the service's image stands on cannot be imported.

    `without_device`: what may need the variant's device is looked up and not imported.
    """
    for library in dict.fromkeys([*EVERY_SERVICE, *libraries_of(service)]):
        _require(library, variant)
    if service in LIBRARIES.keys() - WITH_PROGRAM:
        return
    if variant == "neuron":
        for library in NEURON_LIBRARIES:
            _require(library, variant, is_imported=not without_device)
    if variant == "cuda":
        for library in CUDA_LIBRARIES:
            _require(library, variant)
        _require_cuda_build()


def libraries_of(service: str) -> tuple[str, ...]:
    """What the service's requirements name beyond those of every service; of all services where it is empty."""
    if not service:
        return tuple(library for libraries in LIBRARIES.values() for library in libraries)
    if service not in LIBRARIES:
        raise DeviceError(f"MILLRACE_SERVICE is {service!r}, and the services are {', '.join(LIBRARIES)}")
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
    """Raises `DeviceError` when torch was built without CUDA: such an image would refuse every recipe on every node."""
    torch = importlib.import_module("torch")
    if torch.version.cuda is None:
        raise DeviceError(
            f"torch {torch.__version__} was built without CUDA (torch.version.cuda is None), and the cuda variant "
            f"needs it. {_advice('torch', 'cuda')}"
        )


def _advice(library: str, variant: str) -> str:
    if library in NEURON_LIBRARIES or (library == "torch" and variant == "neuron"):
        return (
            "A neuron image stands on the AWS Neuron training image, which brings it, and this one does not. "
            "Build it on the base that images/platforms.toml names: make images VARIANT=neuron"
        )
    if image_service():
        return f"Its lock has it: build the image anew, make images STAGE={image_service()} VARIANT={variant}"
    return "Run `make setup`."


def _version_of(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "absent"


if __name__ == "__main__":
    run_program(main)
