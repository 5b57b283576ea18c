"""Reads `addons.yaml`, in which each add-on is a helm release."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from services.common.errors import RecipeError

ADDONS = Path(__file__).parent
REPOSITORY = ADDONS.parents[1]
LIST = ADDONS / "addons.yaml"
TIMEOUT = "10m"
OCI = "oci://"
# helm keeps this label on a release's Secret, and `make addons` puts it on custom resource definitions, too.
MARK, MARKED = "millrace.dev/installed-by", "make-addons"
IN_FOLDER, IN_TEMPLATES, NOWHERE = "folder", "templates", ""


@dataclass(frozen=True)
class Release:
    """A helm release of `addons.yaml`."""

    name: str
    chart: str
    repository: str
    """Address of a chart repository, or of a registry after `oci://`."""
    version: str
    namespace: str
    images: tuple[str, ...] = ()
    """The last parts of image names that only this add-on runs."""
    groups: tuple[str, ...] = ()
    """API groups of the custom resources that this add-on defines."""
    crds: str = NOWHERE
    """Place of the chart's custom resource definitions: `IN_FOLDER`, `IN_TEMPLATES`, or `NOWHERE`."""
    manifests: str = ""
    """Folder of a kustomization in this repository that belongs to the release; empty where there is none."""

    @property
    def values(self) -> Path:
        return ADDONS / "values" / f"{self.name}.yaml"

    @property
    def source(self) -> list[str]:
        """Arguments of helm that name the chart and its version."""
        is_oci = self.repository.startswith(OCI)
        chart = [f"{self.repository}/{self.chart}"] if is_oci else [self.chart, "--repo", self.repository]
        return [*chart, "--version", self.version]

    @property
    def upgrade(self) -> list[str]:
        """Arguments of helm that install the release, or upgrade the installed one to this version and these values."""
        where = ["--namespace", self.namespace, "--create-namespace"]
        mark = ["--labels", f"{MARK}={MARKED}"]
        return ["upgrade", "--install", self.name, *self.source, *where, "--values", str(self.values), *mark]

    @property
    def install(self) -> list[str]:
        """Arguments of an `upgrade` that waits, and rolls back if it fails, so that no add-on is half installed."""
        return [*self.upgrade, "--atomic", "--timeout", TIMEOUT]

    @property
    def uninstall(self) -> list[str]:
        """Arguments of helm that remove the release, and do nothing if it is not installed."""
        where = ["--namespace", self.namespace]
        return ["uninstall", self.name, *where, "--ignore-not-found", "--wait", "--timeout", TIMEOUT]

    @property
    def kustomization(self) -> list[str]:
        """Arguments of kubectl that name the release's own manifests; empty where there are none."""
        return ["--kustomize", str(REPOSITORY / self.manifests)] if self.manifests else []

    @property
    def show_crds(self) -> list[str]:
        """Arguments of helm that print the custom resource definitions in the chart's folder crds/."""
        return ["show", "crds", *self.source]


def read_releases(path: Path = LIST) -> list[Release]:
    """Reads all add-ons, in the order of installation."""
    return [_release(entry) for entry in yaml.safe_load(path.read_text(encoding="utf-8"))["releases"]]


def choose_releases(releases: list[Release], only: str) -> list[Release]:
    """The add-ons that `only` names, separated by commas, in the order of installation; all of them if it is empty.

    Raises `RecipeError` for a name that no add-on has, with the nearest one.
    """
    chosen = [name.strip() for name in only.split(",") if name.strip()]
    names = [release.name for release in releases]
    for name in chosen:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
            nearest = f" Did you mean {near[0]}?" if near else ""
            raise RecipeError(f"ONLY={only}: no add-on {name}.{nearest} Expected names of {', '.join(names)}")
    return [release for release in releases if release.name in chosen or not chosen]


def _release(entry: dict[str, Any]) -> Release:
    lists: dict[str, Any] = {key: tuple(entry.get(key, ())) for key in ("images", "groups")}
    return Release(**{**entry, **lists})
