"""The Dockerfiles copy what is needed, and labels say what the code does.

`test_containers.py` runs the images: their users, writable folders, variables and labels.
"""

from __future__ import annotations

import re

import pytest

from images.platforms import REPOSITORY, SERVICES
from images.versions import CONTROLLER_FOLDERS, sources_of
from services.common.artifacts.__main__ import MANIFEST_TYPES
from services.trainer.runs.description import SCHEMA as RUN_SCHEMA
from tests.architecture.imports import closure_of
from tests.images.dockerfiles import (
    instructions_of,
    labels_of_image,
    read_dockerfile,
)


def lines_of(name: str) -> list[str]:
    return (REPOSITORY / name).read_text(encoding="utf-8").splitlines()


def test_labels_name_schemas_that_exist_and_every_schema_has_one_image_that_writes_it() -> None:
    schemas = [*(each.SCHEMA for each in MANIFEST_TYPES.values()), RUN_SCHEMA]
    labels = [labels_of_image(read_dockerfile(service)) for service in SERVICES]
    assert {schema for each in labels for schema in each["millrace.reads"].split()} <= set(schemas)
    assert sorted(schema for each in labels for schema in each["millrace.writes"].split()) == sorted(schemas)


@pytest.mark.parametrize("service", SERVICES)
def test_a_change_of_what_runs_in_a_build_is_a_new_tag(service: str) -> None:
    copies = [rest for name, rest in instructions_of(read_dockerfile(service)) if name == "COPY"]
    copied = set(re.findall(r"images/[\w-]+\.\w+", " ".join(copies)))
    assert copied == {each for each in sources_of(service, "cpu") if re.fullmatch(r"images/[\w-]+\.(py|sh|txt)", each)}


def test_the_head_s_image_has_all_that_the_controller_imports_and_no_client() -> None:
    """The Dockerfile copies it, a build may read it, Pants passes it, and a change of it is a new tag."""
    reached = closure_of(*(f"k8s.controller.{name}" for name in ("job", "one_off_nodes", "reaper")))
    ours = [module for module in reached if re.match(r"(deploy|k8s)\.", module)]
    folders = {module.rpartition(".")[0].replace(".", "/") for module in ours}
    assert folders == set(CONTROLLER_FOLDERS)
    copied = set(re.findall(r"^COPY ((?:deploy|k8s)\S*) /app/\1$", read_dockerfile("head"), re.MULTILINE))
    assert copied == set(CONTROLLER_FOLDERS)
    readable = {line for line in lines_of(".dockerignore") if re.match("!(deploy|k8s)", line)}
    assert readable == {f"!{each}/*.py" for each in copied}
    passed = re.findall(r'"(\w+)/\*\.py"', "".join(lines_of("k8s/BUILD")))
    assert {f"k8s/{each}" for each in passed} == copied - {"deploy"}
