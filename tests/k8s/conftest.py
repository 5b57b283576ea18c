"""What the tests of this folder read once, the rendered overlays and the API's schemas, and a clock to move."""

from __future__ import annotations

import pytest

from k8s.client.overlay import find_kubectl, render
from services.common.errors import DeviceError
from tests.k8s.builders import Clock
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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("time.monotonic", lambda: made.now)
    return made
