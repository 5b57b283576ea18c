"""The help of the Makefile lists every target under a heading and explains every variable that a target uses."""

from __future__ import annotations

import re

import pytest

from deploy.commands.__main__ import TARGETS, explain_inapplicable
from images.platforms import REPOSITORY
from tests.deploy.typed import COMMANDS
from tests.makefile import read_headings, read_help, read_rules, read_variables

WIDTH = 100
RULES = read_rules()
LISTED = [target for targets in read_headings().values() for target in targets]


def test_every_target_is_listed_under_one_of_five_headings() -> None:
    """A target that only others need, such as an environment that they run in, is no command of a person."""
    needed = {each for needs, _ in RULES.values() for each in needs}
    assert len(read_headings()) == 5
    assert sorted(LISTED) == sorted(set(LISTED))
    assert {*RULES} - {*LISTED} <= needed
    phony = re.search(r"^\.PHONY: ((?:.*\\\n)*.*)", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert phony
    assert sorted(phony[1].replace("\\\n", " ").split()) == sorted(RULES)


@pytest.mark.parametrize("target", ["", *LISTED])
def test_help_fits_a_terminal_and_explains_every_variable(target: str) -> None:
    lines = read_help(target)
    assert [line for line in lines if len(line) > WIDTH] == []
    for name, meaning in read_variables(target).items() if target else ():
        assert re.fullmatch(r"[A-Z_]+", name), "a name that nothing explains has no values"
        assert meaning.endswith("."), name


@pytest.mark.parametrize("target", LISTED)
def test_a_recipe_uses_no_variable_that_its_help_leaves_out(target: str) -> None:
    used = set(re.findall(r"\$\(([A-Z_]+)\)|\$\(abspath \$\(([A-Z_]+)\)\)", RULES[target][1]))
    names = {name for pair in used for name in pair if name} - {"MAKE", "MAKEFILE_LIST"}
    assert names <= {*read_variables(target)}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_deploy_command_takes_the_variables_of_its_help(command: str) -> None:
    explained = read_variables(command)
    assert {*explained} == {*COMMANDS[command]}
    targets = TARGETS if command == "pipeline" else TARGETS[:2]
    for name, text in explained.items() if command != "demo" else ():
        taken = [target for target in targets if not explain_inapplicable(name, command, target)]
        assert re.findall(r"TARGET=(\w+) only", text) == (taken if len(taken) == 1 else []), name
