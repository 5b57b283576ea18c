"""The add-ons of `addons.yaml`: each is a helm release, or an Argo CD application of the same chart and values."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from services.common.errors import RecipeError

ADDONS = Path(__file__).parent
LIST = ADDONS / "addons.yaml"
TIMEOUT = "10m"
OCI = "oci://"
# helm keeps the label on a release's Secret, and `make addons` puts it on the definitions of kinds, too.
MARK, MARKED = "millrace.dev/installed-by", "make-addons"
IN_FOLDER, IN_TEMPLATES, NOWHERE = "folder", "templates", ""


@dataclass(frozen=True)
class Release:
    """One line of `addons.yaml`."""

    name: str
    chart: str
    repository: str
    """An address of charts, or of a registry after `oci://`."""
    version: str
    namespace: str
    images: tuple[str, ...] = ()
    """Last parts of the names of images that this add-on runs, and no other program."""
    groups: tuple[str, ...] = ()
    """API groups of the kinds that this add-on brings."""
    crds: str = NOWHERE
    """Where the chart has the definitions of these kinds: `IN_FOLDER`, `IN_TEMPLATES`, or `NOWHERE`."""

    @property
    def values(self) -> Path:
        return ADDONS / "values" / f"{self.name}.yaml"

    @property
    def source(self) -> list[str]:
        """helm's arguments that name the chart and its version."""
        is_oci = self.repository.startswith(OCI)
        chart = [f"{self.repository}/{self.chart}"] if is_oci else [self.chart, "--repo", self.repository]
        return [*chart, "--version", self.version]

    @property
    def upgrade(self) -> list[str]:
        """helm's arguments that install the release, or bring the installed one to this version and these values."""
        where = ["--namespace", self.namespace, "--create-namespace"]
        mark = ["--labels", f"{MARK}={MARKED}"]
        return ["upgrade", "--install", self.name, *self.source, *where, "--values", str(self.values), *mark]

    @property
    def install(self) -> list[str]:
        """`upgrade` that waits, and goes back where it fails: never half an add-on."""
        return [*self.upgrade, "--atomic", "--timeout", TIMEOUT]

    @property
    def uninstall(self) -> list[str]:
        """helm's arguments that remove the release; they do no harm where it is gone already."""
        where = ["--namespace", self.namespace]
        return ["uninstall", self.name, *where, "--ignore-not-found", "--wait", "--timeout", TIMEOUT]

    @property
    def show_crds(self) -> list[str]:
        """helm's arguments that print the definitions of kinds of the chart's folder crds/."""
        return ["show", "crds", *self.source]


def read_releases(path: Path = LIST) -> list[Release]:
    """All of them, in the order in which they are installed."""
    return [_release(entry) for entry in yaml.safe_load(path.read_text(encoding="utf-8"))["releases"]]


def choose_releases(releases: list[Release], only: str) -> list[Release]:
    """Those whose names `only` has between commas, in the order of the list; all of them where it is empty.

    Raises `RecipeError` for a name that no add-on has, with the nearest one that there is.
    """
    chosen = [name.strip() for name in only.split(",") if name.strip()]
    names = [release.name for release in releases]
    for name in chosen:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
            nearest = f" Did you mean {near[0]}?" if near else ""
            raise RecipeError(f"ONLY={only}: there is no add-on {name}.{nearest} {LIST.name} has {', '.join(names)}")
    return [release for release in releases if release.name in chosen or not chosen]


def render_applications(releases: list[Release], project: str) -> str:
    """The releases as Argo CD applications, one YAML document each, with the values inside."""
    return yaml.safe_dump_all([_application(release, project) for release in releases], sort_keys=False)


def _release(entry: dict[str, Any]) -> Release:
    lists: dict[str, Any] = {key: tuple(entry.get(key, ())) for key in ("images", "groups")}
    return Release(**{**entry, **lists})


def _application(release: Release, project: str) -> dict[str, Any]:
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Application",
        "metadata": {"name": release.name, "namespace": "argocd"},
        "spec": {
            "project": project,
            "source": {
                "repoURL": release.repository.removeprefix(OCI),  # Argo CD takes a registry without its scheme
                "chart": release.chart,
                "targetRevision": release.version,
                "helm": {
                    "releaseName": release.name,
                    "valuesObject": yaml.safe_load(release.values.read_text(encoding="utf-8")),
                },
            },
            "destination": {"server": "https://kubernetes.default.svc", "namespace": release.namespace},
            # Server-side: the CRDs of Prometheus are too long for the annotation of a client's apply.
            "syncPolicy": {"syncOptions": ["CreateNamespace=true", "ServerSideApply=true"]},
        },
    }
