"""Compares Dockerfiles, locks and the tags of base images with the pins in `platforms.toml`.

It reads only files of the repository and needs no Docker; a build checks the base image itself.
"""

from __future__ import annotations

import re
from pathlib import Path

from images.lock import BROUGHT, UNION, pins_of
from images.platforms import (
    REPOSITORY,
    SERVICES,
    STAGES_WITH_PROGRAM,
    CudaNode,
    NeuronNode,
    Platform,
    dockerfile_of,
    read_platforms,
    version_numbers,
)

TORCH_NEURON_SYSTEM = "ubuntu:26.04"
"""The only system that the wheels of torch-neuronx are for."""


def differences(repository: Path = REPOSITORY) -> list[str]:
    """Return a line for every file that differs from its variant's pin, or from another file of the variant."""
    platforms = read_platforms(repository / "images/platforms.toml")
    problems = [
        problem for service in SERVICES for problem in _dockerfile_differences(repository, service, platforms["cpu"])
    ]
    for platform in platforms.values():
        problems += _tag_differences(platform) + _node_differences(platform) + _lock_differences(repository, platform)
        problems += _torch_neuron_differences(repository, platform)
    return list(dict.fromkeys(problems))  # two services may have one Dockerfile


def _dockerfile_differences(repository: Path, service: str, cpu: Platform) -> list[str]:
    dockerfile = dockerfile_of(service)
    head = (repository / dockerfile).read_text(encoding="utf-8").partition("\nFROM ")[0]
    found = dict(re.findall(r"^ARG (\w+)=(.*)$", head, flags=re.MULTILINE))
    wanted = {
        "BASE": cpu.base_of(service),
        "VARIANT": cpu.variant,
        "PINNED_PYTHON": cpu.python,
        "RAY_VERSION": cpu.ray,
    }
    return [
        f"{dockerfile}: ARG {name} is {found.get(name)}, images/platforms.toml says {value}"
        for name, value in wanted.items()
        if found.get(name) != value
    ]


def _tag_differences(platform: Platform) -> list[str]:
    """The tag of a base image contains its Python, and the Neuron image's also its SDK: both must be the pin's."""
    minor = "".join(platform.python.split(".")[:2])
    wanted = [(platform.slim, platform.python)]
    if platform.torch_neuronx:
        wanted.append((platform.platform, TORCH_NEURON_SYSTEM))
    elif platform.sdk:
        wanted += [(platform.platform, f"py{minor}"), (platform.platform, f"sdk{platform.sdk}-")]
    wanted += [(platform.debian.slim, platform.debian.python)] if platform.debian else []
    return [
        f"images/platforms.toml, {platform.variant}: the base {image} is not tagged {part}"
        for image, part in wanted
        if part not in image
    ]


def _node_differences(platform: Platform) -> list[str]:
    """An SDK is raised together with what its nodes must have: the device plugin carries the SDK's number."""
    node = platform.node
    where = f"images/platforms.toml, {platform.variant}"
    if isinstance(node, CudaNode) != bool(platform.cuda):
        return [f"{where}: a CUDA release and a node table need each other"]
    if isinstance(node, NeuronNode) != bool(platform.sdk):
        return [f"{where}: a Neuron SDK and a node table need each other"]
    if not isinstance(node, NeuronNode):
        return []
    problems = []
    sdk = version_numbers(platform.sdk)[:2]
    if node.device_plugin and version_numbers(node.device_plugin)[:2] != sdk:
        problems.append(f"the device plugin {node.device_plugin} is not that of SDK {platform.sdk}")
    if not node.takes_driver(node.driver):
        problems.append(f"the driver {node.driver} is not before {node.driver_before}")
    return [f"{where}: {problem}" for problem in problems]


def _lock_differences(repository: Path, platform: Platform) -> list[str]:
    problems = []
    first_seen: dict[str, tuple[str, str]] = {}
    brought = BROUGHT[platform.variant].relative_to(REPOSITORY) if platform.variant in BROUGHT else None
    base = pins_of(repository / brought) if brought else {}
    services = {f"{service}-{platform.variant}": service for service in SERVICES}
    for name in (UNION[platform.variant].stem, *services):
        has_program = services.get(name) in STAGES_WITH_PROGRAM
        lock = pins_of(repository / "lockfiles" / f"{name}.txt")
        for package, wanted in (("ray", platform.ray), ("torch", platform.torch)):
            if package in lock and lock[package] != wanted:
                problems.append(f"lockfiles/{name}.txt: {package} is {lock[package]}, the pin is {wanted}: make lock")
        for package, version in lock.items():
            other, theirs = first_seen.setdefault(package, (name, version))
            if theirs != version:
                problems.append(f"lockfiles/{name}.txt: {package} is {version}, {other}.txt has {theirs}: make lock")
        if platform.cuda and has_program:
            problems += _cuda_differences(name, lock, platform.cuda)
        if has_program:
            problems += [
                f"lockfiles/{name}.txt: {package} would replace that of {brought}: make lock"
                for package in sorted(lock.keys() & base.keys())
            ]
    return problems


def _torch_neuron_differences(repository: Path, platform: Platform) -> list[str]:
    """TorchNeuron is of one release of torch, and the file that it is installed from has the pins of both."""
    if not platform.torch_neuronx:
        return []
    file = BROUGHT[platform.variant].relative_to(REPOSITORY)
    found = pins_of(repository / file)
    problems = [
        f"{file}: {package} is {found.get(package)}, images/platforms.toml says {wanted}"
        for package, wanted in (("torch", platform.torch), ("torch-neuronx", platform.torch_neuronx))
        if found.get(package) != wanted
    ]
    if version_numbers(platform.torch_neuronx)[:2] != version_numbers(platform.torch)[:2]:
        where = f"images/platforms.toml, {platform.variant}"
        problems.append(f"{where}: TorchNeuron {platform.torch_neuronx} is not for torch {platform.torch}")
    return problems


def _cuda_differences(name: str, lock: dict[str, str], cuda: str) -> list[str]:
    """The lock of an image that computes on GPUs must contain the pinned CUDA, and Triton."""
    found = lock.get("cuda-toolkit", "")
    problems = [] if found.startswith(f"{cuda}.") else [f"cuda-toolkit is {found or 'absent'}, the pin is {cuda}"]
    problems += [] if "triton" in lock else ["triton is absent"]
    return [f"lockfiles/{name}.txt: {problem}: make lock" for problem in problems]
