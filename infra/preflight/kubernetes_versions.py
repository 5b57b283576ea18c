"""Checks how long EKS supports the cluster's Kubernetes version, and which versions of its add-ons EKS would choose."""

from __future__ import annotations

from collections.abc import Iterator

from infra.account.session import Account
from infra.apply.inputs import Inputs
from infra.aws_releases import read_addon_pins, read_machine_images
from infra.cost.prices import dollars
from infra.preflight.requirement import CheckResult

# The stack's EKS add-ons; a test compares them with its modules.
ADDONS = (
    *("vpc-cni", "kube-proxy", "eks-pod-identity-agent", "coredns", "metrics-server", "aws-fsx-csi-driver"),
    "aws-ebs-csi-driver",
    *("eks-node-monitoring-agent", "amazon-cloudwatch-observability"),
)


def check_kubernetes(account: Account, inputs: Inputs) -> Iterator[CheckResult]:
    """Says until when EKS supports the chosen version and what it does then, and checks that of an existing cluster."""
    chosen, is_extended = inputs.kubernetes_version, inputs.kubernetes_support != "STANDARD"
    found = account.client("eks").describe_cluster_versions(clusterVersions=[chosen])["clusterVersions"]
    status, end = (found[0].get(key) if found else None for key in ("versionStatus", "endOfStandardSupportDate"))
    price = f"${dollars('eks_extended_support_hour'):.2f} an hour"
    then = f"keeps it, for {price} of the control plane" if is_extended else "upgrades the cluster to the next version"
    until = f"{end:%Y-%m-%d}" if end else "an unknown date"
    seen = f"{chosen}: {status or 'UNSUPPORTED'}, standard support until {until}"
    if status == "STANDARD_SUPPORT":
        yield f"{seen}; then EKS {then} (kubernetes_support = {inputs.kubernetes_support})", []
    elif status and is_extended:
        yield seen, []
    else:
        newer = [version for version in read_machine_images() if _minor(version) > _minor(chosen)]
        extended = f', or kubernetes_support = "EXTENDED" for {price}' if status else ""
        choice = f"kubernetes_version = {' or '.join(newer) or 'a newer one, once its AMI is listed'}{extended}"
        yield seen, [f"EKS has ended standard support of Kubernetes {seen}. Write {choice}"]
    cluster = account.find("eks", "describe_cluster", name=inputs.name)
    present = cluster["cluster"].get("version", chosen) if cluster else chosen
    if _minor(present) > _minor(chosen):
        yield (
            f"cluster {inputs.name} has {present}",
            [f'cluster {inputs.name} has {present}, and EKS cannot downgrade it: kubernetes_version = "{present}"'],
        )


def check_addons(account: Account, inputs: Inputs) -> CheckResult:
    """Checks pinned add-on versions, and prints those that EKS chooses for the others."""
    version = inputs.kubernetes_version
    offers: dict[str, list[str]] = {}
    defaults: dict[str, str] = {}
    for addon in account.pages("eks", "describe_addon_versions", "addons", kubernetesVersion=version):
        for each in addon["addonVersions"]:
            offers.setdefault(addon["addonName"], []).append(each["addonVersion"])
            fits = (fit for fit in each["compatibilities"] if fit.get("clusterVersion") == version)
            if any(fit.get("defaultVersion") for fit in fits):
                defaults[addon["addonName"]] = each["addonVersion"]
    pins = read_addon_pins(version) | inputs.addon_versions
    problems = [
        f"EKS has no {pinned} of add-on {name} for {version}, expected one of {', '.join(offers.get(name, [])[:5])}: "
        f'addon_versions = {{ {name} = "{defaults.get(name, "...")}" }}, or correct infra/aws_releases.json'
        for name, pinned in pins.items()
        if pinned not in offers.get(name, ())
    ]
    free = [f'{name} = "{defaults[name]}"' for name in ADDONS if name in defaults and name not in pins]
    return f"{len(pins)} pinned; to pin EKS' defaults: addon_versions = {{ {', '.join(free)} }}", problems


def _minor(version: str) -> int:
    return int(version.partition(".")[2] or 0)
