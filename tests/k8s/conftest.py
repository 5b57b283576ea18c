"""Fixtures that tests share: the rendered overlays, the schemas of the API, an AWS account, and a clock to move."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from k8s.client.overlay import find_kubectl, render
from k8s.objects import eks
from services.common.errors import DeviceError
from tests.k8s.builders import REGION, Clock
from tests.k8s.rendered import OVERLAYS, Thing, write_overlay_on_eks
from tests.k8s.schemas import Kind, NoSchemas, Schema, read_schemas


@pytest.fixture(scope="session")
def overlays() -> dict[str, list[Thing]]:
    try:
        find_kubectl()
    except DeviceError as error:
        pytest.skip(str(error))
    return {name: render(folder) for name, folder in OVERLAYS.items()}


@pytest.fixture(scope="session")
def compiler_on_cpus(overlays: dict[str, list[Thing]], tmp_path_factory: pytest.TempPathFactory) -> list[Thing]:
    """The overlay eks of a cluster whose compiler traces without a device."""
    return render(write_overlay_on_eks(tmp_path_factory.mktemp("on-cpus"), COMPILER_POOL="cpu"))


@pytest.fixture(scope="session")
def schemas() -> dict[Kind, Schema]:
    try:
        return read_schemas()
    except NoSchemas as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def account() -> Iterator[None]:
    """An AWS account of moto's. A module shares one client, because botocore takes 0.3 s to make it."""
    from moto import mock_aws  # noqa: PLC0415 - the import takes long, and few test files need it

    with pytest.MonkeyPatch.context() as patch, mock_aws():
        patch.setenv("AWS_REGION", REGION)
        eks._connect.cache_clear()
        yield
    eks._connect.cache_clear()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("time.monotonic", lambda: made.now)
    return made
