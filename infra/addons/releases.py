"""The add-ons' helm releases, from `addons.yaml`: installed, compared with what runs, removed, or written for Argo CD.

helm is the user's: nothing here downloads it, and it talks to the cluster of KUBECONFIG as kubectl does.
"""

from __future__ import annotations

import difflib
import json
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from infra.process import run_to_its_end
from services.common.errors import DeviceError

ADDONS = Path(__file__).parent
TIMEOUT = "10m"
OCI = "oci://"
NOT_FOUND = "release: not found"  # helm's words, in versions 3 and 4


@dataclass(frozen=True)
class Release:
    """One line of `addons.yaml`."""

    name: str
    chart: str
    repository: str
    """An address of charts, or of a registry after `oci://`."""
    version: str
    namespace: str

    @property
    def values(self) -> Path:
        return ADDONS / "values" / f"{self.name}.yaml"

    @property
    def upgrade(self) -> list[str]:
        """helm's arguments that install the release, or bring the installed one to this version and these values."""
        is_oci = self.repository.startswith(OCI)
        chart = [f"{self.repository}/{self.chart}"] if is_oci else [self.chart, "--repo", self.repository]
        where = ["--namespace", self.namespace, "--create-namespace"]
        return [
            "upgrade",
            "--install",
            self.name,
            *chart,
            "--version",
            self.version,
            *where,
            "--values",
            str(self.values),
        ]

    @property
    def install(self) -> list[str]:
        """`upgrade` that waits, and goes back where it fails: never half an add-on."""
        return [*self.upgrade, "--atomic", "--timeout", TIMEOUT]

    @property
    def uninstall(self) -> list[str]:
        """Also right where the release is gone already."""
        where = ["--namespace", self.namespace]
        return ["uninstall", self.name, *where, "--ignore-not-found", "--wait", "--timeout", TIMEOUT]


def read_releases(path: Path = ADDONS / "addons.yaml") -> list[Release]:
    """In the order in which they are installed."""
    return [Release(**entry) for entry in yaml.safe_load(path.read_text(encoding="utf-8"))["releases"]]


def install_releases(releases: list[Release], is_dry_run: bool) -> None:
    """Install or upgrade all, in order; stops at the first that fails. A dry run prints the commands alone."""
    if is_dry_run:
        for release in releases:
            print(shlex.join(["helm", *release.install]))
        return
    helm = _find_helm()
    for release in releases:
        print(f"== {release.name} {release.version} in {release.namespace}", flush=True)
        if exit_code := run_to_its_end([helm, *release.install]):
            raise _failure(release, exit_code, "was rolled back, those before it stay")


def remove_releases(releases: list[Release]) -> None:
    """The last one first. One that is gone already is no failure."""
    helm = _find_helm()
    for release in reversed(releases):
        print(f"removing    {release.name} from {release.namespace}", flush=True)
        if exit_code := run_to_its_end([helm, *release.uninstall]):
            raise _failure(release, exit_code, "may still be there")


def compare_releases(releases: list[Release]) -> bool:
    """Print what `install_releases` would change, as a diff of manifests; True where that is anything.

    The cluster renders both sides, so that what a chart asks of its API is the same.
    """
    is_changed = False
    for release in releases:
        difference = list(_differences(release))
        print(f"{release.name} {release.version}: {'would change' if difference else 'as it is installed'}")
        print("".join(f"{line}\n" for line in difference), end="")
        is_changed = is_changed or bool(difference)
    return is_changed


def render_applications(releases: list[Release], project: str) -> str:
    """The releases as Argo CD applications, one YAML document each, with the values inside."""
    return yaml.safe_dump_all([_application(release, project) for release in releases], sort_keys=False)


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


def _differences(release: Release) -> Iterator[str]:
    helm = _find_helm()
    installed = _read([helm, "get", "manifest", release.name, "--namespace", release.namespace])
    if installed.returncode and NOT_FOUND not in installed.stderr:
        raise _failure(release, installed.returncode, "could not be read", installed.stderr)
    before = "" if installed.returncode else installed.stdout
    wanted = _read([helm, *release.upgrade, "--dry-run=server", "--output", "json"])
    if wanted.returncode:
        raise _failure(release, wanted.returncode, "could not be rendered", wanted.stderr)
    after: str = json.loads(wanted.stdout)["manifest"]
    yield from difflib.unified_diff(
        before.strip().splitlines(), after.strip().splitlines(), "installed", "addons.yaml", lineterm=""
    )


def _find_helm() -> str:
    helm = shutil.which("helm")
    if helm is None:
        raise DeviceError(
            "no helm on PATH, and it installs the cluster's add-ons. Get 3.13 or newer from "
            "https://helm.sh/docs/intro/install, or let Argo CD install them: make -s addons-argocd"
        )
    return helm


def _read(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _failure(release: Release, exit_code: int, outcome: str, words: str = "") -> DeviceError:
    said = f": {words.strip()}" if words else "; its words are above"
    return DeviceError(
        f"helm ended with {exit_code}{said}. {release.name} {outcome}. The same command continues; "
        f"kubectl -n {release.namespace} get pods,events shows what a release waits for"
    )
