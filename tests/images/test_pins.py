"""The Dockerfiles and locks of a variant have the pins of `images/platforms.toml`."""

from __future__ import annotations

import re

import pytest

from images.lock import BROUGHT, LOCKS, UNION, pins_of
from images.platforms import (
    REPOSITORY,
    SERVICES,
    STAGES_WITH_PROGRAM,
    VARIANTS,
    dockerfile_of,
    explain_no_image,
    find_variant,
    read_platforms,
)
from images.without_cuda import without_cuda

PLATFORMS = read_platforms()


@pytest.mark.parametrize("service", SERVICES)
def test_the_defaults_of_a_dockerfile_are_the_pins_of_the_cpu_variant(service: str) -> None:
    text, cpu = (REPOSITORY / dockerfile_of(service)).read_text(encoding="utf-8"), PLATFORMS["cpu"]
    wanted = {"BASE": cpu.base_of(service), "VARIANT": "cpu", "PINNED_PYTHON": cpu.python, "RAY_VERSION": cpu.ray}
    assert wanted.items() <= dict(re.findall(r"^ARG (\w+)=(.*)$", text, re.MULTILINE)).items()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_package_has_one_version_in_all_locks_of_a_variant(variant: str) -> None:
    platform = PLATFORMS[variant]
    locks = {service: pins_of(LOCKS / f"{service}-{variant}.txt") for service in SERVICES}
    brought = pins_of(BROUGHT[variant]) if variant in BROUGHT else {}
    versions = pins_of(UNION[variant]) | brought | {"ray": platform.ray, "torch": platform.torch}
    for service, lock in {**locks, "union": pins_of(UNION[variant]), "brought": brought}.items():
        assert lock.items() <= versions.items(), service
    for lock in (locks[service] for service in STAGES_WITH_PROGRAM):
        assert not lock.keys() & brought.keys(), "the image would get a second one"
        assert not platform.cuda or lock["cuda-toolkit"].startswith(f"{platform.cuda}.")


@pytest.mark.parametrize(
    ("instance_type", "variant"),
    [
        ("trn1.32xlarge", "neuron"),
        ("trn1n.32xlarge", "neuron"),
        ("trn2.3xlarge", "trn2"),
        ("trn2u.48xlarge", "trn2"),
        ("inf2.48xlarge", ""),
    ],
)
def test_the_images_for_an_instance_type_are_those_of_its_family_s_variant(instance_type: str, variant: str) -> None:
    assert find_variant(instance_type) == variant
    assert (instance_type in explain_no_image(instance_type)) == (variant == "")


def test_a_lock_without_cuda_keeps_all_but_torch_and_what_it_alone_needs() -> None:
    lock = (REPOSITORY / "lockfiles/trainer-cpu.txt").read_text(encoding="utf-8")
    kept = without_cuda(lock)
    left_out = [line for line in lock.splitlines() if line not in kept and not line.startswith((" ", "#"))]
    assert any(line.startswith("torch==") for line in left_out)
    assert all(line.startswith(("torch==", "triton==", "nvidia-", "cuda-")) for line in left_out)
    assert "sympy==" in kept
    assert "--hash=sha256:" in kept
