"""Checks how long EKS supports the cluster's Kubernetes version, and which versions of its add-ons EKS would choose."""

from __future__ import annotations

from typing import Any

from infra.account.session import Account
from infra.apply.inputs import Inputs
from infra.aws_releases import read_addon_pins, read_eks_machine_images
from infra.cost.prices import dollars
from infra.preflight.requirement import CheckResult, Finding

# The stack's EKS add-ons; a test compares them with its modules.
ADDONS = (
    *("vpc-cni", "kube-proxy", "eks-pod-identity-agent", "coredns", "metrics-server", "aws-fsx-csi-driver"),
    "aws-ebs-csi-driver",
    *("eks-node-monitoring-agent", "amazon-cloudwatch-observability"),
)


def check_kubernetes(account: Account, inputs: Inputs) -> list[CheckResult]:
    """Checks the chosen version, and that of an existing cluster; empty if the stack has no such variable."""
    if not inputs.kubernetes_version:
        return []
    results, chosen = [_check_support(account, inputs)], inputs.kubernetes_version
    cluster = account.find("eks", "describe_cluster", name=inputs.name)
    present = str((cluster or {}).get("cluster", {}).get("version") or chosen)
    if present != chosen:
        findings = []
        if _minor(present) > _minor(chosen):
            known = ", ".join(read_eks_machine_images())
            findings.append(
                Finding(
                    what=f"cluster {inputs.name} has a newer Kubernetes than the chosen one; EKS cannot downgrade it",
                    where=f"cluster {inputs.name}, variable kubernetes_version",
                    got=present,
                    expected=chosen,
                    command=f'kubernetes_version = "{present}"; known are {known}',
                )
            )
        results.append((f"cluster {inputs.name} has {present}", findings))
    return results


def check_addons(account: Account, inputs: Inputs) -> list[CheckResult]:
    """Checks pinned add-on versions, and prints those that EKS chooses for the others; empty without a version."""
    if not inputs.kubernetes_version:
        return []
    pins = read_addon_pins(inputs.kubernetes_version) | inputs.addon_versions
    offers = {name: _read_offer(account, name, inputs.kubernetes_version) for name in ADDONS}
    findings = []
    for name, version in pins.items():
        offered, default = offers.get(name, ([], ""))
        if version not in offered:
            findings.append(
                Finding(
                    what=f"EKS has no {version} of add-on {name}",
                    where=f"EKS, {account.region}; variable addon_versions, infra/aws_releases.json",
                    got=version,
                    expected=f"one of {', '.join(offered[:5]) or 'none: EKS has no such add-on for this version'}",
                    command=f'addon_versions = {{ {name} = "{default}" }}' if default else f"remove {name}",
                )
            )
    free = {name: default for name, (_, default) in offers.items() if name not in pins and default}
    line = ", ".join(f'{name} = "{version}"' for name, version in free.items())
    seen = f"{len(pins)} pinned; to pin EKS' defaults: addon_versions = {{ {line} }}" if free else "all are pinned"
    return [(seen, findings)]


def _check_support(account: Account, inputs: Inputs) -> CheckResult:
    """Says until when EKS supports the version, and what it does then. Refuses one that EKS does not take any more."""
    chosen, is_extended = inputs.kubernetes_version, inputs.kubernetes_support != "STANDARD"
    price = f"for ${dollars('eks_extended_support_hour'):.2f} an hour"
    found = account.client("eks").describe_cluster_versions(clusterVersions=[chosen])["clusterVersions"]
    status = found[0].get("versionStatus", "") if found else "UNSUPPORTED"
    end = found[0].get("endOfStandardSupportDate") if found else None
    until = f"{end:%Y-%m-%d}" if end else "an unknown date"
    if status == "STANDARD_SUPPORT":
        then = f"keeps it, {price} of the control plane" if is_extended else "upgrades the cluster to the next version"
        policy = f"kubernetes_support = {inputs.kubernetes_support}"
        return f"{chosen} is in standard support until {until}; then EKS {then} ({policy})", []
    seen = f"{chosen} is {status}; standard support ended on {until}"
    if status != "UNSUPPORTED" and is_extended:
        return seen, []
    others = [version for version in read_eks_machine_images() if _minor(version) > _minor(chosen)]
    extended = "" if status == "UNSUPPORTED" else f'; or kubernetes_support = "EXTENDED", {price}'
    return seen, [
        Finding(
            what=f"EKS has ended standard support of Kubernetes {chosen}",
            where=f"EKS, {account.region}; variables kubernetes_version, kubernetes_support",
            got=f"{status}; standard support ended on {until}",
            expected='a version in standard support, or kubernetes_support = "EXTENDED"',
            command=f"kubernetes_version = {' or '.join(others) or 'a newer one, once its AMI is listed'}{extended}",
        )
    ]


def _read_offer(account: Account, name: str, version: str) -> tuple[list[str], str]:
    """Versions of an add-on for a Kubernetes version, and EKS' default among them."""
    found = account.pages("eks", "describe_addon_versions", "addons", addonName=name, kubernetesVersion=version)
    offered: list[dict[str, Any]] = [each for addon in found for each in addon["addonVersions"]]
    defaults = [
        each["addonVersion"]
        for each in offered
        if any(fit.get("clusterVersion") == version and fit.get("defaultVersion") for fit in each["compatibilities"])
    ]
    return [each["addonVersion"] for each in offered], next(iter(defaults), "")


def _minor(version: str) -> int:
    return int(version.partition(".")[2] or 0)
