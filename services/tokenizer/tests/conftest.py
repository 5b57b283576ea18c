"""How these tests start workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.common.testing import fork_server

fork_server.preload("services.tokenizer.encode_task")


@pytest.fixture(scope="module", autouse=True)
def forked_workers() -> Iterator[None]:
    """Of commands that a test calls; commands that it starts by themselves start theirs as they are."""
    with fork_server.forking_workers():
        yield
