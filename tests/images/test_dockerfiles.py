"""The Dockerfiles copy what is needed, in an order that keeps layers, and labels say what the code does.

`test_containers.py` runs the images: their users, writable folders, variables and labels.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from images.platforms import REPOSITORY, SERVICES
from images.versions import CONTROLLER_FOLDERS, sources_of
from services.common.artifacts.__main__ import MANIFEST_TYPES
from services.trainer.runs.description import SCHEMA as RUN_SCHEMA
from tests.architecture.imports import closure_of
from tests.images.dockerfiles import (
    instructions_of,
    read_dockerfile,
    settings_of_image,
    stages_of_image,
)


def lines_of(name: str) -> list[str]:
    return (REPOSITORY / name).read_text(encoding="utf-8").splitlines()


def test_labels_name_schemas_that_exist_and_every_schema_has_one_image_that_writes_it() -> None:
    schemas = [*(each.SCHEMA for each in MANIFEST_TYPES.values()), RUN_SCHEMA]
    labels = [settings_of_image(read_dockerfile(service), "LABEL") for service in SERVICES]
    assert {schema for each in labels for schema in each["millrace.reads"].split()} <= set(schemas)
    assert sorted(schema for each in labels for schema in each["millrace.writes"].split()) == sorted(schemas)


@pytest.mark.parametrize("service", SERVICES)
def test_a_change_of_what_runs_in_a_build_is_a_new_tag(service: str) -> None:
    copies = [rest for name, rest in instructions_of(read_dockerfile(service)) if name == "COPY"]
    copied = set(re.findall(r"images/[\w-]+\.\w+", " ".join(copies)))
    assert copied == {each for each in sources_of(service, "cpu") if re.fullmatch(r"images/[\w-]+\.(py|sh|txt)", each)}


@pytest.mark.parametrize(
    ("variant", "has_headers", "packages"),
    [
        ("cpu", True, {"g++"}),
        ("cpu", False, {"g++", "libpython3-dev"}),
        ("cuda", True, {"g++", "gcc"}),
        ("cuda", False, {"g++", "gcc", "libpython3-dev"}),
        ("neuron", False, set()),
        ("trn2", False, {"ca-certificates"}),
    ],
)
def test_an_image_gets_the_compilers_that_its_graphs_are_built_with(
    tmp_path: Path, variant: str, has_headers: bool, packages: set[str]
) -> None:
    """The cuda image has a C compiler too, with which Triton builds its launcher against Python.h."""
    include, log = tmp_path / "include", tmp_path / "log"
    include.mkdir()
    if has_headers:
        (include / "Python.h").touch()
    for name, line in {"apt-get": f'echo "$@" >>{log}', "python3": f"echo {include}", "rm": ":"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    command = ["/bin/sh", str(REPOSITORY / "images/install_toolchain.sh"), variant]
    subprocess.run(command, env={"PATH": str(tmp_path)}, check=True)
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    installed = [word for line in lines if line.startswith("install ") for word in line.split()[1:]]
    assert {word for word in installed if not word.startswith("-")} == packages


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_gets_its_code_after_its_libraries_were_found(service: str) -> None:
    """The check sees only the modules that it is made of, so that a change of other code does not repeat it."""
    text = read_dockerfile(service)
    code = instructions_of(text[text.index("FROM packages AS code") :])
    check = next(number for number, (name, _) in enumerate(code) if name == "RUN")
    assert "services.common.hardware.image_platform --without-device" in code[check][1]
    copied = [word for name, rest in code[:check] if name == "COPY" for word in rest.split()[:-1]]
    checked = {each for each in closure_of("services.common.hardware.image_platform") if "." in each}
    assert {f"{module.replace('.', '/')}.py" for module in checked} == set(copied)
    assert "code" not in stages_of_image(text)


def test_the_head_s_image_has_all_that_the_controller_imports_and_no_client() -> None:
    """The Dockerfile copies it, a build may read it, Pants passes it, and a change of it is a new tag."""
    reached = closure_of(*(f"k8s.controller.{name}" for name in ("job", "one_off_nodes", "reaper", "head_facts")))
    ours = [module for module in reached if re.match(r"(deploy|k8s)\.", module)]
    folders = {module.rpartition(".")[0].replace(".", "/") for module in ours}
    assert folders == set(CONTROLLER_FOLDERS)
    copied = set(re.findall(r"^COPY ((?:deploy|k8s)\S*) /app/\1$", read_dockerfile("head"), re.MULTILINE))
    assert copied == set(CONTROLLER_FOLDERS)
    readable = {line for line in lines_of(".dockerignore") if re.match("!(deploy|k8s)", line)}
    assert readable == {f"!{each}/*.py" for each in copied}
    passed = re.findall(r'"(\w+)/\*\.py"', "".join(lines_of("k8s/BUILD")))
    assert {f"k8s/{each}" for each in passed} == copied - {"deploy"}
