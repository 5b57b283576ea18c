"""infra-up and infra-down with the real terraform, on a small stack whose modules have the real one's names and nothing
of AWS: state, targets and an interrupted run are terraform's own. kubectl and helm are stand-ins.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infra.apply.terraform import Change
from infra.tests.conftest import Aws, RunInfra, WriteValues
from infra.tests.site import EKS, MAIN, SETTINGS, Site, thing, volume_for

REPOSITORY = Path(__file__).parents[2]


def test_up_shows_the_cost_applies_and_writes_the_settings(run_infra: RunInfra, site: Site) -> None:
    done = run_infra("up")

    assert done.stdout.index("a run of 111 hours") < done.stdout.index("in us-west-2? yes (YES=1)")
    assert "terraform would create 3, change 0, replace 0 and destroy 0" in done.stdout
    text = (site.overlay / "settings.env").read_text(encoding="utf-8")
    assert text.startswith("# A comment that stays.\nREGION=us-west-2\nFSX_ID=fs-0123456789\n")
    assert "REGISTRY=123456789012.dkr.ecr.us-west-2.amazonaws.com\n" in text
    assert "TRAINIUM_MAX_NODES=4\n" in text
    assert text.endswith("CAPACITY_ENDS_AT=\n")

    again = run_infra("up")

    assert "create 0, change 0, replace 0 and destroy 0" in again.stdout
    assert "YES=1" not in again.stdout


def test_up_makes_nothing_unless_somebody_says_yes(
    run_infra: RunInfra, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("YES")

    done = run_infra("up", exit_code=2)

    assert "YES=1" in done.stderr
    assert not (site.stack / "terraform.tfstate").exists()
    assert (site.overlay / "settings.env").read_text(encoding="utf-8") == SETTINGS


def test_up_loses_no_data_whoever_says_yes(
    run_infra: RunInfra, site: Site, write_values: WriteValues, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another zone replaces the file system, which holds the only copy of its content."""
    monkeypatch.setattr("infra.apply.terraform.DATA", ("terraform_data",))
    run_infra("up")
    before = (site.stack / "terraform.tfstate").read_text(encoding="utf-8")
    write_values('zone_id = "usw2-az1"')

    done = run_infra("up", exit_code=4)

    assert "replace module.storage.terraform_data.bucket" in done.stdout
    assert "destroy module.storage.terraform_data.bucket" in done.stderr
    assert "YES=1" not in done.stdout
    assert (site.stack / "terraform.tfstate").read_text(encoding="utf-8") == before


def test_what_can_be_made_again_is_no_loss_of_data() -> None:
    data = (
        "module.storage.aws_fsx_lustre_file_system.this[0]",
        "module.storage.aws_s3_bucket.this",
        'module.registry[0].aws_ecr_repository.this["a.b"]',
        "module.storage.aws_kms_key.this",
    )
    assert all(
        Change(each, actions).is_loss_of_data for each in data for actions in (("delete",), ("delete", "create"))
    )
    assert not any(Change(each, ("update",)).is_loss_of_data for each in data)
    assert not Change("module.eks.aws_eks_cluster.this", ("delete",)).is_loss_of_data


@pytest.mark.parametrize("command", ["plan", "up"])
def test_a_budget_that_standing_alone_spends_is_refused(
    run_infra: RunInfra, site: Site, write_values: WriteValues, command: str
) -> None:
    write_values("budget = { monthly_dollars = 900 }")

    done = run_infra(command, exit_code=2)

    assert re.search(r"budget\.monthly_dollars = 900, .* \$950\.17 a month", done.stderr)
    assert not (site.stack / "terraform.tfstate").exists()


