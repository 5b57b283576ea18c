"""The Dockerfiles keep the rules, each rule notices when it is broken, and labels say what the code does."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from images.platforms import REPOSITORY, SERVICES, STAGES_WITH_PROGRAM, VARIANTS
from images.versions import CONTROLLER_FOLDERS, sources_of
from services.common.artifacts.__main__ import MANIFEST_TYPES
from services.common.instance_types import SHAPES_JSON
from services.trainer.run import SCHEMA as RUN_SCHEMA
from tests.architecture.imports import closure_of, modules_of
from tests.images.dockerfiles import breaches_of, instructions_of

GOOD = """
ARG BASE=python:3.11.14-slim
FROM ${BASE} AS build
ARG PIP_INDEX_URL
RUN pip install something
FROM ${BASE}
RUN set -eu; apt-get update; apt-get install --no-install-recommends g++; rm -rf /var/lib/apt/lists/*
WORKDIR /app
COPY code /app
USER 10001:10001
ENTRYPOINT ["python"]
"""


@pytest.mark.parametrize("service", SERVICES)
def test_the_dockerfile_keeps_the_rules(service: str) -> None:
    assert breaches_of((REPOSITORY / "services" / service / "Dockerfile").read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("python:3.11.14-slim", "python", "no tag"),
        ("python:3.11.14-slim", "python:latest", "latest"),
        ("USER 10001:10001", "USER root", "unprivileged"),
        ("USER 10001:10001\n", "", "unprivileged"),
        ("COPY code", "ADD code", "ADD instead"),
        (" --no-install-recommends", "", "no-install-recommends"),
        ("; rm -rf /var/lib/apt/lists/*", "", "lists stay"),
        ("set -eu; ", "", "goes on after an error"),
        ("pip install", "sudo pip install", "sudo"),
        ("WORKDIR /app", "WORKDIR app", "relative"),
        ('["python"]', "python", "shell form"),
        ("WORKDIR /app", "ARG PIP_INDEX_URL\nWORKDIR /app", "history would show it"),
        ("RUN pip", "RUN --mount=type=cache,target=/root pip", "only BuildKit"),
    ],
)
def test_a_broken_rule_is_noticed(old: str, new: str, rule: str) -> None:
    assert breaches_of(GOOD) == []
    assert old in GOOD
    assert rule in " ".join(breaches_of(GOOD.replace(old, new)))


@pytest.mark.parametrize("service", SERVICES)
def test_the_schemas_in_the_labels_exist(service: str) -> None:
    text = (REPOSITORY / "services" / service / "Dockerfile").read_text(encoding="utf-8")
    known = {each.SCHEMA for each in MANIFEST_TYPES.values()} | {RUN_SCHEMA}
    labels = dict(re.findall(r'millrace\.(reads|writes)="([^"]*)"', text))
    assert labels.keys() == {"reads", "writes"}
    assert {schema for value in labels.values() for schema in value.split()} <= known


def test_every_schema_has_one_image_that_writes_it() -> None:
    texts = [(REPOSITORY / "services" / service / "Dockerfile").read_text(encoding="utf-8") for service in SERVICES]
    written = [schema for text in texts for schema in re.findall(r'millrace\.writes="([^"]*)"', text)[0].split()]
    assert sorted(written) == sorted([*(each.SCHEMA for each in MANIFEST_TYPES.values()), RUN_SCHEMA])


@pytest.mark.parametrize("service", SERVICES)
def test_all_that_is_temporary_is_in_the_one_folder_that_a_pod_mounts(service: str) -> None:
    text = (REPOSITORY / "services" / service / "Dockerfile").read_text(encoding="utf-8")
    folders = ("HOME", "TMPDIR", "RAY_TMPDIR", "XDG_CACHE_HOME", *(["NEURON_COMPILE_CACHE_URL"] * is_program(service)))
    values = dict(re.findall(r"(\w+)=(/scratch\S*)", text))
    assert values.keys() == set(folders)
    assert "\nRUN set -eu; sh /build/make_user.sh; rm -r /build\n" in text
    assert ("WORKDIR /scratch\n" in text) == is_program(service)


def test_programs_that_read_no_variable_write_to_that_folder_too() -> None:
    lines = (REPOSITORY / "images/make_user.sh").read_text(encoding="utf-8").splitlines()
    assert {"ln -s /scratch /tmp", "ln -s /scratch /var/tmp"} <= set(lines)


def test_the_compiler_and_the_trainer_differ_in_names_alone() -> None:
    """A layer that both have is built, stored and pulled once, and a mend in one is a mend in both."""

    def unnamed(service: str) -> list[tuple[str, str]]:
        text = (REPOSITORY / "services" / service / "Dockerfile").read_text(encoding="utf-8")
        text = re.sub(r'(image\.description|millrace\.reads|millrace\.writes)="[^"]*"', r"\1", text)
        return instructions_of(text.replace(service, "SERVICE"))

    assert unnamed("compiler") == unnamed("trainer")


@pytest.mark.parametrize("service", SERVICES)
def test_a_change_of_what_runs_in_a_build_is_a_new_tag(service: str) -> None:
    text = (REPOSITORY / "services" / service / "Dockerfile").read_text(encoding="utf-8")
    copied = set(re.findall(r"images/\w+\.\w+", "".join(re.findall(r"^COPY (images/.*)/build/$", text, re.MULTILINE))))
    assert copied == {each for each in sources_of(service, "cpu") if re.fullmatch(r"images/\w+\.(py|sh)", each)}


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_images_that_compute_on_gpus_ask_for_them_and_for_the_driver_s_tools(service: str, variant: str) -> None:
    """nvidia-smi is one of the tools; the program asks it what kind of GPU a graph is compiled for."""
    asked = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
    variables = {name: value for stage in stages_under(service, variant).values() for name, value in stage.items()}
    assert {name: value for name, value in variables.items() if name.startswith("NVIDIA_")} == (
        asked if variant == "cuda" and is_program(service) else {}
    )


def stages_under(service: str, variant: str) -> dict[str, dict[str, str]]:
    """The stages of the Dockerfile that a variant's image is made of, the last one first: name to environment."""
    text = (REPOSITORY / "services" / service / "Dockerfile").read_text(encoding="utf-8").replace("${VARIANT}", variant)
    bases: dict[str, str] = {}
    environments: dict[str, dict[str, str]] = {}
    stage = ""
    for name, rest in instructions_of(text):
        if name == "FROM":
            base, _, stage = rest.partition(" AS ")
            bases[stage], environments[stage] = base, {}
        elif name == "ENV":
            environments[stage].update(re.findall(r"(\w+)=(\S+)", rest))
    chain = [""]  # the last stage has no name
    while bases[chain[-1]] in bases:
        chain.append(bases[chain[-1]])
    return {name: environments[name] for name in chain}


@pytest.mark.parametrize(
    ("variant", "has_headers", "packages"),
    [
        ("cpu", True, {"g++"}),
        ("cpu", False, {"g++", "libpython3-dev"}),
        ("cuda", True, {"g++", "gcc"}),
        ("cuda", False, {"g++", "gcc", "libpython3-dev"}),
        ("neuron", False, {"procps"}),
    ],
)
def test_an_image_gets_the_compilers_that_its_graphs_are_built_with(
    tmp_path: Path, variant: str, has_headers: bool, packages: set[str]
) -> None:
    """For GPUs a C compiler too: Triton builds its launcher from C, against Python.h."""
    include, log = tmp_path / "include", tmp_path / "log"
    include.mkdir()
    if has_headers:
        (include / "Python.h").touch()
    for name, line in {"apt-get": f'echo "$@" >>{log}', "python3": f"echo {include}", "rm": ":"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    command = ["/bin/sh", str(REPOSITORY / "images/install_toolchain.sh"), variant]
    subprocess.run(command, env={"PATH": str(tmp_path)}, check=True)
    installs = [line.split() for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("install ")]
    assert [{word for word in line[1:] if not word.startswith("-")} for line in installs] == [packages]


def test_an_image_has_no_code_of_tests() -> None:
    left_out = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines()
    targets = (REPOSITORY / "services/common/BUILD").read_text(encoding="utf-8").splitlines()
    assert {"services/common/testing", "services/**/tests"} <= set(left_out)
    assert 'files(name="image_sources", sources=["**/*.py", "!testing/**", "!**/tests/**"])' in targets


