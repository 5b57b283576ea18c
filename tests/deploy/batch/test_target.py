"""Stages on AWS Batch by the commands that deploy on KubeRay, with the same words and exit codes."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.batch.batch_target import BatchTarget
from deploy.batch.resolved_job import DEFAULT_RECIPE, find_image
from images.versions import Build
from services.common.errors import DeviceError, RecipeError
from services.common.recipe.file import RecipeSource, parse_recipe_source
from services.common.recipe.schema import STAGES
from services.common.testing.recipes import recipe_text
from tests.deploy.batch.builders import Ask, config_of
from tests.deploy.batch.cloud import TAG, Cloud
from tests.polling import Script


@pytest.mark.parametrize(
    ("status", "code", "expected"), [("SUCCEEDED", 0, 0), ("FAILED", 3, 3), ("FAILED", 75, 75), ("FAILED", None, 75)]
)
@pytest.mark.parametrize("are_attempts_the_main_nodes", [False, True])
def test_a_stage_is_followed_to_its_end_and_its_exit_code_is_told(
    cloud: Cloud,
    batch: BatchTarget,
    ask: Ask,
    while_waiting: Script,
    capsys: pytest.CaptureFixture[str],
    status: str,
    code: int | None,
    expected: int,
    are_attempts_the_main_nodes: bool,
) -> None:
    cloud.are_attempts_the_main_nodes = are_attempts_the_main_nodes
    while_waiting(
        lambda: cloud.move("RUNNABLE", reason="MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT"),
        lambda: cloud.move("RUNNING", said="step 1"),
        lambda: cloud.move(status, code, said="millrace: the corpus is not there"),
    )
    assert batch.deploy(ask(), None) == expected
    said = capsys.readouterr().out
    assert said.startswith(
        "cost        1 x trn1.32xlarge x $21.50 = $21.50 an hour; an attempt ends after 24 h: $516.00"
    )
    assert "trainer is runnable: MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT" in said
    assert "step 1\n" in said
    assert f"trainer ended with exit code {expected}{': the corpus is not there' if expected else ''}" in said
    [job] = cloud.submitted
    assert (job["jobQueue"], job["dependsOn"]) == ("millrace-trainium", [])
    assert job["jobDefinition"].endswith("job-definition/millrace-trainer:1")


def test_a_container_that_never_started_says_why(
    cloud: Cloud, batch: BatchTarget, ask: Ask, while_waiting: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    not_pulled = "CannotPullContainerError: manifest unknown"
    while_waiting(lambda: cloud.move("FAILED", reason="Task failed to start", container_reason=not_pulled))
    assert batch.deploy(ask(), None) == 75
    assert f"trainer is failed: Task failed to start: {not_pulled}\n" in capsys.readouterr().out
    batch.show_status()
    assert f"outcome   exit code 75: Task failed to start: {not_pulled}\n" in capsys.readouterr().out


def test_a_recipe_s_name_may_have_what_a_job_s_name_may_not(
    cloud: Cloud, batch: BatchTarget, ask: Ask, recipe: Path
) -> None:
    recipe.write_text(recipe_text(name="llama3.1-tiny"))
    assert batch.deploy(ask(is_followed=False), None) == 0
    assert [each["jobName"] for each in cloud.submitted] == ["millrace-trainer-llama3-1-tiny"]
    assert cloud.submitted[0]["tags"]["millrace.dev/run"] == "llama3.1-tiny"


def test_a_stage_that_ended_well_is_not_run_again(
    cloud: Cloud, batch: BatchTarget, ask: Ask, while_waiting: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    while_waiting(lambda: cloud.move("SUCCEEDED", 0), lambda: cloud.move("SUCCEEDED", 0))
    assert batch.deploy(ask(), None) == 0
    capsys.readouterr()
    assert batch.deploy(ask(), None) == 0
    assert "this deployment of trainer ended well, seen at" in capsys.readouterr().out
    assert len(cloud.submitted) == 1
    assert batch.deploy(ask(is_again=True), None) == 0
    assert [each["jobDefinition"][-2:] for each in cloud.submitted] == [":1", ":1"]


def test_what_runs_just_so_is_followed_and_another_is_refused(
    cloud: Cloud, batch: BatchTarget, ask: Ask, while_waiting: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    assert batch.deploy(ask(is_followed=False), None) == 0
    with pytest.raises(DeviceError, match=r"trainer runs as job .*make stop-stage"):
        batch.deploy(ask(arguments=("--train.max_steps=9",)), None)
    while_waiting(lambda: cloud.move("SUCCEEDED", 0))
    assert batch.deploy(ask(), None) == 0
    assert "already runs this deployment" in capsys.readouterr().out
    assert len(cloud.submitted) == 1


def test_a_dry_run_shows_cost_definition_and_what_is_new_and_changes_nothing(
    cloud: Cloud, batch: BatchTarget, ask: Ask, while_waiting: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    while_waiting(lambda: cloud.move("SUCCEEDED", 0))
    batch.deploy(ask(), None)
    capsys.readouterr()
    assert batch.deploy(ask(arguments=("--train.max_steps=9",), hours=2.0, is_dry_run=True), None) == 0
    said = capsys.readouterr().out
    assert "an attempt ends after 2 h: $43.00 at most (us-east-1, 2026-06: a third party's list" in said
    assert "definition  millrace-trainer, as revision 1 except for\n" in said
    assert "--train.max_steps=9" in said
    assert "timeout.attemptDurationSeconds: 86400 -> 7200" in said
    assert said.endswith("DRY_RUN=1: nothing was changed\n")
    assert (len(cloud.submitted), len(cloud.jobs.definitions("trainer"))) == (1, 1)
    file = io.StringIO()
    batch.deploy(ask(is_dry_run=True, arguments=("--train.max_steps=9",)), file)
    assert json.loads(file.getvalue().removeprefix("---\n"))["jobDefinitionName"] == "millrace-trainer"


def test_a_stop_lets_the_job_end(
    cloud: Cloud, batch: BatchTarget, ask: Ask, while_waiting: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    batch.deploy(ask(is_followed=False), None)
    cloud.move("RUNNING")
    while_waiting(lambda: None)
    assert batch.stop("trainer") == 0
    assert "its main node gets SIGTERM" in capsys.readouterr().out
    [job] = cloud.jobs.find_all("trainer")
    assert (job.status, job.exit_code) == ("FAILED", 75)
    assert "make stop-stage" in job.reason
    assert batch.stop("trainer") == 0


def test_a_rollback_takes_the_image_before_that_ended_well(
    cloud: Cloud, batch: BatchTarget, ask: Ask, while_waiting: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    while_waiting(
        lambda: cloud.move("SUCCEEDED", 0), lambda: cloud.move("FAILED", 1), lambda: cloud.move("SUCCEEDED", 0)
    )
    bad = cloud.push("trainer", "0.1.1-gdef-neuron")
    good = cloud.jobs.resolve_image("trainer", TAG)
    assert batch.deploy(ask(), None) == 0
    with pytest.raises(DeviceError, match=r"no earlier image of trainer .*TAG="):
        batch.roll_back(ask(tag=""), None)
    assert batch.deploy(ask(tag="0.1.1-gdef-neuron", arguments=("--train.max_steps=9",)), None) == 1
    assert batch.roll_back(ask(tag="", recipe=None), None) == 0
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
    cloud: Cloud, batch: BatchTarget, ask: Ask, while_waiting: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    while_waiting(
        lambda: cloud.move("SUCCEEDED", 0, stage="tokenizer"),
        lambda: cloud.move("FAILED", 4, stage="compiler", said="millrace: no device"),
    )
    assert batch.run_pipeline(ask(tag="", repetition="make pipeline TARGET=batch"), None) == 4
    ids = [job.id for stage in STAGES for job in cloud.jobs.find_all(stage)]
    assert [each["dependsOn"] for each in cloud.submitted] == [[], [{"jobId": ids[0]}], [{"jobId": ids[1]}]]
    assert [each["jobQueue"] for each in cloud.submitted] == ["millrace-cpu", "millrace-cpu", "millrace-trainium"]
    cloud.move("FAILED", reason="Dependent Job failed", stage="trainer")
    while_waiting(
        lambda: cloud.move("SUCCEEDED", 0, stage="compiler"), lambda: cloud.move("SUCCEEDED", 0, stage="trainer")
    )
    assert batch.run_pipeline(ask(tag=""), None) == 0
    assert len(cloud.submitted) == 5, "the tokenizer had ended well"
    said = capsys.readouterr()
    assert "pipeline: compiler: failed, exit code 4" in said.out
    assert "pipeline: tokenizer: skipped, this deployment ended well" in said.out
    assert "pipeline: trainer: published" in said.out
    assert "make pipeline TARGET=batch" in said.err


@pytest.mark.usefixtures("working_tree")
def test_a_pipeline_parses_its_recipe_once(batch: BatchTarget, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []

    def parse(content: bytes, origin: str) -> RecipeSource:
        parsed.append(origin)
        return parse_recipe_source(content, origin)

    request = ask(tag="", recipe=None, is_dry_run=True)
    monkeypatch.setattr("services.common.recipe.file.parse_recipe_source", parse)
    assert batch.run_pipeline(request, None) == 0
    assert parsed == [str(DEFAULT_RECIPE)]


@pytest.mark.usefixtures("working_tree")
def test_a_pipeline_whose_last_stage_cannot_be_submits_none(cloud: Cloud, batch: BatchTarget, ask: Ask) -> None:
    arguments = ("--cluster.trainer_instance_type=trn1n.32xlarge",)
    with pytest.raises(DeviceError, match="trn1n"):
        batch.run_pipeline(ask(tag="", arguments=arguments), None)
    assert cloud.submitted == []


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"nodes": 9}, DeviceError, "NODES=9, .*queue millrace-trainium .*4 nodes of trn1.32xlarge"),
        ({"tag": "absent"}, DeviceError, "millrace/trainer has no image absent: make images STAGE=trainer"),
        ({"retries": 10}, RecipeError, "RETRIES=10: "),
        ({"hours": 0.01}, RecipeError, "HOURS=0.01 is 36 s, .* 60 s"),
        (
            {"arguments": ("--cluster.trainer_instance_type=trn1n.32xlarge",)},
            DeviceError,
            "trn1n.32xlarge, .*trn1.32xlarge",
        ),
        (
            {"arguments": ("--cluster.trainer_instance_type=trn2.48xlarge",)},
            DeviceError,
            "trn2.48xlarge",
        ),
        (
            {
                "arguments": (
                    *("--model.hidden_size=8192", "--model.intermediate_size=28672"),
                    *("--model.num_attention_heads=64", "--model.num_hidden_layers=80"),
                )
            },
            DeviceError,
            "807 GB.* 157 GB .*checkpoint_gb = 808",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_sent(
    cloud: Cloud, batch: BatchTarget, ask: Ask, changes: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        batch.deploy(ask(**changes), None)
    assert cloud.submitted == []
    assert cloud.jobs.definitions("trainer") == []


@pytest.mark.parametrize(("shape", "variant"), [("trn1.32xlarge", "neuron"), ("trn2.48xlarge", "trn2")])
def test_the_images_are_of_the_variant_that_computes_on_the_trainium_nodes(
    cloud: Cloud, shape: str, variant: str
) -> None:
    with pytest.raises(DeviceError, match=f"-{variant}: make images STAGE=tokenizer VARIANT={variant} "):
        find_image(config_of(TRAINIUM_SHAPE=shape), cloud.jobs, "tokenizer", "")


@pytest.mark.parametrize(
    ("end", "said"), [("2026-01-31T12:00:00Z", "2026-01-31T11:20Z"), ("soon", "'soon', .*CAPACITY_ENDS_AT")]
)
def test_after_a_reservation_s_end_no_job_is_sent(cloud: Cloud, ask: Ask, end: str, said: str) -> None:
    late = BatchTarget(replace(cloud.config, capacity_ends_at=end), cloud.jobs)
    with pytest.raises(DeviceError, match=said):
        late.deploy(ask(), None)
    assert cloud.submitted == []


def test_a_compute_environment_that_is_invalid_is_not_taken_for_valid(
    cloud: Cloud, batch: BatchTarget, ask: Ask, while_waiting: Script
) -> None:
    cloud.break_queue("INVALID", "CLIENT_ERROR - no such launch template")
    with pytest.raises(DeviceError, match="is ENABLED and INVALID: CLIENT_ERROR - no such launch template"):
        batch.deploy(ask(), None)
    assert cloud.submitted == []


def test_a_status_tells_where_each_stage_stands(
    cloud: Cloud, batch: BatchTarget, ask: Ask, while_waiting: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    while_waiting(lambda: cloud.move("FAILED", 3))
    batch.deploy(ask("tokenizer"), None)
    batch.deploy(ask(is_followed=False), None)
    cloud.move("RUNNABLE", reason="CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY")
    capsys.readouterr()
    assert batch.show_status() == 0
    tokenizer, compiler, trainer = capsys.readouterr().out.split("\n\n")[1:]
    assert "  outcome   exit code 3" in tokenizer
    assert "no job that Batch still knows" in compiler
    assert "  now       runnable: CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY" in trainer


def test_a_definition_of_somebody_else_under_the_name_is_passed_over(
    cloud: Cloud, batch: BatchTarget, ask: Ask, while_waiting: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    size = [{"type": "VCPU", "value": "1"}, {"type": "MEMORY", "value": "512"}]
    cloud.batch.register_job_definition(
        jobDefinitionName="millrace-trainer",
        type="container",
        containerProperties={"image": "busybox", "resourceRequirements": size},
    )
    while_waiting(lambda: cloud.move("SUCCEEDED", 0))
    assert batch.show_status() == 0
    assert batch.deploy(ask(), None) == 0
    assert "busybox" not in capsys.readouterr().out
    [job] = cloud.submitted
    assert job["jobDefinition"].endswith("millrace-trainer:2")


def test_the_log_of_an_ended_stage_is_shown_whole(
    cloud: Cloud, batch: BatchTarget, ask: Ask, while_waiting: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    while_waiting(lambda: cloud.move("SUCCEEDED", 0, said="first\nlast"))
    batch.deploy(ask(), None)
    capsys.readouterr()
    assert batch.show_log("trainer") == 0
    assert "first\nlast\n" in capsys.readouterr().out
    with pytest.raises(DeviceError, match="compiler has no job that Batch still knows"):
        batch.show_log("compiler")
