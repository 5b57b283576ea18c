"""Stages on AWS Batch by the commands that deploy on KubeRay, with the same words and exit codes.

botocore, which moto stands behind, refuses a request that Batch's own model does not have.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from deploy.batch.batch_target import BatchTarget
from deploy.batch.config import read_config
from deploy.batch.resolved_job import find_image, resolve_job
from images.versions import Build
from services.common.errors import DeviceError, RecipeError
from services.common.recipe.schema import STAGES
from tests.deploy.batch.builders import config_of, write_config
from tests.deploy.batch.cloud import TAG, Cloud, ask


@pytest.mark.parametrize(
    ("status", "code", "expected", "are_attempts_the_main_nodes"),
    [("SUCCEEDED", 0, 0, True), ("FAILED", 3, 3, False), ("FAILED", 75, 75, True), ("FAILED", None, 75, False)],
)
def test_a_stage_is_followed_to_its_end_and_its_exit_code_is_told(
    cloud: Cloud,
    capsys: pytest.CaptureFixture[str],
    status: str,
    code: int | None,
    expected: int,
    are_attempts_the_main_nodes: bool,
) -> None:
    cloud.are_attempts_the_main_nodes = are_attempts_the_main_nodes
    cloud.while_waiting(
        lambda: cloud.move("RUNNABLE", reason="MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT"),
        lambda: cloud.move("RUNNING", said="step 1"),
        lambda: cloud.move(status, code, said="millrace: the corpus is not there"),
    )
    assert cloud.target.deploy(ask(), None) == expected
    said = capsys.readouterr().out
    for shown in ("$516.00", "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT", "step 1\n", f"exit code {expected}"):
        assert shown in said
    [job] = cloud.submitted
    assert (job["jobQueue"], job["dependsOn"]) == ("millrace-trainium", [])
    assert job["jobDefinition"].endswith("job-definition/millrace-trainer:1")


def test_a_stage_that_succeeded_is_not_run_again(cloud: Cloud) -> None:
    cloud.while_waiting(lambda: cloud.move("SUCCEEDED", 0), lambda: cloud.move("SUCCEEDED", 0))
    assert cloud.target.deploy(ask(), None) == 0
    assert cloud.target.deploy(ask(), None) == 0
    assert len(cloud.submitted) == 1
    assert cloud.target.deploy(ask(is_again=True), None) == 0
    assert [each["jobDefinition"][-2:] for each in cloud.submitted] == [":1", ":1"]


def test_an_identical_deployment_that_runs_is_followed_and_another_is_refused(cloud: Cloud) -> None:
    assert cloud.target.deploy(ask(is_followed=False), None) == 0
    with pytest.raises(DeviceError, match=r"trainer runs as job .*make stop-stage"):
        cloud.target.deploy(ask(arguments=("--train.max_steps=9",)), None)
    cloud.while_waiting(lambda: cloud.move("SUCCEEDED", 0))
    assert cloud.target.deploy(ask(), None) == 0
    assert len(cloud.submitted) == 1


def test_a_dry_run_shows_cost_and_definition_and_changes_nothing(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud.while_waiting(lambda: cloud.move("SUCCEEDED", 0))
    cloud.target.deploy(ask(), None)
    capsys.readouterr()
    assert cloud.target.deploy(ask(arguments=("--train.max_steps=9",), hours=2.0, is_dry_run=True), None) == 0
    said = capsys.readouterr().out
    assert "$43.00" in said
    assert "--train.max_steps=9" in said
    assert (len(cloud.submitted), len(cloud.jobs.definitions("trainer"))) == (1, 1)
    file = io.StringIO()
    cloud.target.deploy(ask(is_dry_run=True, arguments=("--train.max_steps=9",)), file)
    assert json.loads(file.getvalue().removeprefix("---\n"))["jobDefinitionName"] == "millrace-trainer"


def test_a_stop_lets_the_job_end(cloud: Cloud) -> None:
    cloud.target.deploy(ask(is_followed=False), None)
    cloud.move("RUNNING")
    cloud.while_waiting(lambda: None)
    assert cloud.target.stop("trainer") == 0
    [job] = cloud.jobs.find_all("trainer")
    assert (job.status, job.exit_code) == ("FAILED", 75)
    assert "make stop-stage" in job.reason
    assert cloud.target.stop("trainer") == 0


def test_a_rollback_takes_the_image_before_that_succeeded(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    cloud.while_waiting(
        lambda: cloud.move("SUCCEEDED", 0), lambda: cloud.move("FAILED", 1), lambda: cloud.move("SUCCEEDED", 0)
    )
    bad = cloud.push("trainer", "0.1.1-gdef-neuron")
    good = cloud.jobs.resolve_image("trainer", TAG)
    assert cloud.target.deploy(ask(), None) == 0
    with pytest.raises(DeviceError, match=r"no earlier image of trainer .*TAG="):
        cloud.target.roll_back(ask(tag=""), None)
    assert cloud.target.deploy(ask(tag="0.1.1-gdef-neuron", arguments=("--train.max_steps=9",)), None) == 1
    assert cloud.target.roll_back(ask(tag="", recipe=None), None) == 0
    assert f"{bad} -> " in capsys.readouterr().out
    body = json.dumps(cloud.jobs.definitions("trainer")[0].body)
    assert good in body
    assert "--train.max_steps=9" in body, "but for the image it is what ran last"


@pytest.fixture
def working_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the working tree's build the one whose images were pushed."""
    build = Build("any", "neuron", "0.1.0", "abc", "")
    assert build.commit_tag == TAG
    monkeypatch.setattr("deploy.batch.resolved_job.describe_build", lambda stage, variant: build)


