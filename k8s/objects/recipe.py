"""The ConfigMap that brings a recipe to a stage's pods."""

from __future__ import annotations

from deploy.stage_contract import RECIPE_FILE
from k8s.objects.api import Api, Object
from k8s.objects.names import STAGE_LABEL, recipe_name


def render_recipe_config_map(stage: str, text: str, digest: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": recipe_name(stage, digest), "labels": {STAGE_LABEL: stage}},
        "immutable": True,
        "data": {RECIPE_FILE: text},
    }


def find_recipe_text(api: Api, stage: str, digest: str) -> str | None:
    """The recipe of an earlier deployment; None where its ConfigMap was deleted."""
    kept = api.find("ConfigMap", recipe_name(stage, digest))
    return str(kept["data"][RECIPE_FILE]) if kept else None
