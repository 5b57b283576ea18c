"""An image is built when it has what its service stands on, and a stage refuses a device that it cannot use."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from images.platforms import REPOSITORY, SERVICES, STAGES_WITH_PROGRAM
from services.common.image_platform import EVERY_SERVICE, LIBRARIES, NEURON_LIBRARIES, WITH_PROGRAM
from tests.command import call
from tests.small import write_notes, write_small_recipe

LOCAL = ("--tokenizer.num_workers=1", "--launch", "inline")


def run(module: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def options(tmp_path: Path) -> tuple[str, ...]:
    write_notes(tmp_path / "notes")
    recipe = write_small_recipe(tmp_path / "small.toml", str(tmp_path / "notes"))
    return ("--recipe", str(recipe), "--root", str(tmp_path / "fsx"))


@pytest.fixture
def in_neuron_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_VARIANT", "neuron")


@pytest.mark.usefixtures("in_neuron_image")
@pytest.mark.parametrize("stage", STAGES_WITH_PROGRAM)
def test_a_neuron_image_refuses_at_once_to_compute_on_the_cpu(
    tmp_path: Path, options: tuple[str, ...], stage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also the step that could run on the CPU: the chips would be paid for, and idle."""
    done = call(capfd, f"services.{stage}.__main__", *options, "--compile.enabled=false")

    assert done.returncode == 4, done.stderr
    assert "this is a neuron image, which runs the program through torch_xla alone" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "fsx").exists()


@pytest.mark.parametrize("stage", STAGES_WITH_PROGRAM)
def test_a_cuda_image_refuses_at_once_to_leave_the_gpus_idle(
    tmp_path: Path,
    options: tuple[str, ...],
    stage: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MILLRACE_VARIANT", "cuda")
    done = call(capfd, f"services.{stage}.__main__", *options, "--compile.enabled=false")

    assert done.returncode == 4, done.stderr
    assert "this is a cuda image" in done.stderr
    assert "--parallel.device=cuda" in done.stderr
    assert "make images VARIANT=cpu" in done.stderr
    assert not (tmp_path / "fsx").exists()


@pytest.mark.parametrize("variant", ["cpu", "neuron"])
@pytest.mark.parametrize("stage", STAGES_WITH_PROGRAM)
def test_an_image_that_is_not_for_gpus_names_the_one_that_is(
    tmp_path: Path,
    options: tuple[str, ...],
    stage: str,
    variant: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cpu image may have a torch that was built without CUDA."""
    monkeypatch.setenv("MILLRACE_VARIANT", variant)
    done = call(capfd, f"services.{stage}.__main__", *options, "--parallel.device=cuda")

    assert done.returncode == 4, done.stderr
    assert f"this is a {variant} image" in done.stderr
    assert "make images VARIANT=cuda" in done.stderr
    assert not (tmp_path / "fsx").exists()


@pytest.mark.parametrize("variant", ["cuda", "neuron"])
@pytest.mark.parametrize("stage", STAGES_WITH_PROGRAM)
def test_a_cluster_is_told_before_it_gives_nodes(
    options: tuple[str, ...],
    stage: str,
    variant: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MILLRACE_VARIANT", variant)
    done = call(capfd, "services.common.readiness", "--stage", stage, *options)

    assert done.returncode == 4, done.stderr
    assert f"this is a {variant} image, which runs the program" in json.loads(done.stdout)["problem"]


@pytest.mark.parametrize("variant", ["cuda", "neuron"])
def test_an_image_for_another_device_still_shows_what_a_recipe_means(
    options: tuple[str, ...], variant: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_VARIANT", variant)
    for stage in STAGES_WITH_PROGRAM:
        done = call(capfd, f"services.{stage}.__main__", *options, "--dry-run")
        assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("in_neuron_image")
def test_the_tokenizer_needs_no_neuron(
    tmp_path: Path, options: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    done = call(capfd, "services.tokenizer.__main__", *options, *LOCAL)

    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "fsx").glob("corpus/*/*/manifest.json"))
    ready = call(capfd, "services.common.readiness", "--stage", "tokenizer", *options)
    assert ready.returncode == 0, ready.stdout


def test_the_tokenizer_needs_no_gpu(
    options: tuple[str, ...], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_VARIANT", "cuda")
    ready = call(capfd, "services.common.readiness", "--stage", "tokenizer", *options)

    assert ready.returncode == 0, ready.stdout
    assert json.loads(ready.stdout)["platform"]["variant"] == "cuda"


@pytest.mark.parametrize("service", SERVICES)
def test_what_a_service_requires_is_what_its_image_is_checked_for(service: str) -> None:
    shared = ["common/program"] if service in STAGES_WITH_PROGRAM else []
    assert {*EVERY_SERVICE, *LIBRARIES[service]} == required_by("common", service, *shared)
    assert (service in WITH_PROGRAM) == (service in STAGES_WITH_PROGRAM)


def required_by(*folders: str) -> set[str]:
    """The modules of the packages that these folders' requirements name; an extra of Ray is a module of its own."""
    texts = [(REPOSITORY / "services" / folder / "requirements.txt").read_text(encoding="utf-8") for folder in folders]
    lines = [line for text in texts for line in text.splitlines() if line and not line.startswith("#")]
    names = {re.split(r"[\[><=]", line)[0].replace("-", "_") for line in lines}
    return names | {"ray.train" for line in lines if line.startswith("ray[train]")}


BROKEN_RICH = """
raise AttributeError("_ARRAY_API not found")
"""


def test_a_library_that_is_there_and_breaks_is_named(tmp_path: Path) -> None:
    (tmp_path / "rich.py").write_text(BROKEN_RICH, encoding="utf-8")

    path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    done = run("services.common.image_platform", MILLRACE_SERVICE="head", PYTHONPATH=path)

    assert done.returncode == 4, done.stderr
    assert "rich is broken on the cpu variant (_ARRAY_API not found)" in done.stderr
    assert "make images STAGE=head VARIANT=cpu" in done.stderr


def test_where_images_are_built_neuron_libraries_are_not_imported(tmp_path: Path) -> None:
    """One that asks for its device when it is imported would keep every image from being built."""
    for library in NEURON_LIBRARIES:
        (tmp_path / f"{library}.py").write_text('raise RuntimeError("no device")', encoding="utf-8")
    neuron = {
        "MILLRACE_SERVICE": "compiler",
        "MILLRACE_VARIANT": "neuron",
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY)]),
    }

    built = run("services.common.image_platform", "--without-device", **neuron)
    started = run("services.common.image_platform", **neuron)

    assert built.returncode == 0, built.stderr
    assert started.returncode == 4
    assert "torch_xla is broken on the neuron variant (no device)" in started.stderr