def is_program(service: str) -> bool:
    return service in STAGES_WITH_PROGRAM


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_gets_its_code_after_its_libraries_were_found(service: str) -> None:
    """The check sees the modules that it is made of alone, so that a change of other code finds it in the cache."""
    text = (REPOSITORY / "services" / service / "Dockerfile").read_text(encoding="utf-8")
    check = (
        "FROM packages AS code\nARG VARIANT\n"
        "COPY services/common/credentials.py services/common/entry_point.py services/common/errors.py \\\n"
        "    services/common/hardware_faults.py services/common/image_platform.py services/common/input_file.py \\\n"
        "    services/common/limits.py services/common/stop_signals.py /app/services/common/\n"
        "RUN MILLRACE_VARIANT=$VARIANT python -m services.common.image_platform --without-device\n"
        "COPY services/common /app/services/common\n"
    )
    assert check in text
    assert f"    MILLRACE_SERVICE={service}\n" in text
    for variant in VARIANTS:
        assert stages_under(service, variant).keys() & {"code", "packages"} == {"packages"}
    beside = "credentials entry_point errors hardware_faults image_platform input_file limits stop_signals"
    checked = {f"services.common.{name}" for name in beside.split()}
    assert closure_of(modules_of(REPOSITORY), {"services.common.image_platform"}) == checked


