"""infra-up, infra-leftovers and infra-down with STACK=batch: the real terraform on a small stack whose modules have the
real one's names and nothing of AWS, and queues, jobs and definitions in moto.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infra.account.session import STACK_TAG
from infra.teardown.sequence import list_targets_around_data
from infra.tests.conftest import REGION, Aws, RunInfra
from infra.tests.moto_batch import keep_jobs_still, make_queue, submit_job
from infra.tests.programs import Programs
from infra.workloads import batch_workloads

REGISTRY = f"123456789012.dkr.ecr.{REGION}.amazonaws.com"
VARIABLES = {
    "region": f'"{REGION}"',
    "name": '"millrace"',
    "zone_id": '"usw2-az4"',
    "trainium": '{ shape = "trn1.32xlarge", max_nodes = 4 }',
    "cpu_nodes": '{ shape = "m7i.8xlarge", max_nodes = 2 }',
    "fsx": "{ gib = 1200, throughput = 250 }",
    "budget": "{}",
    "keep_data": "true",
}
MAIN = f"""
resource "terraform_data" "given" {{}}
module "network" {{
  source = "./plain"
  count  = 1
}}
module "storage" {{
  source = "./plain"
  input  = module.network[0].id
}}
module "batch" {{
  source = "./plain"
  input  = module.storage.id
}}
output "config" {{ value = "REGION={REGION}\\nNAME=millrace\\nECR_REPO={REGISTRY}/millrace\\n" }}
output "bucket" {{ value = "millrace-123456789012" }}
"""
PLAIN = """
variable "input" { default = null }
resource "terraform_data" "this" { input = var.input }
output "id" { value = terraform_data.this.id }
"""


class Site:
    """A stack that is not applied yet, and where `config.txt` will be."""

    def __init__(self, folder: Path) -> None:
        self.stack, self.config = folder / "stacks/batch", folder / "config.txt"
        (self.stack / "plain").mkdir(parents=True)
        declared = [f'variable "{name}" {{ default = {default} }}' for name, default in VARIABLES.items()]
        (self.stack / "variables.tf").write_text("\n".join(declared), encoding="utf-8")
        (self.stack / "main.tf").write_text(MAIN, encoding="utf-8")
        (self.stack / "plain/main.tf").write_text(PLAIN, encoding="utf-8")

    @property
    def modules(self) -> list[str]:
        """The modules with resources in terraform's state."""
        state = json.loads((self.stack / "terraform.tfstate").read_text(encoding="utf-8"))
        return sorted(each.get("module", "") for each in state["resources"])


@pytest.fixture
def site(tmp_path: Path, programs: Programs, aws: Aws, monkeypatch: pytest.MonkeyPatch) -> Site:
    programs.add_real("terraform")
    keep_jobs_still(monkeypatch)
    monkeypatch.setattr("infra.account.polling.POLL_SECONDS", 0.0)
    monkeypatch.delenv("TF_CLI_CONFIG_FILE", raising=False)
    site = Site(tmp_path)
    for name, value in (("STACK", str(site.stack)), ("CONFIG", str(site.config)), ("YES", "1")):
        monkeypatch.setenv(name, value)
    return site


def state_of(aws: Aws, queue: str) -> str:
    return str(aws.client("batch").describe_job_queues(jobQueues=[queue])["jobQueues"][0]["state"])


def status_of(aws: Aws, job_id: str) -> str:
    return str(aws.client("batch").describe_jobs(jobs=[job_id])["jobs"][0]["status"])


def test_up_writes_what_deployments_read(run_infra: RunInfra, site: Site) -> None:
    done = run_infra("up")

    assert site.config.read_text(encoding="utf-8") == f"REGION={REGION}\nNAME=millrace\nECR_REPO={REGISTRY}/millrace\n"
    assert f"--password-stdin {REGISTRY}\n" in done.stdout
    assert "make deploy-stage STAGE=tokenizer TARGET=batch" in done.stdout


