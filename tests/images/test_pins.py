"""The Dockerfiles and locks of a variant have the pins of `images/platforms.toml`, and Dockerfiles copy what is needed.

`test_containers.py` runs the images: their users, writable folders, variables and labels.
"""

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
    read_platforms,
)
from images.without_cuda import without_cuda
from services.common.artifacts.__main__ import MANIFEST_TYPES
from services.trainer.runs.description import SCHEMA as RUN_SCHEMA
from tests.architecture.imports import closure_of

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


def test_a_lock_without_cuda_keeps_all_but_torch_and_what_it_alone_needs() -> None:
    lock = (REPOSITORY / "lockfiles/trainer-cpu.txt").read_text(encoding="utf-8")
    kept = without_cuda(lock)
    left_out = [line for line in lock.splitlines() if line not in kept and not line.startswith((" ", "#"))]
    assert any(line.startswith("torch==") for line in left_out)
    assert all(line.startswith(("torch==", "triton==", "nvidia-", "cuda-")) for line in left_out)
    assert "sympy==" in kept
    assert "--hash=sha256:" in kept


def lines_of(name: str) -> list[str]:
    return (REPOSITORY / name).read_text(encoding="utf-8").splitlines()


def test_labels_name_schemas_that_exist_and_every_schema_has_one_image_that_writes_it() -> None:
    schemas = [*(each.SCHEMA for each in MANIFEST_TYPES.values()), RUN_SCHEMA]
    text = "".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "images").glob("*.Dockerfile"))
    labels = {key: " ".join(re.findall(rf'millrace.{key}="(.*)"', text)).split() for key in ("reads", "writes")}
    assert set(labels["reads"]) <= set(schemas)
    assert sorted(labels["writes"]) == sorted(schemas)


def test_the_head_s_image_has_all_that_the_controller_imports_and_no_client() -> None:
    """The Dockerfile copies it, a build may read it, and Pants passes it."""
    reached = closure_of(*(f"k8s.controller.{name}" for name in ("job", "one_off_nodes", "reaper")))
    ours = [module for module in reached if re.match(r"(deploy|k8s)\.", module)]
    sources = {f"{module.rpartition('.')[0].replace('.', '/')}/*.py" for module in ours}
    text = (REPOSITORY / dockerfile_of("head")).read_text(encoding="utf-8")
    assert set(re.findall(r"^COPY ((?:deploy|k8s)\S*) ", text, re.MULTILINE)) == sources
    assert {line[1:] for line in lines_of(".dockerignore") if re.match("!(deploy|k8s)", line)} == sources
    passed = re.findall(r'"(\w+/\*\.py)"', "".join(lines_of("k8s/BUILD")))
    assert {f"k8s/{each}" for each in passed} == sources - {"deploy/*.py"}
