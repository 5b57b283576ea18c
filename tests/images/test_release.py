"""A release is one commit and one tag, or nothing at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from images.platforms import SERVICES
from images.release import release
from images.versions import describe_build, is_released
from services.common.errors import DeviceError, MillraceError, RecipeError
from tests.images.checkout import CHANGELOG, commit, git, make_checkout, write


def state(repository: Path) -> tuple[str, str, str]:
    return git(repository, "rev-parse", "HEAD"), git(repository, "tag", "--list"), git(repository, "status", "--short")


VERSIONS = {"tokenizer": "0.2.0", "compiler": "0.1.1", "trainer": "1.0.0"}


def test_three_stages_are_released_with_numbers_of_their_own(tmp_path: Path) -> None:
    """A release changes its own stage's files alone, and the images of the others stay those of their releases."""
    repository = make_checkout(tmp_path)
    for service, version in VERSIONS.items():
        assert release(service, version, repository) == f"{service}-v{version}"
        assert git(repository, "tag", "--points-at", "HEAD") == f"{service}-v{version}"
        assert git(repository, "show", "--format=", "--name-only", "HEAD").split() == [
            f"services/{service}/CHANGELOG.md",
            f"services/{service}/VERSION",
        ]
    builds = {service: describe_build(service, "cpu", repository) for service in SERVICES}
    assert {service: build.tag for service, build in builds.items()} == {
        "tokenizer": "0.2.0-cpu",
        "compiler": "0.1.1-cpu",
        "trainer": "1.0.0-cpu",
        "head": "0.1.0-cpu",
    }
    assert {service for service, build in builds.items() if is_released(build, repository)} == {*VERSIONS}
    sections = (repository / "services/trainer/CHANGELOG.md").read_text().split("\n## ")
    assert sections[1].strip() == "[Unreleased]"
    assert sections[2].startswith("[1.0.0] - ")
    assert "- A thing that users see." in sections[2]
    assert sections[3].startswith("[0.1.0]")
    assert git(repository, "status", "--short") == ""


@pytest.mark.parametrize("version", ["", "1", "1.0", "v1.0.0", "1.0.0-rc1", "01.0.0", "0.0.9"])
def test_a_version_has_three_numbers_and_is_no_older_one(tmp_path: Path, version: str) -> None:
    repository = make_checkout(tmp_path)
    with pytest.raises(RecipeError):
        release("trainer", version, repository)


def dirty_the_tree(repository: Path) -> None:
    write(repository / "services/tokenizer/work.py", "print('unsaved')\n")


def empty_the_changelog(repository: Path) -> None:
    write(repository / "services/trainer/CHANGELOG.md", CHANGELOG.replace("### Fixed\n- A thing that users see.\n", ""))
    commit(repository, "Empty the changelog")


def tag_the_version(repository: Path) -> None:
    git(repository, "tag", "trainer-v0.2.0")


def forget_the_digests(repository: Path) -> None:
    platforms = repository / "images/platforms.toml"
    write(platforms, platforms.read_text().partition("[digests]")[0] + "[digests]\n")
    commit(repository, "Forget the digests")


def change_a_schema(repository: Path) -> None:
    write(repository / "tests/contract/manifests/corpus-4.json", "{}")
    commit(repository, "Write a golden manifest")
    git(repository, "tag", "tokenizer-v0.1.0")
    write(repository / "tests/contract/manifests/corpus-4.json", '{"title": ""}')
    commit(repository, "Change the corpus schema")


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (dirty_the_tree, "services/tokenizer/work.py"),
        (empty_the_changelog, r"services/trainer/CHANGELOG.md.*Unreleased"),
        (tag_the_version, "trainer-v0.2.0"),
        (forget_the_digests, "public.ecr.aws/neuron/"),
        (change_a_schema, "corpus-4.json.*tokenizer-v0.1.0"),
    ],
)
def test_what_is_not_fit_for_a_release_is_refused_and_nothing_is_written(
    tmp_path: Path, spoil: Callable[[Path], None], named: str
) -> None:
    repository = make_checkout(tmp_path)
    spoil(repository)
    before = state(repository)
    with pytest.raises(MillraceError, match=named):
        release("trainer", "0.2.0", repository)
    assert state(repository) == before


@pytest.mark.parametrize("signed", ["commit", "tag"])
def test_a_release_that_fails_half_way_leaves_the_tree_as_it_was(tmp_path: Path, signed: str) -> None:
    repository = make_checkout(tmp_path)
    git(repository, "config", f"{signed}.gpgSign", "true")
    git(repository, "config", "gpg.program", "false")
    before = state(repository)
    with pytest.raises(DeviceError):
        release("trainer", "0.2.0", repository)
    assert state(repository) == before
