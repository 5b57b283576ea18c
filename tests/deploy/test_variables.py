"""Variables of a deploy command are used or refused, and never ignored."""

from __future__ import annotations

import subprocess

import pytest

from deploy.client.variables import (
    COMMANDS,
    DEMO,
    LOCAL,
    ON_CLUSTERS,
    ON_LOCAL,
    TARGETS,
    VARIABLES,
    describe_repetition,
    require_taken,
)
from deploy.commands.__main__ import main
from images.platforms import REPOSITORY
from services.common.errors import RecipeError
from services.common.process.entry_point import exit_code_of

VALUES = {"STAGE": "trainer", "DRY_RUN": "1", "KEEP": "1", "AGAIN": "1", "FOLLOW": "0"}


def given(name: str, target: str) -> dict[str, str]:
    return {"TARGET": target, name: VALUES.get(name, "7")} if name != "TARGET" else {"TARGET": target}


@pytest.mark.parametrize(
    ("command", "target"),
    [(command, target) for target in TARGETS for command in ("pipeline", *(ON_CLUSTERS if target != LOCAL else ()))],
)
def test_each_variable_is_taken_or_refused_with_those_that_there_are(command: str, target: str) -> None:
    for name, variable in VARIABLES.items():
        if variable.is_taken(command, target):
            require_taken(command, given(name, target))
            continue
        with pytest.raises(RecipeError, match=f"^{name}=") as refused:
            require_taken(command, given(name, target))
        assert f"{command} takes " in str(refused.value)
        assert f"TARGET={target}" in str(refused.value)


@pytest.mark.parametrize("command", [each for each in ON_CLUSTERS if each not in ON_LOCAL])
def test_a_command_that_this_machine_has_not_is_refused_with_the_one_to_use(command: str) -> None:
    with pytest.raises(RecipeError, match=rf"^TARGET=local .*{command}.*python -m services"):
        require_taken(command, {"TARGET": LOCAL})


def test_the_demo_runs_on_this_machine_alone() -> None:
    require_taken(DEMO, {"RECIPE": "other.toml", "ROOT": "elsewhere", "ARGS": "--train.max_steps=5"})
    for name, value in {"TARGET": "batch", "WAIT": "5"}.items():
        with pytest.raises(RecipeError, match=f"^{name}={value} .*demo"):
            require_taken(DEMO, {name: value})


def test_the_command_that_goes_on_has_the_variables_that_were_given() -> None:
    environment = {"TARGET": "local", "ROOT": "a folder", "RECIPE": "", "ARGS": "--a.b=1 --c.d=2", "DRY_RUN": "0"}
    assert describe_repetition("pipeline", environment) == (
        "make pipeline TARGET=local ROOT='a folder' ARGS='--a.b=1 --c.d=2'"
    )


@pytest.mark.parametrize("off", [{"WAIT": ""}, {"KEEP": "0"}, {"AGAIN": "0"}, {"DRY_RUN": "0"}])
def test_an_empty_variable_and_a_switch_that_is_off_are_not_given(off: dict[str, str]) -> None:
    require_taken("stage-status", off)


@pytest.mark.parametrize(
    "wrong",
    [
        {"FOLLOW": "no"},
        {"DRY_RUN": "yes"},
        {"TARGET": "k8s"},
        {"RETRIES": "-1"},
        {"NODES": "two"},
        {"NODES": "0"},
        {"DRAIN": "1.5"},
        *({name: VALUES.get(name, "7"), "TARGET": "batch"} for name in ("WAIT", "MODE", "KEEP", "DRAIN")),
        {"ARGS": "'"},
        {"MODE": "alone"},
        {"OUTPUT": "json", "DRY_RUN": "1"},
    ],
)
def test_a_value_that_cannot_be_ends_with_2(
    wrong: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    for variable, value in ({"STAGE": "trainer"} | wrong).items():
        monkeypatch.setenv(variable, value)
    assert exit_code_of(lambda: main(["deploy-stage"])) == RecipeError.exit_code
    assert next(iter(wrong)) in capsys.readouterr().err


def test_a_name_that_make_was_given_and_nobody_knows_is_refused_with_the_nearest() -> None:
    with pytest.raises(RecipeError, match=r"deploy-stage .*WIAT.* WAIT\?"):
        require_taken("deploy-stage", {"MAKE_VARIABLES": "WIAT STAGE", "WIAT": "9"})
    with pytest.raises(RecipeError, match=r"stage-status .*HEAD_TAG"):
        require_taken("stage-status", {"MAKE_VARIABLES": "HEAD_TAG"})
    require_taken("deploy-stage", {"MAKE_VARIABLES": "AWS_PROFILE KUBECONFIG TORCH TORCH_INDEX_URL python"})


def test_make_tells_what_it_was_given() -> None:
    words = ["make", "--no-print-directory", "-n", *COMMANDS, "WIAT=3", "ARGS=--a=1 --b='c d'"]
    said = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    lines = [each for each in said.splitlines() if "deploy.commands" in each]
    named = [line.partition('MAKE_VARIABLES="')[2].partition('"')[0].split() for line in lines]
    assert [sorted(each) for each in named] == [["ARGS", "WIAT"]] * len(COMMANDS)
