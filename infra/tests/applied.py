"""A stack that is applied to an AWS which runs here: moto with additions (fakeaws.py)."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from infra.account.session import Account
from infra.apply.terraform import Change, Plan, Stack, read_plan
from infra.teardown.sequence import list_targets_around_data

INFRA = Path(__file__).parents[1]
REPOSITORY = INFRA.parent
MIRROR = os.environ.get("TF_PLUGIN_MIRROR", "")
REGION = "us-west-2"
ACCOUNT = "123456789012"  # moto's

APPLIES = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not shutil.which("terraform"), reason="no terraform on PATH"),
    pytest.mark.skipif(not MIRROR, reason="TF_PLUGIN_MIRROR names no folder with the AWS provider"),
]


@dataclass(frozen=True)
class Applied:
    """A copy of the stack, applied to an AWS at `endpoint`."""

    folder: Path
    endpoint: str
    environment: dict[str, str]

    def terraform(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["terraform", f"-chdir={self.folder}", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def run(self, *arguments: str) -> str:
        done = self.terraform(*arguments)
        assert done.returncode == 0, f"terraform {arguments[0]}:\n{done.stdout[-3000:]}{done.stderr}"
        return done.stdout

    def plan(self, *options: str) -> Plan:
        file = self.folder / "plan"
        self.run("plan", "-input=false", f"-out={file}", *options)
        return read_plan(json.loads(self.run("show", "-json", str(file))))

    def plan_resource(self, address: str, *options: str) -> Mapping[str, Any]:
        """The planned values of a resource. moto forgets some values, so that every plan changes it."""
        [found] = [each.after for each in self.plan(*options).changes if each.address == address]
        return found

    def plan_down(self) -> tuple[Change, ...]:
        """Plans the changes with which `infra-down` destroys everything around the data."""
        targets = list_targets_around_data(Stack(self.folder).resources())
        return self.plan("-destroy", *(f"-target={each}" for each in targets)).changes

    def account(self, monkeypatch: pytest.MonkeyPatch) -> Account:
        """The account, as infra's commands reach it."""
        monkeypatch.setenv("AWS_ENDPOINT_URL", self.endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        return Account(REGION)

    def client(self, service: str) -> Any:
        return boto3.client(
            service,
            region_name=REGION,
            endpoint_url=self.endpoint,
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )


def destroy(applied: Applied) -> None:
    """Destroys the stack with a checkpoint in its bucket, which terraform refuses until it is told otherwise."""
    bucket = json.loads(applied.run("output", "-json", "bucket"))
    s3 = applied.client("s3")
    # moto reads no condition of a policy, so that denying what is not encrypted on its way denies everything.
    s3.delete_bucket_policy(Bucket=bucket)
    s3.put_object(Bucket=bucket, Key="checkpoint/run/step-00000100/manifest.json", Body=b"{}")
    # The provider waits for ten minutes after it has deleted a file system, whatever the API says.
    applied.run("state", "rm", "module.storage.aws_fsx_lustre_file_system.this[0]")

    refused = applied.terraform("destroy", "-input=false", "-auto-approve", "-parallelism=20")
    assert refused.returncode == 1
    assert "BucketNotEmpty" in refused.stderr
    assert s3.list_objects_v2(Bucket=bucket)["KeyCount"] == 1

    target = "-target=module.storage.aws_s3_bucket.this"
    applied.run("apply", "-input=false", "-auto-approve", "-var=keep_data=false", target)
    applied.run("destroy", "-input=false", "-auto-approve", "-var=keep_data=false")
    assert applied.run("state", "list") == ""
    with pytest.raises(ClientError, match="Not Found"):
        s3.head_bucket(Bucket=bucket)


def list_left(applied: Applied) -> dict[str, list[Any]]:
    """What a destroyed stack has left in its account, by kind."""
    ec2, roles = applied.client("ec2"), applied.client("iam").list_roles()["Roles"]
    left = {
        "vpcs": [each for each in ec2.describe_vpcs()["Vpcs"] if not each["IsDefault"]],
        "addresses": ec2.describe_addresses()["Addresses"],
        "placement groups": ec2.describe_placement_groups()["PlacementGroups"],
        "templates": ec2.describe_launch_templates()["LaunchTemplates"],
        "clusters": applied.client("eks").list_clusters()["clusters"],
        "queues": applied.client("batch").describe_job_queues()["jobQueues"],
        "environments": applied.client("batch").describe_compute_environments()["computeEnvironments"],
        "repositories": applied.client("ecr").describe_repositories()["repositories"],
        "roles": [each["RoleName"] for each in roles if not each["RoleName"].startswith("AWSServiceRole")],
        "profiles": applied.client("iam").list_instance_profiles()["InstanceProfiles"],
        "log groups": applied.client("logs").describe_log_groups()["logGroups"],
        "topics": applied.client("sns").list_topics()["Topics"],
        "alarms": applied.client("cloudwatch").describe_alarms()["MetricAlarms"],
        "budgets": applied.client("budgets").describe_budgets(AccountId=ACCOUNT)["Budgets"],
    }
    return {name: found for name, found in left.items() if found}


@contextmanager
def simulated_aws(folder: Path) -> Iterator[str]:
    """The endpoint of an empty account, which ends with the block. Its log goes into `folder`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "log"
    with log.open("w") as output:
        command = [sys.executable, "-m", "infra.tests.fakeaws", str(port)]
        server = subprocess.Popen(command, cwd=REPOSITORY, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 120
        while server.poll() is None and time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        else:
            pytest.fail(f"the simulated AWS did not start:\n{log.read_text()[-3000:]}")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def apply_stack(name: str, variables: Mapping[str, Any], endpoint: str, place: Path) -> Applied:
    """A copy of `stacks/<name>` in `place`, applied with these variables."""
    copy = place / "infra"
    without_state = shutil.ignore_patterns(".terraform", "*.tfstate*", "*.tfvars")
    for part in ("modules", "stacks", "userdata"):
        shutil.copytree(INFRA / part, copy / part, ignore=without_state)
    for table in ("shapes.json", "aws_releases.json"):
        shutil.copy2(INFRA / table, copy)
    config = copy / "terraform.rc"
    config.write_text(f"provider_installation {{\n  filesystem_mirror {{\n    path = {json.dumps(MIRROR)}\n  }}\n}}\n")
    folder = copy / "stacks" / name
    (folder / "terraform.tfvars.json").write_text(json.dumps({**variables, "aws_endpoint": endpoint}))
    stack = Applied(folder, endpoint, os.environ | {"TF_CLI_CONFIG_FILE": str(config)})
    stack.run("init", "-input=false")
    stack.run("apply", "-input=false", "-auto-approve", "-parallelism=20")
    return stack
