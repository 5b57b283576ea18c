"""Installs, compares and removes the cluster's add-ons with helm."""

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
NOT_FOUND = "release: not found"  # what helm 3 and 4 print
DIFFERS = 1  # exit code of kubectl diff if there is a difference
# JSON, because kubectl 1.34 prints several objects as YAML without separators, and only the last would be applied.
MARK_CRDS = ["label", "--local", "--filename", "-", "--output", "json", f"{MARK}={MARKED}"]
# Server-side, because the definitions are too long for the annotation of a client-side apply; with force, because helm
# owns the fields that it created.
APPLY_CRDS = ["apply", "--server-side", "--force-conflicts", "--filename", "-"]
# A dashboard is too long for the annotation of a client-side apply, too.
APPLY_MANIFESTS = ["apply", "--server-side", "--force-conflicts"]
DIFF_MANIFESTS = ["diff", "--server-side", "--force-conflicts"]
DIFF_CRDS = ["diff", "--server-side", "--force-conflicts", "--filename", "-"]


def install_releases(releases: list[Release], is_dry_run: bool) -> None:
    """Installs or upgrades the releases in order, and stops at the first failure. A dry run only prints the commands.

    Raises `DeviceError`, before anything is installed, if somebody else has installed one of the add-ons.
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
            raise _failure(release, exit_code, "was rolled back; the add-ons before it stay")
        if release.manifests:
            print(run_kubectl([*APPLY_MANIFESTS, *release.kustomization]), end="", flush=True)


def remove_releases(releases: list[Release], installed: list[Installed], own_namespaces: Collection[str]) -> None:
    """Removes the releases that `make addons` installed, in reverse order; prints and leaves all others.

    Also leaves an add-on while other namespaces than `own_namespaces` have objects of its kinds: its programs serve
    these objects, and helm would delete the definitions in a chart's templates, with every object of the kind.
    """
    helm = find_helm()
    ours = {(each.namespace, each.name) for each in installed if each.is_ours}
    for each in installed:
        if not each.is_ours:
            print(f"left        {each}: not installed by make addons", flush=True)
    for release in reversed(releases):
        if (release.namespace, release.name) not in ours:
            continue
        if users := find_users(release, own_namespaces, ours):
            print(f"left        add-on {release.name}, which others use with {shorten(users)}", flush=True)
            continue
        print(f"removing    {release.name} from {release.namespace}", flush=True)
        if release.manifests:
            run_kubectl(["delete", "--ignore-not-found", *release.kustomization])
        if exit_code := run_to_its_end([helm, *release.uninstall]):
            raise _failure(release, exit_code, "may still be installed")


def compare_releases(releases: list[Release]) -> bool:
    """Prints what `install_releases` would change, as a diff of manifests. Returns whether anything would change.

    The cluster renders both sides, so a chart that queries the cluster's API gets the same answers for both.
    """
    is_changed = False
    others = find_others(releases, list_installed())
    for release in releases:
        if release.name in others:
            print(f"{release.name} {release.version}: skipped, because make addons did not install it")
            print("".join(f"  {each}\n" for each in others[release.name]), end="")
            continue
        difference = list(_differences(release))
        print(f"{release.name} {release.version}: {'would change' if difference else 'is installed like this'}")
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
        f"{' and '.join(others)}: already on the cluster, but not installed by make addons. Two installations of an "
        f"add-on undo each other's work, so nothing was installed:{''.join(lines)}\n{only}"
        f"docs/operations/existing-cluster.md says which versions and settings Millrace needs. To let make addons take "
        f"over a release: kubectl --namespace NAMESPACE label secret --selector owner=helm,name=RELEASE {MARK}={MARKED}"
    )


def _describe_commands(release: Release) -> Iterator[str]:
    if release.crds == IN_FOLDER:
        pipe = (["helm", *release.show_crds], ["kubectl", *MARK_CRDS], ["kubectl", *APPLY_CRDS])
        yield " | ".join(map(shlex.join, pipe))
    yield shlex.join(["helm", *release.install])
    if release.manifests:
        yield shlex.join(["kubectl", *APPLY_MANIFESTS, *release.kustomization])


def _read_crds(helm: str, release: Release) -> str:
    """Prints the definitions in the chart's folder crds/, each with the label that `make addons` sets."""
    shown = _read([helm, *release.show_crds])
    if shown.returncode:
        raise _failure(release, shown.returncode, "has unreadable custom resource definitions", shown.stderr)
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
    if release.manifests and not installed.returncode:
        yield from run_kubectl([*DIFF_MANIFESTS, *release.kustomization], good_codes=(0, DIFFERS)).splitlines()


def _comparable(manifest: str) -> list[str]:
    """The manifest's lines without the release's revision number, which Volcano's chart writes into a pod."""
    return [line for line in manifest.strip().splitlines() if REVISION not in line]


def _count_differences(difference: str) -> Iterator[str]:
    """Counts the changed lines of each definition in a kubectl diff; KubeRay's definitions have 71,000 lines."""
    changes: dict[str, list[str]] = {}
    name = ""
    for line in difference.splitlines():
        if line.startswith("+++ "):
            name = line.split()[1].rpartition("..")[2]
            changes[name] = []
        elif line.startswith(("+", "-")) and not line.startswith("--- "):
            changes.setdefault(name, []).append(line[0])
    for name, signs in changes.items():
        yield f"definition {name}: {signs.count('+')} lines added, {signs.count('-')} removed"


def _read(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _failure(release: Release, exit_code: int, outcome: str, words: str = "") -> DeviceError:
    said = f": {words.strip()}" if words else "; its output is above"
    return DeviceError(
        f"helm ended with {exit_code}{said}. {release.name} {outcome}. Run the same command again to continue; "
        f"kubectl -n {release.namespace} get pods,events shows what a release waits for"
    )