@pytest.mark.usefixtures("working_tree")
def test_a_pipeline_waits_in_batch_and_stops_at_the_first_that_fails(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud.while_waiting(
        lambda: cloud.move("SUCCEEDED", 0, stage="tokenizer"),
        lambda: cloud.move("FAILED", 4, stage="compiler", said="millrace: no device"),
    )
    assert cloud.target.run_pipeline(ask(tag="", repetition="make pipeline TARGET=batch"), None) == 4
    ids = [job.id for stage in STAGES for job in cloud.jobs.find_all(stage)]
    assert [each["dependsOn"] for each in cloud.submitted] == [[], [{"jobId": ids[0]}], [{"jobId": ids[1]}]]
    assert [each["jobQueue"] for each in cloud.submitted] == ["millrace-cpu", "millrace-cpu", "millrace-trainium"]
    cloud.move("FAILED", reason="Dependent Job failed", stage="trainer")
    cloud.while_waiting(
        lambda: cloud.move("SUCCEEDED", 0, stage="compiler"), lambda: cloud.move("SUCCEEDED", 0, stage="trainer")
    )
    assert cloud.target.run_pipeline(ask(tag=""), None) == 0
    assert len(cloud.submitted) == 5, "the tokenizer had succeeded"
    assert "make pipeline TARGET=batch" in capsys.readouterr().err


@pytest.mark.usefixtures("working_tree")
def test_a_pipeline_whose_last_stage_cannot_be_submits_none(cloud: Cloud) -> None:
    arguments = ("--cluster.trainer_instance_type=trn1n.32xlarge",)
    with pytest.raises(DeviceError, match="trn1n"):
        cloud.target.run_pipeline(ask(tag="", arguments=arguments), None)
    assert cloud.submitted == []


TYPE = "--cluster.trainer_instance_type"
LARGE = (
    *("--model.hidden_size=8192", "--model.intermediate_size=28672"),
    *("--model.num_attention_heads=64", "--model.num_hidden_layers=80"),
)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"nodes": 9}, "NODES=9"),
        ({"tag": "absent"}, "make images STAGE=trainer"),
        ({"arguments": (f"{TYPE}=trn1n.32xlarge",)}, "trn1n.32xlarge"),
        ({"arguments": (f"{TYPE}=trn2.48xlarge",)}, "trn2.48xlarge"),
        ({"arguments": ("--cluster.trainer_workers_per_node=64",)}, "trainer_workers_per_node is 64"),
        ({"arguments": LARGE}, "checkpoint_gb = 808"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_sent(cloud: Cloud, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(DeviceError, match=named):
        cloud.target.deploy(ask(**changes), None)
    assert cloud.submitted == []
    assert cloud.jobs.definitions("trainer") == []


@pytest.mark.parametrize("stage", ["tokenizer", "compiler"])
def test_a_stage_on_cpu_nodes_works_for_whatever_nodes_the_recipe_says(cloud: Cloud, stage: str) -> None:
    assert cloud.target.deploy(ask(stage, arguments=(f"{TYPE}=trn2.48xlarge",), is_followed=False), None) == 0


@pytest.mark.parametrize(
    ("hours", "of_recipe", "of_attempt", "of_trainer"),
    [
        (None, None, 86_400, 82_800),
        (2.0, None, 7_200, 5_400),
        (None, 36_000, 39_600, 36_000),
        (8.0, 7_200, 28_800, 7_200),
        (2.0, 36_000, 7_200, 5_400),
    ],
)
def test_a_trainer_commits_a_checkpoint_before_batch_ends_its_attempt_for_good(
    cloud: Cloud, hours: float | None, of_recipe: int | None, of_attempt: int, of_trainer: int
) -> None:
    arguments = (f"--train.time_limit_seconds={of_recipe}",) if of_recipe else ()
    found = resolve_job(cloud.config, cloud.jobs, ask(arguments=arguments, hours=hours))
    assert found.spec.recipe
    assert (found.spec.attempt_seconds, found.spec.recipe.outline.train.time_limit_seconds) == (of_attempt, of_trainer)
    tokenizer = resolve_job(cloud.config, cloud.jobs, ask("tokenizer", hours=hours)).spec.recipe
    assert tokenizer
    assert tokenizer.arguments == ()


@pytest.mark.parametrize(("shape", "variant"), [("trn1.32xlarge", "neuron"), ("trn2.48xlarge", "trn2")])
def test_the_images_are_of_the_variant_that_computes_on_the_trainium_nodes(
    cloud: Cloud, shape: str, variant: str
) -> None:
    with pytest.raises(DeviceError, match=f"-{variant}: make images STAGE=tokenizer VARIANT={variant} "):
        find_image(config_of(TRAINIUM_SHAPE=shape), cloud.jobs, "tokenizer", "")


@pytest.mark.parametrize(
    ("end", "said"), [("2026-01-31T12:00:00Z", "2026-01-31T11:20Z"), ("soon", "'soon', .*CAPACITY_ENDS_AT")]
)
def test_after_a_reservation_s_end_no_job_is_sent(cloud: Cloud, end: str, said: str) -> None:
    late = BatchTarget(cloud.config.model_copy(update={"capacity_ends_at": end}), cloud.jobs)
    with pytest.raises(DeviceError, match=said):
        late.deploy(ask(), None)
    assert cloud.submitted == []


def test_a_status_tells_where_each_stage_stands(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    cloud.while_waiting(lambda: cloud.move("FAILED", 3))
    cloud.target.deploy(ask("tokenizer"), None)
    cloud.target.deploy(ask(is_followed=False), None)
    cloud.move("RUNNABLE", reason="CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY")
    capsys.readouterr()
    assert cloud.target.show_status() == 0
    tokenizer, compiler, trainer = capsys.readouterr().out.split("\n\n")[1:]
    assert "  outcome   exit code 3" in tokenizer
    assert "no job that Batch still knows" in compiler
    assert "  now       runnable: CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY" in trainer


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"CPU_QUEUE": ""}, "CPU_QUEUE=: .*make infra-up STACK=batch"),
        ({"TRAINIUM_QUEU": "q"}, "TRAINIUM_QUEU=q: Extra"),
        ({"NAME": '"millrace"'}, "KEY=VALUE"),
        ({"CPU_MAX_NODES": "0"}, "CPU_MAX_NODES=0: "),
        ({"EXECUTION_ROLE": ""}, "HF_TOKEN_SECRET .*EXECUTION_ROLE"),
        ({"EXECUTION_ROLE": "", "HF_TOKEN_SECRET": ""}, "WEBHOOK_SECRET .*EXECUTION_ROLE"),
        ({"WEBHOOK_SECRET": "https://hooks.example.com/services/T0"}, "WEBHOOK_SECRET=.*arn:"),
        ({"CHECKPOINT_GB": "13B"}, "CHECKPOINT_GB=13B: "),
        ({"NOTICE_SECONDS": "-1"}, "NOTICE_SECONDS=-1: "),
    ],
)
def test_a_file_that_cannot_be_is_refused(tmp_path: Path, changes: dict[str, str], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        read_config(write_config(tmp_path / "config.txt", **changes))


def test_a_file_that_is_absent_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"config\.txt"):
        read_config(tmp_path / "config.txt")
