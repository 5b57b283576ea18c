"""The Dockerfiles keep the rules, each rule notices when it is broken, and labels say what the code does."""

from __future__ import annotations

import re

import pytest

from images.platforms import REPOSITORY, SERVICES
from services.common.artifacts.__main__ import MANIFEST_TYPES
from services.trainer.run import SCHEMA as RUN_SCHEMA
from tests.images.dockerfiles import breaches_of

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
