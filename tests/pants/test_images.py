"""Pants builds one variant's images at a time, under the names that `make images` gives them."""

from __future__ import annotations

import re
import subprocess
import tomllib

import pytest

from images.build import CA_VARIABLES, print_environment
from images.platforms import REPOSITORY, SERVICES, VARIANTS


def test_pants_is_told_all_that_the_build_files_ask_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in CA_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    print_environment()
    told = set(re.findall(r"^export (\w+)=", capsys.readouterr().out, flags=re.MULTILINE))
    assert told == {
        name
        for service in SERVICES
        for name in re.findall(r'env\("(\w+)"', (REPOSITORY / f"services/{service}/BUILD").read_text(encoding="utf-8"))
    }


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("service", SERVICES)
def test_an_image_is_built_from_the_locks_of_its_variant(service: str, variant: str) -> None:
    build = (REPOSITORY / f"services/{service}/BUILD").read_text(encoding="utf-8")
    image = build.partition(f'name="image-{variant}"')[2].partition("docker_image(")[0]
    locks = set(re.findall(r'"lockfiles/([\w-]+)\.txt"', image))
    assert {lock for lock in locks if lock.endswith(f"-{variant}")} == locks - {"uv"}
    assert f"{service}-{variant}" in locks
    assert (f'tags=["{variant}"]' in image) == (variant != "cpu")


def test_the_images_of_the_cpu_variant_alone_are_built_unasked() -> None:
    """Each other variant has a tag of its name, and Pants leaves out what has one."""
    tags = tomllib.loads((REPOSITORY / "pants.toml").read_text(encoding="utf-8"))["GLOBAL"]["tag"]
    assert sorted(tags) == sorted(f"-{variant}" for variant in VARIANTS if variant != "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_pants_lists_the_images_of_the_variant_that_it_is_asked_for(variant: str) -> None:
    chosen = [] if variant == "cpu" else [f"--tag=['{variant}']"]
    command = ["./pants", "--no-pantsd", *chosen, "--filter-target-type=docker_image", "list", "::"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode == 4:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {f"services/{service}:image-{variant}" for service in SERVICES}
