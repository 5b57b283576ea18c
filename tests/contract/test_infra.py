"""The manifests of k8s/ use what infra/ makes."""

from __future__ import annotations

import shutil
from pathlib import Path

from images.platforms import REPOSITORY
from infra.apply.overlay_settings import write_settings
from k8s.client.overlay import render
from tests.contract.agreements import example_outputs, list_agreements, read_settings


def test_both_sides_say_the_same(tmp_path: Path, kubectl: Path) -> None:
    """The overlay has the settings that `make infra-up` writes."""
    for part in ("base", "stages", "aws", "overlays/eks"):
        shutil.copytree(REPOSITORY / "k8s" / part, tmp_path / part)
    overlay = tmp_path / "overlays/eks"
    committed = read_settings(overlay / "settings.env")
    write_settings(example_outputs(), overlay / "settings.env")
    agreements = list(list_agreements(render(overlay), committed))
    assert len(agreements) > 40
    assert [each for each in agreements if each.infra != each.k8s] == []
