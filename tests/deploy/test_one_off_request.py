"""Requests of `make stage-run`."""

from __future__ import annotations

import pytest

from deploy.client.one_off_request import OneOffRequest, PreparedOneOff, prepare_one_off
from deploy.client.requested_recipe import parse_requested_recipe
from services.common.errors import RecipeError
from services.common.testing.recipes import recipe_text
from tests.deploy.typed import request_of

IMAGE = "millrace/trainer@sha256:0"


def asked(**variables: str) -> OneOffRequest:
    request: OneOffRequest = request_of("stage-run", {"STAGE": "trainer", "COMMAND": "summary"} | variables)
    return request


def prepare(request: OneOffRequest, image: str = IMAGE) -> PreparedOneOff:
    return prepare_one_off(request, image, lambda: parse_requested_recipe(recipe_text(), "a file"))


def test_a_command_is_split_as_a_shell_would_and_seen_by_none() -> None:
    request = asked(COMMAND="sample --prompt 'If the; rm -rf /fsx' --tokens 3", HOURS="0.5")
    assert request.words == ("sample", "--prompt", "If the; rm -rf /fsx", "--tokens", "3")
    assert request.seconds == 1_800


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"COMMAND": "summary '"}, "COMMAND=summary '"),
        ({"COMMAND": "summary --recipe x"}, "COMMAND: .*--recipe"),
        ({"COMMAND": "summary --root=/x"}, "COMMAND: .*--root"),
        ({"HOURS": "0.01"}, "HOURS=0.01: .*48 hours"),
        ({"HOURS": "100"}, "HOURS=100: .*48 hours"),
        ({"COMMAND": " "}, "COMMAND= .*plan, doctor, summary"),
        ({"COMMAND": "exprt"}, "Do you mean export"),
        ({"COMMAND": "train"}, "make deploy-stage STAGE=trainer"),
        ({"RECIPE": "absent.toml"}, "absent.toml"),
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, str], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        prepare(asked(**wrong))


@pytest.mark.parametrize(
    ("command", "has_recipe"),
    [
        ("doctor --quick", True),
        ("artifacts list .", False),
        ("report tiny-cpu --sample", False),
    ],
)
def test_a_subcommand_that_reads_a_recipe_gets_one(command: str, has_recipe: bool) -> None:
    prepared = prepare(asked(COMMAND=command))
    assert (prepared.recipe is not None) == has_recipe
    assert prepared.words == tuple(command.split())


def test_the_same_of_the_same_person_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(image: str = IMAGE, **variables: str) -> str:
        return prepare(asked(**variables), image).digest

    monkeypatch.setenv("LOGNAME", "ann")
    first = digest()
    assert digest() == first
    others = [digest(image="other"), digest(COMMAND="plan"), digest(MEMORY="9"), digest(HOURS="1")]
    monkeypatch.setenv("LOGNAME", "ben")
    assert len({first, *others, digest()}) == 6
