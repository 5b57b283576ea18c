"""An account of moto's, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from infra.tests.service_models import service_models
from tests.deploy.batch.cloud import Cloud, simulated_account

__all__ = ["service_models"]


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    with simulated_account() as made:
        yield made
