"""A subcommand of a stage as a job of one CPU node, with the words and exit codes of the other target.

`tests/contract/test_one_off.py` compares the containers of both targets.
"""

from __future__ import annotations

import io
import json
from functools import partial

import pytest

from deploy.batch.job_definition import read_container
from services.common.process.entry_point import exit_code_of
from services.common.recipe.packed_recipe import RECIPE_VARIABLE, unpack_recipe
from services.common.testing.recipes import recipe_text
from tests.deploy.batch.builders import one_off_request
from tests.deploy.batch.cloud import TAG, Cloud, ask

ask_one_off = partial(one_off_request, tag=TAG)


@pytest.mark.parametrize(
    ("status", "code", "reason", "expected"),
    [
        ("SUCCEEDED", 0, "", 0),
        ("FAILED", 3, "", 3),
        ("FAILED", None, "", 75),
        ("FAILED", 137, "OutOfMemoryError: Container killed due to memory usage", 4),
        ("FAILED", 137, "Job attempt duration exceeded timeout", 75),
    ],
)
def test_it_is_followed_to_its_end_and_its_exit_code_is_told(
    cloud: Cloud,
    capsys: pytest.CaptureFixture[str],
    status: str,
    code: int | None,
    reason: str,
    expected: int,
) -> None:
    cloud.while_waiting(
        lambda: cloud.move("RUNNING", said="tokens 5"),
        lambda: cloud.move(status, code, said="loss 3.2", container_reason=reason),
    )
    assert cloud.target.run_one_off(ask_one_off(), None) == expected
    said = capsys.readouterr().out
    for shown in ("$9.68", "tokens 5\n", "loss 3.2\n"):
        assert shown in said
    [job] = cloud.submitted
    assert (job["jobQueue"], job["jobName"]) == ("millrace-cpu", "millrace-trainer-one-off-summary")
    definition = cloud.jobs.definitions("trainer", of_one_offs=True)[0].body
    assert definition["nodeProperties"]["numNodes"] == 1
    assert definition["retryStrategy"]["attempts"] == 1
    assert "devices" not in read_container(definition)["linuxParameters"]


def test_ctrl_c_ends_the_job(cloud: Cloud) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    cloud.while_waiting(lambda: cloud.move("RUNNING"), interrupt)
    assert exit_code_of(lambda: cloud.target.run_one_off(ask_one_off(), None)) == 130
    [job] = cloud.jobs.find_all("trainer", of_one_offs=True)
    assert (job.status, "Ctrl-C in make stage-run" in job.reason) == ("FAILED", True)


def test_the_same_of_the_same_person_that_goes_on_is_followed(cloud: Cloud) -> None:
    """tests/deploy/test_one_off_request.py says which are the same."""
    assert cloud.target.run_one_off(ask_one_off(is_followed=False), None) == 0
    cloud.while_waiting(lambda: cloud.move("SUCCEEDED", 0))
    assert cloud.target.run_one_off(ask_one_off(), None) == 0
    assert len(cloud.submitted) == 1
    assert cloud.target.run_one_off(ask_one_off(is_followed=False), None) == 0, "what has ended is run again"
    assert [each["jobDefinition"][-2:] for each in cloud.submitted] == [":1", ":1"]


def test_image_and_recipe_are_those_of_the_newest_deployment(cloud: Cloud) -> None:
    arguments = ("--optimizer.learning_rate=0.1", "--corpus=/fsx/c")
    assert cloud.target.deploy(ask(arguments=arguments, is_followed=False), None) == 0
    imported = ask_one_off("import", "--from", "hf", tag="", recipe=None, is_followed=False)
    assert cloud.target.run_one_off(imported, None) == 0
    container = read_container(cloud.jobs.definitions("trainer", of_one_offs=True)[0].body)
    assert container["image"] == cloud.jobs.resolve_image("trainer", TAG)
    words = container["command"]
    assert words[words.index("--") + 1 :] == ["import", "--optimizer.learning_rate=0.1", "--from", "hf"]
    variables = {each["name"]: each["value"] for each in container["environment"]}
    assert unpack_recipe(variables[RECIPE_VARIABLE]).decode() == recipe_text()


def test_a_dry_run_submits_nothing(cloud: Cloud) -> None:
    file = io.StringIO()
    assert cloud.target.run_one_off(ask_one_off(is_dry_run=True), file) == 0
    assert json.loads(file.getvalue().removeprefix("---\n"))["jobDefinitionName"] == "millrace-trainer-one-off"
    assert cloud.submitted == []
