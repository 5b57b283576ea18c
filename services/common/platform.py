"""What the program runs on: Python, Ray, torch, and on the Neuron variant its libraries.

`python -m services.common.platform` prints it and exits with 4 where a library of the image's variant is
missing: the first thing to run in a new image of the compiler or the trainer, before it is given a node.
"""

from __future__ import annotations

import importlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version

from services.common.errors import DeviceError, run_stage

LIBRARIES = {
    "cpu": ("torch", "ray"),
    "neuron": ("torch", "torch_xla", "torch_neuronx", "libneuronxla", "neuronxcc", "neuronx_distributed", "ray"),
}
DISTRIBUTIONS = ("ray", "torch", "numpy", "torch-xla", "torch-neuronx", "neuronx-cc", "neuronx-distributed")


def main(argv: list[str]) -> int:
    variant = image_variant()
    for name, found in describe_platform().items():
        print(f"{name:20} {found}")
    require_platform(variant)
    return 0


def describe_platform() -> dict[str, str]:
    """Name to version of what decides whether two processes can work together; `absent` where there is none."""
    versions = {name: _version_of(name) for name in DISTRIBUTIONS}
    return {"variant": image_variant(), "python": platform.python_version(), **versions}


def image_variant() -> str:
    """The variant of the image that this runs in; `cpu` outside of one."""
    return os.environ.get("MILLRACE_VARIANT", "cpu")


def require_platform(variant: str) -> None:
    """Raises `DeviceError` when a library that the variant stands on cannot be imported."""
    for library in LIBRARIES[variant]:
        try:
            importlib.import_module(library)
        except ImportError as error:
            advice = "Run `make setup`."
            if variant == "neuron":
                advice = (
                    "A neuron image stands on the AWS Neuron training image, which brings it, and this one does not. "
                    "Build it on the base that images/platforms.toml names: make images VARIANT=neuron"
                )
            raise DeviceError(f"{library} is absent on the {variant} variant ({error}). {advice}") from error


def _version_of(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "absent"


if __name__ == "__main__":
    run_stage(main)
