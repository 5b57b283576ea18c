"""infra-up never ends the nodes of a pool that is in use: it says what has to end first."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from infra.apply.renewal import list_renewed_pools
from infra.apply.terraform import read_plan
from infra.tests.conftest import PLACE, Aws, RunInfra, WriteValues
from infra.tests.moto_batch import keep_jobs_still, make_queue, submit_job
from infra.tests.programs import Programs

TRAINIUM = "module.trainium.aws_eks_node_group.this"
ENVIRONMENT = 'module.batch.aws_batch_compute_environment.pool["trainium"]'
GROUP: dict[str, Any] = {
    "launch_template": [{"id": "lt-0", "version": "1"}],
    "release_version": "1.35.4-20260505",
    "scaling_config": [{"desired_size": 2, "max_size": 4, "min_size": 0}],
}
RESOURCES: dict[str, Any] = {
    "compute_resources": [
        {
            "launch_template": [{"launch_template_id": "lt-0", "version": "1"}],
            "max_vcpus": 512,
            "subnets": ["subnet-0"],
        }
    ],
    "state": "ENABLED",
}
OUTPUTS = (
    *("region", "cluster_name", "registry", "bucket", "fsx_id", "fsx_dns_name", "fsx_mount_name", "trainium_shape"),
    *("trainium_node_group", "trainium_max_nodes", "cpu_shape", "cpu_node_group", "cpu_max_nodes"),
)
UPDATE, REPLACE = ["update"], ["create", "delete"]


def change_of(address: str, before: dict[str, Any], actions: list[str] | None = None, **after: Any) -> dict[str, Any]:
    """Makes a resource change of a plan, as `terraform show -json` prints it; what is not known yet is not in it."""
    change = {"actions": actions or UPDATE, "before": before or None, "after": before | after}
    return {"address": address, "mode": "managed", "change": change}


def environment_with(**changes: Any) -> dict[str, Any]:
    return change_of(ENVIRONMENT, RESOURCES, compute_resources=[RESOURCES["compute_resources"][0] | changes])


@pytest.mark.parametrize(
    ("change", "is_renewal"),
    [
        (change_of(TRAINIUM, GROUP, launch_template=[{"id": "lt-0"}]), True),
        (change_of(TRAINIUM, GROUP, REPLACE), True),
        (change_of(TRAINIUM, {}, ["create"], release_version="1.35.4-20260505"), False),
        (change_of(TRAINIUM, GROUP, scaling_config=[{"desired_size": 2, "max_size": 8, "min_size": 0}]), False),
        (environment_with(launch_template=[{"launch_template_id": "lt-0"}]), True),
        (environment_with(max_vcpus=1024), False),
        (change_of("module.storage.aws_s3_bucket.this", {"tags": {}}, tags={"team": "research"}), False),
    ],
)
def test_what_ends_the_nodes_of_a_pool(change: dict[str, Any], is_renewal: bool) -> None:
    """test_apply.py has real plans of the provider."""
    plan = read_plan({"resource_changes": [change]})
    assert list_renewed_pools(plan) == ([change["address"]] if is_renewal else [])


@pytest.fixture
def terraform(
    programs: Programs, write_values: WriteValues, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Programs:
    """A terraform that would give new nodes to the pools of both stacks."""
    (tmp_path / "settings.env").touch()
    for name, value in (("OVERLAY", str(tmp_path)), ("CONFIG", str(tmp_path / "config.txt")), ("YES", "1")):
        monkeypatch.setenv(name, value)
    changes = [
        change_of(TRAINIUM, GROUP, release_version="1.35.5-20260610"),
        environment_with(subnets=["subnet-1"]),
    ]
    (tmp_path / "plan.json").write_text(json.dumps({"resource_changes": changes, "applyable": True}), encoding="utf-8")
    write_values(PLACE)
    outputs = {name: {"value": "x"} for name in OUTPUTS} | {"config": {"value": "ECR_REPO=registry/millrace\n"}}
    (tmp_path / "outputs.json").write_text(json.dumps(outputs), encoding="utf-8")
    programs.add_terraform(
        f"""
case "$*" in
*show*) cat {tmp_path}/plan.json ;;
*output*) cat {tmp_path}/outputs.json ;;
esac"""
    )
    return programs


def is_applied(programs: Programs) -> bool:
    return any(" apply " in each for each in programs.calls)


def test_nodes_of_a_run_are_not_taken_from_it(run_infra: RunInfra, aws: Aws, terraform: Programs) -> None:
    subnets = aws.make_subnets("usw2-az4")
    aws.make_cluster(subnets)
    for pool, size in (("core", 2), ("cpu", 0), ("trainium", 4), ("others", 3)):
        aws.make_node_group(pool, subnets, size, is_ours=pool != "others")

    done = run_infra("up", exit_code=4)

    assert not is_applied(terraform)
    assert TRAINIUM in done.stderr
    assert "node group trainium has 4 nodes" in done.stderr
    assert "others" not in done.stderr, "a group of others, which the plan does not touch"

    eks = aws.client("eks")
    eks.update_nodegroup_config(clusterName="millrace", nodegroupName="trainium", scalingConfig={"desiredSize": 0})
    run_infra("up")

    assert is_applied(terraform)


def test_a_compute_environment_is_not_replaced_under_a_job(
    run_infra: RunInfra, aws: Aws, terraform: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STACK", "batch")
    keep_jobs_still(monkeypatch)
    make_queue(aws.client, "millrace-trainium")
    job = submit_job(aws.client, "millrace-trainium", "millrace-trainer")

    done = run_infra("up", exit_code=4)

    assert not is_applied(terraform)
    assert "job queue millrace-trainium has millrace-trainer-a" in done.stderr

    aws.client("batch").terminate_job(jobId=job, reason="over")
    run_infra("up")
    assert is_applied(terraform)


def test_a_machine_image_whose_driver_the_images_do_not_take_is_refused_before_anything_is_made(
    run_infra: RunInfra, aws: Aws, terraform: Programs, write_values: WriteValues
) -> None:
    write_values(f'{PLACE}trainium = {{ shape = "trn2.48xlarge" }}\nami_release = "20260505"\n')

    done = run_infra("up", exit_code=4)

    assert not is_applied(terraform)
    assert re.search("no AMI release 20260505 for trn2.48xlarge.*aws-neuronx-dkms from 2.31.7.0 on", done.stderr)
