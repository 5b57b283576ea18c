"""The cluster of these tests: that of KUBECONFIG where it is set, else one that is started and taken down here."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from k8s.objects.api import Api, connect
from services.common.errors import DeviceError
from tests.cluster.kit import cluster


@pytest.fixture(scope="session")
def api() -> Iterator[Api]:
    if os.environ.get("KUBECONFIG"):
        yield connect()
        return
    try:
        cluster.require_prerequisites()
    except DeviceError as error:
        pytest.skip(str(error))
    cluster.up()
    os.environ["KUBECONFIG"] = str(cluster.KUBECONFIG)
    try:
        yield connect()
    finally:
        del os.environ["KUBECONFIG"]
        cluster.down()


@pytest.fixture(scope="session")
def kit(api: Api) -> Api:
    """The cluster, if it is the kit's: it has fake nodes, and a node whose folders are this machine's."""
    if api.server != f"https://{cluster.ADDRESS}:6443":
        pytest.skip("fake nodes and folders of this machine are the kit's: run it without KUBECONFIG")
    return api


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of the kit's own ups and downs come last: they end with no cluster."""
    items.sort(key=lambda item: item.path.name == "test_kit.py")
