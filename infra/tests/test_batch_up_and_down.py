"""infra-up, infra-leftovers and infra-down with STACK=batch: the real terraform on a small stack whose modules have the
real one's names and nothing of AWS, and queues, jobs and definitions in moto.
"""

from __future__ import annotations

import pytest

from infra.account.session import STACK_TAG
from infra.teardown.sequence import list_targets_around_data
from infra.tests.conftest import REGION, Aws, MakeSite, RunInfra
from infra.tests.moto_batch import keep_jobs_still, make_queue, submit_job
from infra.tests.site import BATCH_CONFIG, BATCH_STACK, Site


@pytest.fixture
def site(make_site: MakeSite, monkeypatch: pytest.MonkeyPatch) -> Site:
    keep_jobs_still(monkeypatch)
    site = make_site(BATCH_STACK)
    monkeypatch.setenv("CONFIG", str(site.config))
    return site


def status_of(aws: Aws, job_id: str) -> str:
    return str(aws.client("batch").describe_jobs(jobs=[job_id])["jobs"][0]["status"])


def test_down_ends_jobs_first_and_keeps_the_data_unless_it_is_told_otherwise(
    run_infra: RunInfra, site: Site, aws: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, stack in (("millrace-trainium", "millrace"), ("millrace-cpu", "millrace"), ("other-cpu", "other")):
        make_queue(aws.client, name, stack=stack)
    job = submit_job(aws.client, "millrace-trainium", "millrace-trainer")
    another = submit_job(aws.client, "other-cpu", "other-trainer")
    run_infra("up")
    assert site.config.read_text(encoding="utf-8") == BATCH_CONFIG

    done = run_infra("down")

    queue, _ = [line for line in done.stdout.splitlines() if line.split()[:3] == ["job", "queue", "millrace-trainium"]]
    assert queue.endswith("jobs that have not ended: 1")
    assert f"stopping    millrace-trainer-a, {job}" in done.stdout
    assert done.stdout.index("stopping") < done.stdout.index("jobs        0 in") < done.stdout.index("kept  ")
    assert (status_of(aws, job), status_of(aws, another)) == ("FAILED", "SUBMITTED")
    queues = {each["jobQueueName"]: each["state"] for each in aws.client("batch").describe_job_queues()["jobQueues"]}
    assert queues == {"millrace-trainium": "DISABLED", "millrace-cpu": "DISABLED", "other-cpu": "ENABLED"}
    assert site.addresses == ["module.network[0].terraform_data.subnet", "module.storage.terraform_data.bucket"]
    assert site.config.exists()

    run_infra("up")
    monkeypatch.setenv("KEEP_DATA", "false")
    done = run_infra("down")

    assert site.addresses == []
    assert "deregister  millrace-trainer:1" in done.stdout
    definitions = aws.client("batch").describe_job_definitions(status="ACTIVE")["jobDefinitions"]
    assert [each["jobDefinitionName"] for each in definitions] == ["other-trainer"]
    assert not site.config.exists()


@pytest.mark.slow
def test_down_takes_down_nothing_while_a_job_has_not_ended(
    run_infra: RunInfra, site: Site, aws: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is a trainer that commits its checkpoint."""
    monkeypatch.setattr("infra.workloads.batch_workloads.JOBS_SECONDS", 0.0)
    make_queue(aws.client, "millrace-trainium")
    job = submit_job(aws.client, "millrace-trainium", "millrace-trainer")
    run_infra("up")
    before = site.addresses
    with monkeypatch.context() as patch:
        patch.setattr("moto.batch.models.Job.terminate", lambda job, reason: None)
        done = run_infra("down", exit_code=75)

    assert f"after 0 s: {job}" in done.stderr
    assert site.addresses == before
    run_infra("down")


def test_another_stacks_config_stays(run_infra: RunInfra, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    run_infra("up")
    site.config.write_text(f"REGION={REGION}\nNAME=another\n", encoding="utf-8")
    monkeypatch.setenv("KEEP_DATA", "false")

    run_infra("down")

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
    assert ["job", "definition", "millrace-trainer", "$0.00/month", "revisions:", "2", "data"] in lines
    assert ["instance", instance, "$15,695.00/month", "trn1.32xlarge,", "running"] in lines
    assert len(lines) == 3, done.stdout


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
