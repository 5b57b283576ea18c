"""The add-ons brought onto the cluster with helm, compared with what is there, and removed."""

from __future__ import annotations

import difflib
import json
import shlex
import subprocess
from collections.abc import Collection, Iterator

from infra.account.polling import shorten
from infra.addons.installed import Installed, find_helm, find_others, find_users, list_installed
from infra.addons.releases import IN_FOLDER, MARK, MARKED, Release
from infra.child_process import run_to_its_end
from infra.workloads.kubernetes_cluster import run_kubectl
from services.common.errors import DeviceError

REVISION = "rollme/helm-revision:"
NOT_FOUND = "release: not found"  # helm's words, in versions 3 and 4
DIFFERS = 1  # the exit code of kubectl diff where there is a difference
# JSON: kubectl 1.34 prints several objects as YAML without a line between them, and the last alone would be applied.
MARK_CRDS = ["label", "--local", "--filename", "-", "--output", "json", f"{MARK}={MARKED}"]
# Server-side, as definitions are too long for the annotation of a client's apply; helm owns what it once created.
APPLY_CRDS = ["apply", "--server-side", "--force-conflicts", "--filename", "-"]
DIFF_CRDS = ["diff", "--server-side", "--force-conflicts", "--filename", "-"]


def install_releases(releases: list[Release], is_dry_run: bool) -> None:
    """Install or upgrade these, in order; stops at the first that fails. A dry run prints the commands alone.

    Raises `DeviceError` before anything is installed where somebody else has one of them on the cluster already.
    """
    if is_dry_run:
        for release in releases:
            print("\n".join(_describe_commands(release)))
        return
    helm = find_helm()
    _require_place(releases)
    for release in releases:
        print(f"== {release.name} {release.version} in {release.namespace}", flush=True)
        if release.crds == IN_FOLDER:
            print(run_kubectl(APPLY_CRDS, _read_crds(helm, release)), end="", flush=True)
        if exit_code := run_to_its_end([helm, *release.install]):
            raise _failure(release, exit_code, "was rolled back, those before it stay")


def remove_releases(releases: list[Release], installed: list[Installed], own_namespaces: Collection[str]) -> None:
    """The last one first, of those that `make addons` installed; what else is installed is named and left.

    One is left, too, while objects of its kinds are in other namespaces than these: its programs serve them, and helm
    deletes what a chart's templates define, with every object of it.
    """
    helm = find_helm()
    ours = {(each.namespace, each.name) for each in installed if each.is_ours}
    for each in installed:
        if not each.is_ours:
            print(f"left        {each}: somebody else's", flush=True)
    for release in reversed(releases):
        if (release.namespace, release.name) not in ours:
            continue
        if users := find_users(release, own_namespaces, ours):
            print(f"left        add-on {release.name}, which others use: {shorten(users)}", flush=True)
            continue
        print(f"removing    {release.name} from {release.namespace}", flush=True)
        if exit_code := run_to_its_end([helm, *release.uninstall]):
            raise _failure(release, exit_code, "may still be there")


def compare_releases(releases: list[Release]) -> bool:
    """Print what `install_releases` would change, as a diff of manifests; True where that is anything.

    The cluster renders both sides, so that what a chart asks of its API is the same.
    """
    is_changed = False
    others = find_others(releases, list_installed())
    for release in releases:
        if release.name in others:
            print(f"{release.name} {release.version}: make addons leaves it out, as somebody else installed it")
            print("".join(f"  {each}\n" for each in others[release.name]), end="")
            continue
        difference = list(_differences(release))
        print(f"{release.name} {release.version}: {'would change' if difference else 'as it is installed'}")
        print("".join(f"{line}\n" for line in difference), end="")
        is_changed = is_changed or bool(difference)
    return is_changed


def _require_place(releases: list[Release]) -> None:
    others = find_others(releases, list_installed())
    if not others:
        return
    lines = [f"\n  - {name}: {each}" for name, found in others.items() for each in found]
    free = [release.name for release in releases if release.name not in others]
    only = f"make addons ONLY={','.join(free)} installs the others. " if free else ""
    raise DeviceError(
        f"{' and '.join(others)}: on the cluster already, and not by make addons; two of one add-on undo each other's "
        f"work. Nothing was installed:{''.join(lines)}\n{only}docs/operations/existing-cluster.md says which versions "
        f"and settings of yours Millrace takes. A release that is to be make addons' from now on: kubectl --namespace "
        f"NAMESPACE label secret --selector owner=helm,name=RELEASE {MARK}={MARKED}"
    )


def _describe_commands(release: Release) -> Iterator[str]:
    if release.crds == IN_FOLDER:
        pipe = (["helm", *release.show_crds], ["kubectl", *MARK_CRDS], ["kubectl", *APPLY_CRDS])
        yield " | ".join(map(shlex.join, pipe))
    yield shlex.join(["helm", *release.install])


def _read_crds(helm: str, release: Release) -> str:
    """The definitions of the chart's folder crds/, each with the label of what `make addons` installed."""
    shown = _read([helm, *release.show_crds])
    if shown.returncode:
        raise _failure(release, shown.returncode, "has definitions of kinds that could not be read", shown.stderr)
    return run_kubectl(MARK_CRDS, shown.stdout)


def _differences(release: Release) -> Iterator[str]:
    helm = find_helm()
    if release.crds == IN_FOLDER:
        yield from _count_differences(run_kubectl(DIFF_CRDS, _read_crds(helm, release), (0, DIFFERS)))
    installed = _read([helm, "get", "manifest", release.name, "--namespace", release.namespace])
    if installed.returncode and NOT_FOUND not in installed.stderr:
        raise _failure(release, installed.returncode, "could not be read", installed.stderr)
    before = "" if installed.returncode else installed.stdout
    wanted = _read([helm, *release.upgrade, "--dry-run=server", "--output", "json"])
    if wanted.returncode:
        raise _failure(release, wanted.returncode, "could not be rendered", wanted.stderr)
    after: str = json.loads(wanted.stdout)["manifest"]
    yield from difflib.unified_diff(_comparable(before), _comparable(after), "installed", "addons.yaml", lineterm="")


def _comparable(manifest: str) -> list[str]:
    """Its lines but for the number of the release's revision, which Volcano's chart writes into a pod."""
    return [line for line in manifest.strip().splitlines() if REVISION not in line]


def _count_differences(difference: str) -> Iterator[str]:
    """A line a definition, of what kubectl diff prints: those of KubeRay have 71,000 lines."""
    changes: dict[str, list[str]] = {}
    name = ""
    for line in difference.splitlines():
        if line.startswith("+++ "):
            name = line.split()[1].rpartition("..")[2]
            changes[name] = []
        elif line.startswith(("+", "-")) and not line.startswith("--- "):
            changes.setdefault(name, []).append(line[0])
    for name, signs in changes.items():
        yield f"definition {name}: {signs.count('+')} lines come, {signs.count('-')} go"


def _read(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _failure(release: Release, exit_code: int, outcome: str, words: str = "") -> DeviceError:
    said = f": {words.strip()}" if words else "; its words are above"
    return DeviceError(
        f"helm ended with {exit_code}{said}. {release.name} {outcome}. The same command continues; "
        f"kubectl -n {release.namespace} get pods,events shows what a release waits for"
    )