@pytest.mark.parametrize("service", SERVICES)
def test_every_image_has_the_table_of_instance_types(service: str) -> None:
    """Where `services.common` reads it. The Dockerfile copies it, a build may read it, Pants passes it, and a change of
    it is a new tag."""
    table = "infra/shapes.json"
    assert SHAPES_JSON.relative_to(REPOSITORY).as_posix() == table
    dockerfile = (REPOSITORY / "services" / service / "Dockerfile").read_text(encoding="utf-8").splitlines()
    assert f"COPY {table} /app/{table}" in dockerfile
    assert "COPY --from=code /app/infra /app/infra" in dockerfile
    assert f"!{table}" in (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert (REPOSITORY / f"services/{service}/BUILD").read_text(encoding="utf-8").count('"infra:shapes"') == len(
        VARIANTS
    )
    assert table in sources_of(service, "cpu")


def test_the_head_s_image_has_all_that_the_controller_imports_and_no_client() -> None:
    """The Dockerfile copies it, a build may read it, Pants passes it, and a change of it is a new tag."""
    modules = modules_of(REPOSITORY, "services/common", "deploy", "k8s")
    programs = {module for module in modules if module.startswith("k8s.deploy.")}
    reached = closure_of(modules, programs)
    folders = {module.rpartition(".")[0].replace(".", "/") for module in reached if not module.startswith("services.")}
    assert folders == set(CONTROLLER_FOLDERS)
    dockerfile = (REPOSITORY / "services/head/Dockerfile").read_text(encoding="utf-8")
    ignored = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines()
    sources = (REPOSITORY / "k8s/BUILD").read_text(encoding="utf-8")
    copied = set(re.findall(r"^COPY ((?:deploy|k8s)\S*) /app/\1$", dockerfile, re.MULTILINE))
    assert copied == set(CONTROLLER_FOLDERS)
    assert {line for line in ignored if re.match("!(deploy|k8s)", line)} == {f"!{each}/*.py" for each in copied}
    assert {f"k8s/{each}" for each in re.findall(r'"(\w+)/\*\.py"', sources)} == copied - {"deploy"}
