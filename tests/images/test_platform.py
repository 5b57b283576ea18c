"""An image is built when it has what its service stands on, and a stage refuses a device that it cannot use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from images.platforms import REPOSITORY, STAGES_WITH_PROGRAM
from services.common.hardware.image_platform import NEURON_LIBRARIES
from tests.command import call
from tests.small import write_notes, write_small_recipe


@pytest.mark.parametrize(
    ("variant", "device", "advice"),
    [
        ("neuron", "cpu", "--parallel.device=xla"),
        ("cuda", "cpu", "--parallel.device=cuda"),
        ("cpu", "cuda", "make images VARIANT=cuda"),
        ("trn2", "xla", "make images VARIANT=neuron"),
        ("cpu", "neuron", "make images VARIANT=trn2"),
    ],
)
@pytest.mark.parametrize("stage", STAGES_WITH_PROGRAM)
def test_an_image_refuses_a_recipe_for_another_device_at_once(
    tmp_path: Path,
    stage: str,
    variant: str,
    device: str,
    advice: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step that could run on the CPU is refused too, because the chips would be paid for and idle. A cluster asks
    before it gives nodes.
    """
    monkeypatch.setenv("MILLRACE_VARIANT", variant)
    write_notes(tmp_path / "notes")
    recipe = write_small_recipe(tmp_path / "small.toml", str(tmp_path / "notes"))
    options = ["--recipe", str(recipe), "--root", str(tmp_path / "fsx")]
    options += [f"--parallel.device={device}", "--train.reduction=fast"]
    done = call(capfd, f"services.{stage}.__main__", *options)

    assert done.returncode == 4, done.stderr
    assert f"{variant} image" in done.stderr
    assert advice in done.stderr
    assert not (tmp_path / "fsx").exists()
    asked = call(capfd, "services.common.process.readiness", "--stage", stage, *options)
    assert (asked.returncode, f"{variant} image" in json.loads(asked.stdout)["problem"]) == (4, True)


def check_image(folder: Path, variant: str, modules: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    """Check what a compiler's image stands on, with these modules in place of the image's."""
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source, encoding="utf-8")
    path = os.pathsep.join([str(folder), str(REPOSITORY)])
    environment = os.environ | {"MILLRACE_SERVICE": "compiler", "MILLRACE_VARIANT": variant, "PYTHONPATH": path}
    command = [sys.executable, "-m", "services.common.hardware.image_platform", *options]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("variant", NEURON_LIBRARIES)
def test_where_images_are_built_neuron_libraries_are_not_imported(tmp_path: Path, variant: str) -> None:
    """A library that looks for its device when it is imported would end every build."""
    modules = dict.fromkeys(NEURON_LIBRARIES[variant], 'raise RuntimeError("no device")')
    built = check_image(tmp_path, variant, modules, "--without-device")
    started = check_image(tmp_path, variant, modules)
    assert built.returncode == 0, built.stderr
    assert started.returncode == 4
    for named in (NEURON_LIBRARIES[variant][0], "no device", f"make images VARIANT={variant}"):
        assert named in started.stderr


TORCH_FOR_GPUS = "__version__ = '2.13.0+cu130'\nclass version:\n    cuda = '13.0'\n"
TORCH_FOR_CPUS = "__version__ = '2.13.0+cpu'\nclass version:\n    cuda = None\n"
NO_TRITON = "raise ModuleNotFoundError('No module named triton', name='triton')"


@pytest.mark.parametrize(
    ("torch", "triton", "exit_code", "told"),
    [
        (TORCH_FOR_GPUS, "", 0, ""),
        (TORCH_FOR_CPUS, "", 4, "torch 2.13.0+cpu"),
        (TORCH_FOR_GPUS, NO_TRITON, 4, "triton"),
        ("raise OSError('libcudart.so.13: cannot open shared object file')", "", 4, "libcudart.so.13"),
    ],
    ids=["whole", "torch-for-cpus", "no-triton", "no-cuda-libraries"],
)
def test_a_cuda_image_is_built_where_there_is_no_gpu_but_not_without_cuda(
    tmp_path: Path, torch: str, triton: str, exit_code: int, told: str
) -> None:
    done = check_image(tmp_path, "cuda", {"torch": torch, "triton": triton}, "--without-device")
    assert done.returncode == exit_code, done.stderr
    assert told in done.stderr
