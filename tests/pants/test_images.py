"""Pants knows the owner of every import, and builds one variant's images at a time, named as by `make images`."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib

import pytest

from images.platforms import REPOSITORY, SERVICES, VARIANTS, dockerfile_of
from images.versions import describe_build, sources_of
from services.common.recipe.schema import STAGES


def test_the_images_of_the_cpu_variant_alone_are_built_unasked() -> None:
    """The images of another variant have a tag of its name, and Pants leaves out targets with such a tag."""
    tags = tomllib.loads((REPOSITORY / "pants.toml").read_text(encoding="utf-8"))["GLOBAL"]["tag"]
    assert sorted(tags) == sorted(f"-{variant}" for variant in VARIANTS if variant != "cpu")


def run_pants(*arguments: str) -> str:
    # No daemon: it would outlive the test.
    command = ["./pants", "--no-pantsd", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode == 4:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_imports_what_its_resolve_holds(stage: str) -> None:
    assert run_pants("dependencies", f"services/{stage}/*.py")


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_pants_builds_the_images_of_the_variant_that_it_is_asked_for(variant: str) -> None:
    chosen = [] if variant == "cpu" else [f"--tag=['{variant}']"]
    targets = json.loads(run_pants(*chosen, "--filter-target-type=docker_image", "peek", "images::"))
    assert {target["address"] for target in targets} == {f"images:{service}-{variant}" for service in SERVICES}
    for target in targets:
        build = describe_build(target["address"].removeprefix("images:").removesuffix(f"-{variant}"), variant)
        assert target["repository"] == f"millrace/{build.service}"
        assert target["image_tags"] == [build.tag, build.commit_tag]
        assert target["sources"] == [dockerfile_of(build.service)]
        assert {f"VARIANT={variant}", f"GIT_SHA={build.git_sha}"} <= set(target["extra_build_args"])
        given, copied = (
            set(re.findall(r"lockfiles/[\w-]+\.txt", " ".join(words)))
            for words in (target["dependencies"], sources_of(build.service, variant))
        )
        assert given == copied
