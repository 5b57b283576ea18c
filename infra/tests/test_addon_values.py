"""Values of EKS' add-ons against recorded schemas of `aws eks describe-addon-configuration`."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from botocore.stub import Stubber

from infra.account.session import Account
from infra.apply.terraform import Change, Plan
from infra.preflight.addons import list_refused_values
from infra.tests.conftest import REGION, Aws

# The parts that the stack's values meet: of vpc-cni v1.15.1-eksbuild.1 in the AWS CLI's reference of this command, of
# coredns v1.11.1-eksbuild.8 in terraform-aws-modules/eks, and of aws-ebs-csi-driver in aws/containers-roadmap#2582.
TEXTS: dict[str, Any] = {"additionalProperties": {"type": "string"}, "type": "object"}
NUMBER = {"format": "integer", "type": "string"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "vpc-cni": {
        "enableNetworkPolicy": {"format": "boolean", "type": "string"},
        "env": {
            "additionalProperties": False,
            "properties": {"MINIMUM_IP_TARGET": NUMBER, "WARM_IP_TARGET": NUMBER},
            "type": "object",
        },
    },
    "coredns": {"nodeSelector": TEXTS},
    "aws-ebs-csi-driver": {
        "controller": {"type": "object", "properties": {"nodeSelector": {"type": ["object", "null"], "default": None}}}
    },
}
FITTING = {
    "vpc-cni": {"enableNetworkPolicy": "true", "env": {"MINIMUM_IP_TARGET": "12", "WARM_IP_TARGET": "4"}},
    "coredns": {"nodeSelector": {"millrace.dev/pool": "core"}},
    "aws-ebs-csi-driver": {"controller": {"nodeSelector": {"millrace.dev/pool": "core"}}},
}


VERSIONS = {
    "addonVersions": [
        {"addonVersion": "v2", "compatibilities": [{"clusterVersion": "1.35", "defaultVersion": False}]},
        {"addonVersion": "v1", "compatibilities": [{"clusterVersion": "1.35", "defaultVersion": True}]},
    ]
}


def refusals_of(values: dict[str, Any]) -> list[str]:
    """What is said of these add-ons' values, with EKS' recorded answers in the place of an account's."""
    account = Account(REGION)
    with Stubber(account.client("eks")) as eks:
        for name in values:
            schema = {"type": "object", "additionalProperties": False, "properties": SCHEMAS[name]}
            schema["$schema"] = "http://json-schema.org/draft-06/schema#"
            asked = {"addonName": name, "addonVersion": "v1"}
            eks.add_response(
                "describe_addon_versions", {"addons": [VERSIONS]}, {"addonName": name, "kubernetesVersion": "1.35"}
            )
            eks.add_response("describe_addon_configuration", {"configurationSchema": json.dumps(schema)}, asked)
        return list(list_refused_values(account, plan_of(values), "1.35"))


def plan_of(values: dict[str, Any]) -> Plan:
    changes = []
    for name, each in values.items():
        after = {"addon_name": name, "configuration_values": json.dumps(each)}
        changes.append(Change(f'module.eks.aws_eks_addon.after_nodes["{name}"]', ("create",), after=after))
    return Plan(tuple(changes), is_applyable=True)


def test_the_values_of_the_stack_fit(aws: Aws) -> None:
    assert refusals_of(FITTING) == []


@pytest.mark.parametrize(
    ("name", "values", "place"),
    [
        ("aws-ebs-csi-driver", {"nodeSelector": {"millrace.dev/pool": "core"}}, r"\$: .*nodeSelector"),
        ("vpc-cni", {"env": {"MINIMUM_IP_TARGET": 12}}, r"\$\.env\.MINIMUM_IP_TARGET: 12"),
        ("vpc-cni", {"env": {"MINIMUM_IPS": "12"}}, r"\$\.env: .*MINIMUM_IPS"),
        ("coredns", {"nodeSelector": "core"}, r"\$\.nodeSelector: 'core'"),
    ],
)
def test_a_value_that_eks_would_refuse_is_named(aws: Aws, name: str, values: Any, place: str) -> None:
    [said] = refusals_of({name: values})
    assert re.search(f"{name} v1 .*{place}", said)
