"""Fixtures of these tests: workers are forked from a server that has imported the program."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.common.testing import fork_server

fork_server.preload("services.common.program.tests.work", "torch._dynamo")  # activation checkpointing imports that


@pytest.fixture(scope="module", autouse=True)
def forked_workers() -> Iterator[None]:
    with fork_server.forking_workers():
        yield
