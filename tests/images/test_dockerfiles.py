"""The Dockerfiles copy what is needed, and labels say what the code does.

`test_containers.py` runs the images: their users, writable folders, variables and labels.
"""

from __future__ import annotations

import re

from images.platforms import REPOSITORY, SERVICES
from services.common.artifacts.__main__ import MANIFEST_TYPES
from services.trainer.runs.description import SCHEMA as RUN_SCHEMA
from tests.architecture.imports import closure_of
from tests.images.dockerfiles import labels_of_image, read_dockerfile


def lines_of(name: str) -> list[str]:
    return (REPOSITORY / name).read_text(encoding="utf-8").splitlines()


def test_labels_name_schemas_that_exist_and_every_schema_has_one_image_that_writes_it() -> None:
    schemas = [*(each.SCHEMA for each in MANIFEST_TYPES.values()), RUN_SCHEMA]
    labels = [labels_of_image(read_dockerfile(service)) for service in SERVICES]
    assert {schema for each in labels for schema in each["millrace.reads"].split()} <= set(schemas)
    assert sorted(schema for each in labels for schema in each["millrace.writes"].split()) == sorted(schemas)


def test_the_head_s_image_has_all_that_the_controller_imports_and_no_client() -> None:
    """The Dockerfile copies it, a build may read it, and Pants passes it."""
    reached = closure_of(*(f"k8s.controller.{name}" for name in ("job", "one_off_nodes", "reaper")))
    ours = [module for module in reached if re.match(r"(deploy|k8s)\.", module)]
    sources = {f"{module.rpartition('.')[0].replace('.', '/')}/*.py" for module in ours}
    assert set(re.findall(r"^COPY ((?:deploy|k8s)\S*) ", read_dockerfile("head"), re.MULTILINE)) == sources
    assert {line[1:] for line in lines_of(".dockerignore") if re.match("!(deploy|k8s)", line)} == sources
    passed = re.findall(r'"(\w+/\*\.py)"', "".join(lines_of("k8s/BUILD")))
    assert {f"k8s/{each}" for each in passed} == sources - {"deploy/*.py"}
