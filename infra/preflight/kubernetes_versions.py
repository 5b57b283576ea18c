"""Checks how long EKS supports the cluster's Kubernetes version, and which versions of its add-ons EKS would choose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from infra.account.session import Account
from infra.apply.inputs import Inputs
from infra.aws_releases import read_addon_pins, read_eks_machine_images
from infra.cost.prices import dollars
from infra.preflight.requirement import Finding, Look

# The stack's EKS add-ons; a test compares them with its modules.
ADDONS = (
    *("vpc-cni", "kube-proxy", "eks-pod-identity-agent", "coredns", "metrics-server", "aws-fsx-csi-driver"),
    "aws-ebs-csi-driver",
    *("eks-node-monitoring-agent", "amazon-cloudwatch-observability"),
)


def look_at_kubernetes(account: Account, inputs: Inputs) -> list[Look]:
    """Checks the chosen version, and that of an existing cluster; empty if the stack has no such variable."""
    if not inputs.kubernetes_version:
        return []
    chosen = inputs.kubernetes_version
    found = account.client("eks").describe_cluster_versions(clusterVersions=[chosen])["clusterVersions"]
    status = found[0].get("versionStatus", "") if found else "UNSUPPORTED"
    end = found[0].get("endOfStandardSupportDate") if found else None
    until = f"{end:%Y-%m-%d}" if end else "an unknown date"
    seen = f"{chosen} is in standard support until {until}; {_describe_policy(inputs)}"
    findings = []
    if status != "STANDARD_SUPPORT":
        seen = f"{chosen} is {status}; standard support ended on {until}"
        if status == "UNSUPPORTED" or inputs.kubernetes_support == "STANDARD":
            findings.append(_explain_end(account, inputs, status, until))
    present = _find_present(account, inputs.name)
    if present not in ("", chosen):
        seen += f"; cluster {inputs.name} has {present}"
        if _minor(present) > _minor(chosen):
            findings.append(
                Finding(
                    what=f"cluster {inputs.name} has a newer Kubernetes than the chosen one; EKS cannot downgrade it",
                    where=f"cluster {inputs.name}, variable kubernetes_version",
                    got=present,
                    expected=chosen,
                    command=f'kubernetes_version = "{present}"; known are {", ".join(read_eks_machine_images())}',
                )
            )
    return [(seen, findings)]


def look_at_addons(account: Account, inputs: Inputs) -> list[Look]:
    """Checks pinned add-on versions, and prints those that EKS chooses for the others; empty without a version."""
    if not inputs.kubernetes_version:
        return []
    pins = read_addon_pins(inputs.kubernetes_version) | inputs.addon_versions
    offers = {name: _read_offer(account, name, inputs.kubernetes_version) for name in ADDONS}
    findings = list(_find_absent_pins(account, pins, offers))
    free = {name: default for name, (_, default) in offers.items() if name not in pins and default}
    line = ", ".join(f'{name} = "{version}"' for name, version in free.items())
    seen = f"{len(pins)} pinned; to pin EKS' defaults: addon_versions = {{ {line} }}" if free else "all are pinned"
    return [(seen, findings)]


def _describe_policy(inputs: Inputs) -> str:
    """Says what EKS does with the cluster once the version's standard support ends."""
    if inputs.kubernetes_support == "STANDARD":
        return "then EKS upgrades the cluster to the next version (kubernetes_support = STANDARD)"
    price = dollars("eks_extended_support_hour")
    return f"then the control plane costs ${price:.2f} an hour (kubernetes_support = EXTENDED)"


def _explain_end(account: Account, inputs: Inputs, status: str, until: str) -> Finding:
    others = [version for version in read_eks_machine_images() if _minor(version) > _minor(inputs.kubernetes_version)]
    price = dollars("eks_extended_support_hour")
    extended = "" if status == "UNSUPPORTED" else f'; or kubernetes_support = "EXTENDED", for ${price:.2f} an hour'
    return Finding(
        what=f"EKS has ended standard support of Kubernetes {inputs.kubernetes_version}",
        where=f"EKS, {account.region}; variables kubernetes_version, kubernetes_support",
        got=f"{status}; standard support ended on {until}",
        expected='a version in standard support, or kubernetes_support = "EXTENDED"',
        command=f"kubernetes_version = {' or '.join(others) or 'a newer one, once its AMI is listed'}{extended}",
    )


def _find_present(account: Account, cluster: str) -> str:
    """Version of the existing cluster; empty without one."""
    found = account.find("eks", "describe_cluster", name=cluster)
    return "" if found is None else str(found["cluster"].get("version") or "")


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


def _find_absent_pins(
    account: Account, pins: dict[str, str], offers: dict[str, tuple[list[str], str]]
) -> Iterator[Finding]:
    for name, version in pins.items():
        offered, default = offers.get(name, ([], ""))
        if version not in offered:
            yield Finding(
                what=f"EKS has no {version} of add-on {name}",
                where=f"EKS, {account.region}; variable addon_versions, infra/aws_releases.json",
                got=version,
                expected=f"one of {', '.join(offered[:5]) or 'none: EKS has no such add-on for this version'}",
                command=f'addon_versions = {{ {name} = "{default}" }}' if default else f"remove {name}",
            )


def _minor(version: str) -> int:
    return int(version.partition(".")[2] or 0)
