"""Every command of a runbook is run by a test, or exists and is marked as one that needs a cluster or an account.

`tests/integration/test_pipeline.py` runs the blocks that are marked `runs here`. `test_document_commands.py` compares
the commands of make and Python of all blocks with their help; this file compares labels with the manifests and the AWS
CLI's operations with botocore's descriptions of the services.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

import botocore.session
import pytest
from botocore import xform_name
from botocore.exceptions import UnknownServiceError

from images.platforms import REPOSITORY
from tests.architecture.documents import Document, list_files, read_runbooks

RUNBOOKS = read_runbooks()
RUNS_HERE, NEEDS_CLUSTER, NEEDS_ACCOUNT = "runs here", "needs-cluster", "needs-account"
RUN_BY = "run by "
PROGRAMS = {
    NEEDS_CLUSTER: {"make", "kubectl", "curl", "git", "tensorboard"},
    NEEDS_ACCOUNT: {"make", "kubectl", "aws", "cp"},
}
"""Programs with which the commands of a mark may begin."""
OF_THE_CLI = {"s3 cp", "s3 ls", "s3 sync", "eks update-kubeconfig", "ecr get-login-password", "logs tail"}
"""Commands of the AWS CLI that are no operation of a service."""
OPTIONS_OF_THE_CLI = {"--region", "--query", "--output"}
MAX_LINES = 120


@pytest.mark.parametrize("page", RUNBOOKS, ids=lambda page: page.path.stem)
def test_every_block_of_commands_says_who_runs_it(page: Document) -> None:
    marks = [block.mark for block in page.command_blocks()]
    files = [mark.removeprefix(RUN_BY) for mark in marks if mark.startswith(RUN_BY)]
    assert set(marks) - {f"{RUN_BY}{file}" for file in files} <= {RUNS_HERE, NEEDS_CLUSTER, NEEDS_ACCOUNT}
    assert [file for file in files if not (REPOSITORY / file).is_file()] == []
    assert page.text.count("```sh") == len(marks)
    assert not re.search(r"^    \S", page.text, re.MULTILINE), "an indented block has no mark"
    assert len(page.text.splitlines()) <= MAX_LINES


@pytest.mark.parametrize("page", RUNBOOKS, ids=lambda page: page.path.stem)
def test_what_needs_a_cluster_or_an_account_exists(page: Document) -> None:
    blocks = [block for block in page.command_blocks() if block.mark in PROGRAMS]
    lines = [(line, PROGRAMS[block.mark]) for block in blocks for line in block.lines]
    assert [problem for line, programs in lines for problem in problems_of(line, programs)] == []


def test_the_index_lists_every_page() -> None:
    index = next(page for page in RUNBOOKS if page.path.stem == "README")
    listed = {link for link in index.links() if "/" not in link}
    assert {page.path.name for page in RUNBOOKS} - {"README.md"} == {link.partition("#")[0] for link in listed}


def problems_of(line: str, programs: set[str]) -> Iterator[str]:
    words = shlex.split(line, comments=True)
    for begin in [0, *(index + 1 for index, word in enumerate(words) if word == "|")]:
        if begin == 0 and words[0] not in programs:
            yield f"{words[0]}: no program of these pages"
        match words[begin:]:
            case ["kubectl", *arguments]:
                yield from problems_of_labels(arguments)
            case ["aws", service, operation, *arguments]:
                yield from problems_of_aws(service, operation, arguments)


def problems_of_labels(arguments: list[str]) -> Iterator[str]:
    for option, value in pairwise(arguments):
        label = value.partition("=")[0]
        if option in ("-l", "-L") and not re.search(rf"(?<![\w./-]){re.escape(label)}(?![\w./-])", manifests()):
            yield f"{label}: no label of the manifests"


@cache
def manifests() -> str:
    """Text of the manifests and of the code that makes objects, in which a label's name occurs."""
    names = list_files("k8s/*.yaml", "k8s/*.py")
    return "\n".join((REPOSITORY / name).read_text(encoding="utf-8") for name in names)


def problems_of_aws(service: str, operation: str, arguments: list[str]) -> Iterator[str]:
    if f"{service} {operation}" in OF_THE_CLI:
        return
    try:
        model = botocore.session.get_session().get_service_model({"s3api": "s3"}.get(service, service))
        name = {xform_name(name, "-"): name for name in model.operation_names}[operation]
    except (UnknownServiceError, KeyError):
        yield f"aws {service} {operation}: no such operation"
        return
    shape = model.operation_model(name).input_shape
    known = {f"--{xform_name(name, '-')}" for name in (shape.members if shape else ())} | OPTIONS_OF_THE_CLI
    for option in arguments:
        if option.startswith("--") and option not in known:
            yield f"aws {service} {operation}: no option {option}"
