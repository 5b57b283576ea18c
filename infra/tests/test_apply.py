"""The stack is applied to an AWS that runs here, found as it was meant, and destroyed without leftovers.

`make test-infra TF_PLUGIN_MIRROR=FOLDER`; a folder that `terraform providers mirror` fills. Minutes, most of them the
provider's own waits. The AWS is moto with a shim (fakeaws): it checks calls and their order, not what AWS would accept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from infra.account.cluster_resources import list_node_groups
from infra.apply.terraform import type_of
from infra.teardown.neighbours import find_in_account
from infra.tests.applied import APPLIES, REGION, Applied, apply_stack, destroy, list_left, simulated_aws
from services.common.hardware.instance_types import default_lustre_size

VARIABLES = {
    "region": REGION,
    "zone_id": "usw2-az4",
    "operators": ["arn:aws:iam::123456789012:role/research"],
    "budget": {"monthly_dollars": 5000, "emails": ["you@example.com"]},
    "api_public_cidrs": ["203.0.113.7/32"],
}

pytestmark = APPLIES


@pytest.fixture(scope="module")
def applied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Applied]:
    place = tmp_path_factory.mktemp("apply")
    with simulated_aws(place) as endpoint:
        yield apply_stack("eks", VARIABLES, endpoint, place)


def test_nothing_that_the_stack_made_is_taken_for_somebody_elses(
    applied: Applied, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything has the stack's tag from terraform's provider; otherwise infra-down would refuse."""
    account = applied.account(monkeypatch)
    assert list(find_in_account(account, "millrace")) == []
    assert {group.name: group.stack for group in list_node_groups(account, "millrace")} == {
        "core": "millrace",
        "cpu": "millrace",
        "trainium": "millrace",
    }


def test_a_deployments_nodes_are_not_taken_back_by_the_next_apply(applied: Applied) -> None:
    eks = applied.client("eks")
    eks.update_nodegroup_config(clusterName="millrace", nodegroupName="trainium", scalingConfig={"desiredSize": 3})
    address = "module.trainium.aws_eks_node_group.this"
    plan = applied.folder / "plan"
    applied.run("plan", "-input=false", f"-target={address}", f"-out={plan}")
    changes = json.loads(applied.run("show", "-json", str(plan)))["resource_changes"]
    [planned] = [each["change"]["after"] for each in changes if each["address"] == address]
    assert planned["scaling_config"][0]["desired_size"] == 3


def test_a_plan_tells_what_renews_nodes_from_what_does_not(applied: Applied) -> None:
    """Checks real plans of the provider."""
    options = ((), ("-var=trainium={max_nodes=8}",), ("-var=ami_release=1.34.8-20260610",))
    plain, larger, newer = (applied.plan_resource("module.trainium.aws_eks_node_group.this", *each) for each in options)
    assert [key for key in plain if larger.get(key) != plain[key]] == ["scaling_config"]
    assert [key for key in plain if newer.get(key) != plain[key]] == ["release_version"]


def test_another_zone_is_known_to_lose_the_file_system(applied: Applied) -> None:
    """Checks a real plan of the provider."""
    lost = [each.address for each in applied.plan("-var=zone_id=usw2-az1").changes if each.is_loss_of_data]
    assert lost == ["module.storage.aws_fsx_lustre_file_system.this[0]"]


def test_the_file_system_has_the_speed_that_the_plan_assumes_and_gets_another_in_place(applied: Applied) -> None:
    [made] = applied.client("fsx").describe_file_systems()["FileSystems"]
    default = default_lustre_size()
    assert made["StorageCapacity"] == default.gib
    assert made["LustreConfiguration"]["PerUnitStorageThroughput"] == default.megabytes_per_second_per_tib

    changes = {each.address: each for each in applied.plan("-var=fsx={throughput=125}").changes}
    assert changes["module.storage.aws_fsx_lustre_file_system.this[0]"].actions == ("update",)


def test_infra_down_leaves_the_data_and_the_network_that_holds_it(applied: Applied) -> None:
    changes = applied.plan_down()
    assert [each.address for each in changes if each.is_loss_of_data] == []
    gone = {type_of(each.address) for each in changes}
    assert {"aws_eks_cluster", "aws_eks_node_group", "aws_nat_gateway", "aws_eip"} <= gone
    assert {"aws_vpc", "aws_subnet"}.isdisjoint(gone)


def test_destroy_leaves_data_until_it_is_told_to_and_then_nothing(applied: Applied) -> None:
    # The budget acts, of which terraform knows nothing.
    arn = "arn:aws:iam::123456789012:policy/millrace-us-west-2-over-budget"
    applied.client("iam").attach_role_policy(RoleName="millrace-us-west-2-deployer", PolicyArn=arn)

    destroy(applied)

    assert list_left(applied) == {}
