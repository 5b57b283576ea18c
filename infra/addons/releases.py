"""Reads `addons.yaml`, in which each add-on is a helm release."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from services.common.errors import RecipeError

ADDONS = Path(__file__).parent
REPOSITORY = ADDONS.parents[1]
TIMEOUT = "10m"
# helm keeps this label on a release's Secret.
MARK, MARKED = "millrace.dev/installed-by", "make-addons"


@dataclass(frozen=True)
class Release:
    """A helm release of `addons.yaml`."""

    name: str
    chart: str
    repository: str
    """Address of a chart repository, or of a registry after `oci://`."""
    version: str
    namespace: str
    images: tuple[str, ...]
    """The last parts of image names that only this add-on runs."""
    crds: str = ""
    """Place of the chart's custom resource definitions: `folder`, `templates`, or empty where it has none."""
    manifests: str = ""
    """Folder of a kustomization in this repository that belongs to the release; empty where there is none."""

    @property
    def values(self) -> Path:
        return ADDONS / "values" / f"{self.name}.yaml"

    @property
    def source(self) -> list[str]:
        """Arguments of helm that name the chart and its version."""
        is_oci = self.repository.startswith("oci://")
        chart = [f"{self.repository}/{self.chart}"] if is_oci else [self.chart, "--repo", self.repository]
        return [*chart, "--version", self.version]

    @property
    def upgrade(self) -> list[str]:
        """Arguments of helm that install the release, or upgrade the installed one to this version and these values."""
        where = ["--namespace", self.namespace, "--create-namespace"]
        mark = ["--labels", f"{MARK}={MARKED}"]
        return ["upgrade", "--install", self.name, *self.source, *where, "--values", str(self.values), *mark]

    @property
    def kustomization(self) -> list[str]:
        """Arguments of kubectl that name the release's own manifests."""
        return ["--kustomize", str(REPOSITORY / self.manifests)]


def read_releases() -> list[Release]:
    """Reads all add-ons, in the order of installation."""
    table = yaml.safe_load((ADDONS / "addons.yaml").read_text(encoding="utf-8"))["releases"]
    return [Release(**entry | {"images": tuple(entry["images"])}) for entry in table]


def choose_releases(releases: list[Release], only: str) -> list[Release]:
    """The add-ons that `only` names, separated by commas, in the order of installation; all of them if it is empty.

    Raises `RecipeError` for a name that no add-on has.
    """
    chosen, names = {name.strip() for name in only.split(",")} - {""}, [release.name for release in releases]
    if unknown := chosen - {*names}:
        raise RecipeError(f"ONLY={only}: no add-on {', '.join(unknown)}. Expected names of {', '.join(names)}")
    return [release for release in releases if release.name in chosen or not chosen]
