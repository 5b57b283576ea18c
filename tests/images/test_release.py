"""A release is one commit and one tag, or nothing at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from images.release import bumped, release
from services.common.errors import DeviceError, MillraceError, RecipeError
from tests.images.checkout import CHANGELOG, commit, git, make_checkout, write


def state(repository: Path) -> tuple[str, str, str]:
    return git(repository, "rev-parse", "HEAD"), git(repository, "tag", "--list"), git(repository, "status", "--short")


def test_a_release_bumps_the_version_moves_the_changelog_and_tags(tmp_path: Path) -> None:
    repository = make_checkout(tmp_path)
    assert release("trainer", "minor", repository) == "trainer-v0.2.0"
    assert (repository / "services/trainer/VERSION").read_text() == "0.2.0\n"
    assert (repository / "services/tokenizer/VERSION").read_text() == "0.1.0\n"
    sections = (repository / "services/trainer/CHANGELOG.md").read_text().split("\n## ")
    assert sections[1].strip() == "[Unreleased]"
    assert sections[2].startswith("[0.2.0] - ")
    assert "- A thing that users see." in sections[2]
    assert sections[3].startswith("[0.1.0]")
    assert git(repository, "tag", "--points-at", "HEAD") == "trainer-v0.2.0"
    assert git(repository, "status", "--short") == ""
    assert git(repository, "show", "--format=", "--name-only", "HEAD").split() == [
        "services/trainer/CHANGELOG.md",
        "services/trainer/VERSION",
    ]


def test_versions_are_bumped_by_semantic_versioning() -> None:
    assert [bumped("1.4.7", bump) for bump in ("major", "minor", "patch")] == ["2.0.0", "1.5.0", "1.4.8"]
    with pytest.raises(RecipeError, match=r"'huge'.*major, minor, patch"):
        bumped("1.4.7", "huge")


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
    git(repository, "tag", "tokenizer-v0.1.0")
    corpus = repository / "services/common/artifacts/corpus.py"
    changed = corpus.read_text().replace("    rows: Count\n", "    rows: Count\n    title: Count\n", 1)
    assert changed != corpus.read_text()
    write(corpus, changed)
    commit(repository, "Change the corpus schema")


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (dirty_the_tree, "services/tokenizer/work.py"),
        (empty_the_changelog, r"services/trainer/CHANGELOG.md.*Unreleased"),
        (tag_the_version, "trainer-v0.2.0"),
        (forget_the_digests, "public.ecr.aws/neuron/"),
        (change_a_schema, "corpus/4 .*tokenizer-v0.1.0"),
    ],
)
def test_what_is_not_fit_for_a_release_is_refused_and_nothing_is_written(
    tmp_path: Path, spoil: Callable[[Path], None], named: str
) -> None:
    repository = make_checkout(tmp_path)
    spoil(repository)
    before = state(repository)
    with pytest.raises(MillraceError, match=named):
        release("trainer", "minor", repository)
    assert state(repository) == before


@pytest.mark.parametrize("signed", ["commit", "tag"])
def test_a_release_that_fails_half_way_leaves_the_tree_as_it_was(tmp_path: Path, signed: str) -> None:
    repository = make_checkout(tmp_path)
    git(repository, "config", f"{signed}.gpgSign", "true")
    git(repository, "config", "gpg.program", "false")
    before = state(repository)
    with pytest.raises(DeviceError):
        release("trainer", "minor", repository)
    assert state(repository) == before


def test_a_schema_with_the_next_number_may_have_other_fields(tmp_path: Path) -> None:
    repository = make_checkout(tmp_path)
    change_a_schema(repository)
    corpus = repository / "services/common/artifacts/corpus.py"
    write(corpus, corpus.read_text().replace('"corpus/4"', '"corpus/5"'))
    commit(repository, "Give the corpus schema its next number")
    assert release("trainer", "minor", repository) == "trainer-v0.2.0"
