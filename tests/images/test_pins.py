"""The images of a variant have the same pins, and `make check` names a file that differs from them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from images.check import differences
from images.platforms import REPOSITORY, explain_no_image, find_variant
from images.without_cuda import without_cuda


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A copy of the files that hold pins."""
    for name in ("images", "lockfiles"):
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=shutil.ignore_patterns("*.crt", "__pycache__"))
    return tmp_path


def replace_in(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_the_images_of_this_repository_have_their_pins() -> None:
    assert differences() == []


@pytest.mark.parametrize(
    ("file", "old", "new", "named"),
    [
        ("images/head.Dockerfile", "ARG RAY_VERSION=2.60.0", "ARG RAY_VERSION=2.59.0", "ARG RAY_VERSION is 2.59.0"),
        ("images/program.Dockerfile", "slim-bookworm", "slim-trixie", "images/program.Dockerfile: ARG BASE"),
        ("images/platforms.toml", 'ray = "2.60.0"', 'ray = "2.61.0"', "lockfiles/trainer-cpu.txt: ray is 2.60.0"),
        ("images/torch-neuron.txt", "torch==2.13.0", "torch==2.14.0", "images/torch-neuron.txt: torch is 2.14.0"),
        ("lockfiles/head-cpu.txt", "ray==2.60.0", "ray==2.59.0", "lockfiles/head-cpu.txt: ray is 2.59.0"),
        ("lockfiles/trainer-neuron.txt", "pyarrow==", "pyarrow==1", "dev-neuron.txt"),
        ("lockfiles/compiler-neuron.txt", "xxhash==", "numpy==1.26.4\nxxhash==", "compiler-neuron.txt: numpy"),
        ("lockfiles/trainer-cuda.txt", "torch==2.13.0", "torch==2.12.0", "lockfiles/trainer-cuda.txt: torch is 2.12.0"),
        ("lockfiles/compiler-cuda.txt", "cuda-toolkit==13.0", "cuda-toolkit==12.9", "cuda-toolkit is 12.9"),
        ("lockfiles/compiler-trn2.txt", "xxhash==", "torch==2.13.0\nxxhash==", "lockfiles/compiler-trn2.txt: torch"),
    ],
)
def test_an_image_that_leaves_the_pin_of_its_variant_is_named(
    repository: Path, file: str, old: str, new: str, named: str
) -> None:
    assert differences(repository) == []
    replace_in(repository / file, old, new)
    assert named in "\n".join(differences(repository))


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
