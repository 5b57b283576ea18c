"""Fixtures of the tests that compare two sides of the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from k8s.client.overlay import find_kubectl, render
from services.common.errors import DeviceError
from tests.k8s.rendered import OVERLAYS, Thing, cluster_of


@pytest.fixture(scope="session")
def kubectl() -> Path:
    try:
        return find_kubectl()
    except DeviceError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def eks(kubectl: Path) -> Thing:
    """Return the RayCluster of the overlay for AWS; tests that change it copy it."""
    return cluster_of(render(OVERLAYS["eks"]))