def test_down_ends_jobs_first_and_keeps_the_data_unless_it_is_told_otherwise(
    run_infra: RunInfra, site: Site, aws: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, stack in (("millrace-trainium", "millrace"), ("millrace-cpu", "millrace"), ("other-cpu", "other")):
        make_queue(aws.client, name, stack=stack)
    job = submit_job(aws.client, "millrace-trainium", "millrace-trainer")
    another = submit_job(aws.client, "other-cpu", "other-trainer")
    run_infra("up")

    done = run_infra("down")

    queue, _ = [line for line in done.stdout.splitlines() if line.split()[:3] == ["job", "queue", "millrace-trainium"]]
    assert queue.endswith("jobs that have not ended: 1")
    assert f"stopping    millrace-trainer-a, {job}" in done.stdout
    assert done.stdout.index("stopping") < done.stdout.index("jobs        0 in") < done.stdout.index("kept  ")
    assert (status_of(aws, job), status_of(aws, another)) == ("FAILED", "SUBMITTED")
    assert [state_of(aws, name) for name in ("millrace-trainium", "millrace-cpu", "other-cpu")] == [
        "DISABLED",
        "DISABLED",
        "ENABLED",
    ]
    assert site.modules == ["module.network[0]", "module.storage"]
    assert site.config.exists()

    run_infra("up")
    monkeypatch.setenv("KEEP_DATA", "false")
    done = run_infra("down")

    assert site.modules == []
    assert "deregister  millrace-trainer:1" in done.stdout
    definitions = aws.client("batch").describe_job_definitions(status="ACTIVE")["jobDefinitions"]
    assert [each["jobDefinitionName"] for each in definitions] == ["other-trainer"]
    assert not site.config.exists()


def test_there_is_no_cluster_to_keep(run_infra: RunInfra, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEP_CLUSTER", "true")

    done = run_infra("down", exit_code=2)

    assert "KEEP_CLUSTER=true" in done.stderr


@pytest.mark.slow
def test_down_takes_down_nothing_while_a_job_has_not_ended(
    run_infra: RunInfra, site: Site, aws: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is a trainer that commits its checkpoint."""
    monkeypatch.setattr("infra.workloads.batch_workloads.JOBS_SECONDS", 0.0)
    monkeypatch.setattr("infra.workloads.batch_workloads.AFTER_NOTICE_SECONDS", 0.0)
    make_queue(aws.client, "millrace-trainium")
    job = submit_job(aws.client, "millrace-trainium", "millrace-trainer")
    run_infra("up")
    before = site.modules
    with monkeypatch.context() as patch:
        patch.setattr("moto.batch.models.Job.terminate", lambda job, reason: None)
        done = run_infra("down", exit_code=75)

    assert f"after 0 s: {job}" in done.stderr
    assert site.modules == before
    run_infra("down")


def test_jobs_get_their_whole_notice_before_infra_down_gives_up(
    run_infra: RunInfra, site: Site, aws: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of 4.7 TB takes hours on a slow file system."""
    main = site.stack / "main.tf"
    main.write_text(main.read_text(encoding="utf-8").replace("NAME=", "NOTICE_SECONDS=20000\\nNAME="), encoding="utf-8")
    waits = []
    monkeypatch.setattr(batch_workloads, "wait_until_none", lambda what, find, seconds, advice: waits.append(seconds))
    make_queue(aws.client, "millrace-trainium")
    run_infra("up")

    run_infra("down")

    assert waits == [20000 + batch_workloads.AFTER_NOTICE_SECONDS]


def test_another_stacks_config_stays(run_infra: RunInfra, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    run_infra("up")
    site.config.write_text(f"REGION={REGION}\nNAME=another\n", encoding="utf-8")
    monkeypatch.setenv("KEEP_DATA", "false")

    done = run_infra("down")

    assert "gone        the Batch environment of millrace" in done.stdout
    assert site.config.read_text(encoding="utf-8") == f"REGION={REGION}\nNAME=another\n"


def test_leftovers_names_what_batch_has_and_the_nodes_that_it_brought(
    run_infra: RunInfra, site: Site, aws: Aws
) -> None:
    make_queue(aws.client, "millrace-trainium")
    for _ in range(2):
        submit_job(aws.client, "millrace-trainium", "millrace-trainer")
    instance = aws.run_instance("trn1.32xlarge", {STACK_TAG: "millrace"})

    done = run_infra("leftovers")

    lines = [line.split() for line in done.stdout.splitlines()[1:-1]]
    assert ["job", "queue", "millrace-trainium", "$0.00/month", "jobs", "that", "have", "not", "ended:", "2"] in lines
    assert ["compute", "environment", "millrace-trainium", "$0.00/month"] in lines
    assert ["job", "definition", "millrace-trainer", "$0.00/month", "revisions:", "2", "data"] in lines
    assert ["instance", instance, "$15,695.00/month", "trn1.32xlarge,", "running"] in lines
    assert len(lines) == 4, done.stdout


def test_of_a_network_that_is_kept_what_is_paid_by_the_hour_goes() -> None:
    """The modules have an index, because existing networks and registries leave them out."""
    network = [
        "module.network[0].aws_vpc.this",
        "module.network[0].aws_eip.nat",
        "module.network[0].aws_nat_gateway.this",
        'module.network[0].aws_vpc_endpoint.interface["ecr.api"]',
    ]
    others = [
        "terraform_data.given",
        "module.security_groups[0].aws_security_group.fsx",
        'module.registry[0].aws_ecr_repository.this["trainer"]',
        'module.batch.aws_batch_job_queue.pool["cpu"]',
        "module.batch.aws_placement_group.trainium[0]",
    ]
    assert list_targets_around_data([*network, *others]) == ["module.batch", *network[1:], "terraform_data.given"]