@pytest.mark.parametrize("service", ["tokenizer", "head"])
def test_images_without_the_program_need_no_neuron_library(service: str) -> None:
    done = run("services.common.image_platform", MILLRACE_SERVICE=service, MILLRACE_VARIANT="neuron")

    assert done.returncode == 0, done.stderr


def check_build(folder: Path, service: str, **modules: str) -> subprocess.CompletedProcess[str]:
    """The check of a cuda image's build, where these modules are what the image has."""
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source, encoding="utf-8")
    path = os.pathsep.join([str(folder), str(REPOSITORY)])
    environment = {"MILLRACE_SERVICE": service, "MILLRACE_VARIANT": "cuda", "PYTHONPATH": path}
    return run("services.common.image_platform", "--without-device", **environment)


TORCH_FOR_GPUS = "__version__ = '2.13.0+cu130'\nclass version:\n    cuda = '13.0'\n"
TORCH_FOR_CPUS = "__version__ = '2.13.0+cpu'\nclass version:\n    cuda = None\n"
NO_TRITON = "raise ModuleNotFoundError('No module named triton', name='triton')"


def test_a_cuda_image_is_built_where_there_is_no_gpu(tmp_path: Path) -> None:
    done = check_build(tmp_path, "compiler", torch=TORCH_FOR_GPUS, triton="")

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("torch", "triton", "told"),
    [
        (TORCH_FOR_CPUS, "", "torch 2.13.0+cpu was built without CUDA"),
        (TORCH_FOR_GPUS, NO_TRITON, "triton is absent on the cuda variant"),
        ("raise OSError('libcudart.so.13: cannot open shared object file')", "", "torch is broken on the cuda variant"),
    ],
    ids=["torch-for-cpus", "no-triton", "no-cuda-libraries"],
)
def test_a_cuda_image_without_cuda_is_not_built(tmp_path: Path, torch: str, triton: str, told: str) -> None:
    done = check_build(tmp_path, "compiler", torch=torch, triton=triton)

    assert done.returncode == 4, done.stderr
    assert told in done.stderr
    assert "make images STAGE=compiler VARIANT=cuda" in done.stderr


def test_cuda_images_without_the_program_need_no_torch(tmp_path: Path) -> None:
    done = check_build(tmp_path, "head", torch=TORCH_FOR_CPUS, triton=NO_TRITON)

    assert done.returncode == 0, done.stderr
