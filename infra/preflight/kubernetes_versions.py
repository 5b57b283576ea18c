"""Checks how long EKS supports the chosen version of Kubernetes, and whether it has the pinned add-ons."""

from __future__ import annotations

from infra.account.session import Account
from infra.apply.inputs import Inputs
from infra.aws_releases import read_addon_pins, read_machine_images
from infra.preflight.requirement import CheckResult


def check_kubernetes(account: Account, inputs: Inputs) -> CheckResult:
    """Checks that EKS keeps the chosen version; infra-cost says what it does later."""
    chosen = inputs.kubernetes_version
    found = account.client("eks").describe_cluster_versions(clusterVersions=[chosen])["clusterVersions"]
    status = found[0]["versionStatus"] if found else "UNSUPPORTED"
    end = f", standard support until {found[0]['endOfStandardSupportDate']:%Y-%m-%d}" if found else ""
    seen = f"{chosen}: {status}{end}"
    if status == "STANDARD_SUPPORT" or (found and inputs.kubernetes_support != "STANDARD"):
        return seen, []
    newer = [version for version in read_machine_images() if _minor(version) > _minor(chosen)]
    extended = ', or kubernetes_support = "EXTENDED" for a higher price of the control plane' if found else ""
    choice = f"kubernetes_version = {' or '.join(newer) or 'a newer one, once its AMI is listed'}{extended}"
    return seen, [f"EKS has ended standard support of Kubernetes {seen}. Write {choice}"]


def check_addons(account: Account, inputs: Inputs) -> CheckResult:
    """Checks whether EKS has the pinned versions of its add-ons."""
    version = inputs.kubernetes_version
    pins = read_addon_pins(version) | inputs.addon_versions
    offers = {
        addon["addonName"]: [each["addonVersion"] for each in addon["addonVersions"]]
        for addon in account.pages("eks", "describe_addon_versions", "addons", kubernetesVersion=version)
    }
    problems = [
        f"EKS has no {pinned} of add-on {name} for {version}, expected one of {', '.join(offers.get(name, [])[:5])}: "
        f"write it into addon_versions, or correct infra/aws_releases.json"
        for name, pinned in pins.items()
        if pinned not in offers.get(name, ())
    ]
    return f"{len(pins)} pinned", problems


def _minor(version: str) -> int:
    return int(version.partition(".")[2] or 0)
