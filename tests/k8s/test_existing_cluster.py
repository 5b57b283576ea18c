"""The overlay for a cluster that is there already, filled in as its page says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from k8s.client.overlay import OVERLAYS, render, require_filled_in
from k8s.objects.worker_group import worker_group_of
from services.common.errors import RecipeError
from services.common.recipe.schema import STAGES
from tests.k8s import rules
from tests.k8s.rendered import Thing, cluster_of
from tests.k8s.test_settings import FILLED_IN

EXISTING = OVERLAYS / "existing"


@pytest.fixture
def existing(overlays: dict[str, list[Thing]], tmp_path: Path) -> list[Thing]:
    """A copy of the overlay, filled in as the page says."""
    text = (EXISTING / "kustomization.yaml").read_text(encoding="utf-8")
    eks = os.path.relpath((OVERLAYS / "eks").resolve(), tmp_path.resolve())
    (tmp_path / "kustomization.yaml").write_text(text.replace("../eks", eks), encoding="utf-8")
    settings = (EXISTING / "settings.env").read_text(encoding="utf-8")
    for key, value in FILLED_IN.items():
        settings = settings.replace(f"{key}=CHANGE-ME", f"{key}={value}")
    (tmp_path / "settings.env").write_text(settings, encoding="utf-8")
    return render(tmp_path)


def test_it_is_refused_until_it_is_filled_in(overlays: dict[str, list[Thing]]) -> None:
    with pytest.raises(RecipeError, match="CHANGE-ME is still in"):
        require_filled_in(EXISTING, render(EXISTING))


def test_its_nodes_are_simply_there_and_it_keeps_the_rules(existing: list[Thing]) -> None:
    require_filled_in(EXISTING, existing)
    assert [worker_group_of(cluster_of(existing), stage).node_pool for stage in STAGES] == ["", "", ""]
    assert [problem for rule in (*rules.EVERYWHERE, *rules.IN_PRODUCTION) for problem in rule(existing)] == []
    assert "PodMonitor" not in {each["kind"] for each in existing}
