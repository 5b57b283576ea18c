"""An account of moto's, and requests, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.client.request import DeployRequest
from deploy.client.requested_recipe import read_requested_recipe
from infra.tests.service_models import share_service_models
from services.common.testing.recipes import recipe_text
from tests.deploy.batch.builders import Ask
from tests.deploy.batch.cloud import TAG, Cloud, simulated_account


@pytest.fixture(scope="module", autouse=True)
def service_models() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        share_service_models(patch)
        yield


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    with simulated_account() as made:
        yield made


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(recipe_text())
    return path


@pytest.fixture
def ask(recipe: Path) -> Ask:
    def request(stage: str = "trainer", **changes: Any) -> DeployRequest:
        fields: dict[str, Any] = {"stage": stage, "recipe": read_requested_recipe(recipe), "tag": TAG}
        return DeployRequest(**fields | changes)

    return request