@pytest.mark.parametrize(("signum", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_stop_signal_during_an_apply_lets_terraform_write_its_state(
    run_infra: RunInfra, site: Site, tmp_path: Path, signum: signal.Signals, exit_code: int
) -> None:
    """As it lets helm roll back: a killed one would leave a release that no later upgrade may touch."""
    slow = tmp_path / "slow"
    slow.touch()
    process = subprocess.Popen(
        [sys.executable, "-m", "infra", "up"],
        cwd=REPOSITORY,
        env=os.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not slow.read_text(encoding="utf-8"):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signum)
    process.communicate(timeout=120)

    assert process.returncode == exit_code
    assert "module.storage.terraform_data.bucket" in site.addresses
    assert (site.overlay / "settings.env").read_text(encoding="utf-8") == SETTINGS
    slow.unlink()
    run_infra("up")
    assert site.settings["FSX_ID"] == "fs-0123456789"


def test_down_keeps_the_data_and_its_network_unless_it_is_told_otherwise(
    run_infra: RunInfra, cluster: Site, aws: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_infra("up")
    cluster.programs.forget_calls()

    run_infra("down")

    assert aws.node_group_sizes() == {"core": 2, "trainium": 0}
    assert cluster.addresses == ["module.network.terraform_data.subnet", "module.storage.terraform_data.bucket"]
    assert [line.split()[2] for line in cluster.programs.calls if line.startswith("helm uninstall")] == [
        *("monitoring", "efa", "neuron", "volcano", "kuberay"),
    ]
    assert cluster.settings["FSX_ID"] == "fs-0123456789"

    run_infra("up")
    assert "module.eks.terraform_data.cluster" in cluster.addresses

    monkeypatch.setenv("KEEP_DATA", "false")
    run_infra("down")

    assert cluster.addresses == []
    text = (cluster.overlay / "settings.env").read_text(encoding="utf-8")
    assert "REGION=CHANGE-ME\nFSX_ID=CHANGE-ME\nTRAINIUM_SHAPE=trn1.32xlarge\n" in text

    run_infra("down", exit_code=4)  # this cluster is none of terraform's, which knows no other


def test_down_takes_back_what_the_budget_attached_before_it_destroys(run_infra: RunInfra, site: Site, aws: Aws) -> None:
    """IAM deletes no policy that is attached, and terraform knows nothing of what the budget's action did."""
    iam = aws.client("iam")
    denial = {"Effect": "Deny", "Action": "eks:UpdateNodegroupConfig", "Resource": "*"}
    document = json.dumps({"Version": "2012-10-17", "Statement": [denial]})
    arns = {
        name: iam.create_policy(PolicyName=name, PolicyDocument=document)["Policy"]["Arn"]
        for name in ("millrace-us-west-2-over-budget", "another-us-west-2-over-budget")
    }
    for name in ("research", "millrace-us-west-2-deployer"):
        iam.create_role(RoleName=name, AssumeRolePolicyDocument=document)
        for arn in arns.values():
            iam.attach_role_policy(RoleName=name, PolicyArn=arn)
    run_infra("up")

    done = run_infra("down")

    assert re.search("policy +millrace-us-west-2-over-budget .* role research", done.stdout)
    iam.delete_policy(PolicyArn=arns["millrace-us-west-2-over-budget"])
    left = iam.list_attached_role_policies(RoleName="research")["AttachedPolicies"]
    assert [each["PolicyName"] for each in left] == ["another-us-west-2-over-budget"]


def test_another_cluster_is_never_touched(run_infra: RunInfra, cluster: Site, aws: Aws) -> None:
    cluster.answer("https://production.example.com")

    run_infra("up")
    done = run_infra("down", exit_code=4)

    assert "kubectl talks to https://production.example.com, and millrace is at" in done.stderr
    assert aws.node_group_sizes() == {"core": 2, "trainium": 2}
    assert [line for line in cluster.programs.calls if "delete" in line or "helm uninstall" in line] == []


@pytest.mark.slow
@pytest.mark.parametrize("ending", [4, 75])
def test_a_stage_that_cannot_be_stopped_keeps_its_nodes(
    run_infra: RunInfra, cluster: Site, aws: Aws, monkeypatch: pytest.MonkeyPatch, ending: int
) -> None:
    """The deploy tool finds no cluster here, or the stage needs more time: infra-down ends as that tool did."""
    (cluster.folder / "kinds.txt").write_text("rayclusters.ray.io\n", encoding="utf-8")
    cluster.put("rayclusters.ray.io", thing("RayCluster", "millrace", "millrace"))
    cluster.put("namespaces", thing("Namespace", "millrace"))
    monkeypatch.setenv("KUBECONFIG", str(cluster.folder / "absent"))

    run_infra("up")
    if ending == 75:
        cluster.programs.add("python", "exit 75")
        monkeypatch.setattr(sys, "executable", shutil.which("python"))
    done = run_infra("down", exit_code=ending)

    assert f"make stop-stage STAGE=tokenizer TARGET=kuberay ended with {ending}; " in done.stderr
    assert aws.node_group_sizes() == {"core": 2, "trainium": 2}


@pytest.mark.slow
def test_down_waits_for_volumes_and_goes_on_where_it_was_cut(
    run_infra: RunInfra, cluster: Site, aws: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim's volume is there until its driver has deleted it; nothing after it happens before that.

    The pods of add-ons, which hold claims, are gone before. A volume whose claim and namespace are gone, because its
    reclaim policy is Retain, is not waited for.
    """
    monkeypatch.setattr("infra.workloads.cluster_workloads.OBJECTS_SECONDS", 0.0)
    cluster.put(
        "services",
        thing("Service", "a-service", "millrace", type="LoadBalancer"),
        thing("Service", "inside", "millrace", type="ClusterIP"),
    )
    cluster.put(
        "persistentvolumeclaims",
        thing("PersistentVolumeClaim", "scratch", "millrace", storageClassName="gp3"),
        thing("PersistentVolumeClaim", "fsx", "millrace", storageClassName=""),
    )
    ec2 = aws.client("ec2")
    volume, kept = (
        ec2.create_volume(AvailabilityZone="us-west-2a", Size=50, TagSpecifications=volume_for(claim))["VolumeId"]
        for claim in ("millrace/scratch", "gone/notes")
    )

    run_infra("up")
    done = run_infra("down", exit_code=75)

    assert f"volumes and load balancers are not gone after 0 s: {volume}" in done.stderr
    assert kept not in done.stderr
    changes = [line for line in cluster.programs.calls if " delete " in line or "helm uninstall" in line]
    assert [line.split()[4:6] for line in changes[-2:]] == [
        ["service", "a-service"],
        ["persistentvolumeclaim", "scratch"],
    ]
    assert "helm uninstall monitoring" in "\n".join(changes[:-2])
    assert aws.node_group_sizes() == {"core": 2, "trainium": 0}

    ec2.delete_volume(VolumeId=volume)
    assert kept in run_infra("down").stdout.rpartition("resources of millrace in")[2]


@pytest.mark.slow
def test_data_that_stands_on_what_goes_is_not_destroyed(
    run_infra: RunInfra, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should somebody ever let the storage depend on the cluster."""
    (site.stack / "main.tf").write_text(
        MAIN.replace("subnet    = module.network.subnet", "subnet    = module.eks.cluster").replace(
            "bucket = module.storage.bucket", "bucket = module.network.subnet"
        ),
        encoding="utf-8",
    )
    (site.stack / "eks/main.tf").write_text(
        EKS + 'output "cluster" { value = terraform_data.cluster.id }\n', encoding="utf-8"
    )
    monkeypatch.setattr("infra.apply.terraform.DATA", ("terraform_data",))
    run_infra("up")
    before = site.addresses

    done = run_infra("down", exit_code=4)

    assert "module.storage.terraform_data.bucket" in done.stderr
    assert site.addresses == before
