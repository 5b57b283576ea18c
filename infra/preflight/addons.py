"""Checks the values of EKS add-ons in a plan: EKS itself checks them when the cluster is already paid for."""

from __future__ import annotations

import json
from collections.abc import Iterator

from jsonschema.validators import validator_for

from infra.account.session import Account
from infra.apply.terraform import Plan, type_of


def list_refused_values(account: Account, plan: Plan, kubernetes_version: str) -> Iterator[str]:
    """Holds each planned add-on's values against the schema that EKS publishes for its version."""
    eks = account.client("eks")
    for change in plan.changes:
        values = change.after.get("configuration_values")
        if type_of(change.address) != "aws_eks_addon" or not values:
            continue
        name = change.after["addon_name"]
        version = change.after.get("addon_version") or _default_version(account, name, kubernetes_version)
        known = eks.describe_addon_configuration(addonName=name, addonVersion=version)
        schema = json.loads(known["configurationSchema"])
        for error in validator_for(schema)(schema).iter_errors(json.loads(values)):
            yield (
                f"add-on {name} {version} refuses a value of infra/modules/eks/addons.tf: {error.json_path}: "
                f"{error.message}. aws eks describe-addon-configuration --addon-name {name} --addon-version {version} "
                f"shows its schema; addon_versions pins another version"
            )


def _default_version(account: Account, name: str, kubernetes_version: str) -> str:
    """The version that EKS installs where nobody names one."""
    [addon] = account.pages(
        "eks", "describe_addon_versions", "addons", addonName=name, kubernetesVersion=kubernetes_version
    )
    return next(
        str(each["addonVersion"])
        for each in addon["addonVersions"]
        if any(fit["defaultVersion"] for fit in each["compatibilities"])
    )
