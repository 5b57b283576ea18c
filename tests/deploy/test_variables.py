"""Variables of a deploy command are used or refused, and never ignored."""

from __future__ import annotations

import subprocess
import sys

import pytest

from deploy.client.request import DeployRequest
from deploy.commands.__main__ import TARGETS, explain_inapplicable
from images.platforms import REPOSITORY
from services.common.errors import RecipeError
from services.common.process.entry_point import exit_code_of
from tests.deploy.typed import COMMANDS, request_of, run_command

VALUES = {
    "STAGE": "trainer",
    "COMMAND": "summary",
    "RECIPE": str(REPOSITORY / "recipes/tiny-cpu.toml"),
    "OUTPUT": "yaml",
    "MODE": "isolated",
} | {"DRY_RUN": "1", "KEEP": "1", "AGAIN": "1", "FOLLOW": "0"}


def required_of(command: str) -> dict[str, str]:
    return {name: VALUES[name] for name in ("STAGE", "COMMAND") if name in COMMANDS[command]}


@pytest.mark.parametrize(
    ("command", "target"), [(command, target) for command in COMMANDS if command != "demo" for target in TARGETS[:2]]
)
def test_each_variable_is_used_or_refused(command: str, target: str) -> None:
    for name in COMMANDS[command]:
        value = target if name == "TARGET" else VALUES.get(name, "7")
        given = required_of(command) | {"TARGET": target, name: value} | ({"DRY_RUN": "1"} if name == "OUTPUT" else {})
        if not explain_inapplicable(name, command, target):  # type: ignore[arg-type]
            assert run_command(command, given)
            continue
        with pytest.raises(RecipeError, match=f"^{name}={value} .*{command} .*TARGET={target}: ."):
            run_command(command, given)


def test_variables_and_options_are_the_same() -> None:
    variables = {"STAGE": "trainer", "NODES": "2", "WAIT_AFTER_LOSS": "9", "ARGS": "--a.b='c d' --e.f=1", "FOLLOW": "0"}
    options = ["--stage=trainer", "--nodes", "2", "--wait-after-loss=9", "--args=--a.b='c d' --e.f=1", "--no-follow"]
    expected = DeployRequest(
        "trainer", nodes=2, loss_timeout_seconds=9, arguments=("--a.b=c d", "--e.f=1"), is_followed=False
    )
    assert request_of("deploy-stage", variables) == request_of("deploy-stage", {}, *options) == expected
    assert request_of("rollback-stage", {"STAGE": "trainer", "ARGS": ""}).arguments == (), (
        "those before are not repeated"
    )
    assert request_of("rollback-stage", {"STAGE": "trainer"}).arguments is None


@pytest.mark.parametrize("command", [each for each in COMMANDS if each not in ("pipeline", "demo")])
def test_a_command_that_this_machine_has_not_is_refused_with_the_one_to_use(command: str) -> None:
    with pytest.raises(RecipeError, match=rf"^TARGET=local .*{command}.*millrace tokenize"):
        run_command(command, required_of(command) | {"TARGET": "local"})


def test_the_command_that_goes_on_has_the_variables_that_were_given() -> None:
    given = {"TARGET": "batch", "RECIPE": VALUES["RECIPE"], "TAG": "", "ARGS": "--a.b=1 --c.d=2", "DRY_RUN": "0"}
    assert request_of("pipeline", given, "--nodes=2").repetition == (
        f"make pipeline TARGET=batch RECIPE={VALUES['RECIPE']} NODES=2 ARGS='--a.b=1 --c.d=2'"
    )


def test_an_empty_variable_and_a_switch_that_is_off_are_not_given() -> None:
    off = {"WAIT": "", "KEEP": "0", "AGAIN": "0", "DRY_RUN": "0"}
    for target in ("kuberay", "batch"):
        assert request_of("deploy-stage", {"STAGE": "trainer", "TARGET": target} | off) == DeployRequest("trainer")


@pytest.mark.parametrize(
    "wrong",
    [
        *("STAGE=train", "FOLLOW=never", "TARGET=k8s", "NODES=two", "NODES=0", "HOURS=0", "OUTPUT=yaml"),
        *("ARGS='", "ARGS=--train.max_steps 5", "ARGS=--root /tmp", "ARGS=--dry-run"),
    ],
)
def test_a_value_that_cannot_be_ends_with_2(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, _, value = wrong.partition("=")

    def run() -> int:
        run_command("deploy-stage", {"STAGE": "trainer", name: value})
        return 0

    assert exit_code_of(run) == RecipeError.exit_code
    assert name in capsys.readouterr().err


def test_a_name_that_make_was_given_and_nobody_knows_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(RecipeError, match=r"deploy-stage .*STGE: it takes STAGE, "):
        run_command("deploy-stage", {"MAKE_VARIABLES": "STGE", "STGE": "trainer"})
    with pytest.raises(RecipeError, match=r"pipeline .*TAG: it takes ROOT, TARGET, "):
        run_command("pipeline", {"MAKE_VARIABLES": "TAG", "TAG": "1"})
    with pytest.raises(RecipeError, match=r"stage-status .*HEAD_TAG"):
        run_command("stage-status", {"MAKE_VARIABLES": "HEAD_TAG"})
    run_command("stage-status", {"MAKE_VARIABLES": "AWS_PROFILE KUBECONFIG TORCH TORCH_INDEX_URL python"})


def test_make_tells_what_it_was_given() -> None:
    words = ["make", "--no-print-directory", "-n", *COMMANDS, "WIAT=3", "ARGS=--a=1 --b='c d'"]
    said = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    lines = [each for each in said.splitlines() if "deploy.commands" in each]
    named = [line.partition('MAKE_VARIABLES="')[2].partition('"')[0].split() for line in lines]
    assert [sorted(each) for each in named] == [["ARGS", "WIAT"]] * len(COMMANDS)


def test_the_app_is_imported_without_the_targets_libraries() -> None:
    """Another program may mount it, and `--help` waits for none of them."""
    heavy = "{'torch', 'ray', 'kubernetes', 'boto3', 'rich.live'}"
    program = f"import sys, deploy.commands.__main__; print({heavy} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
