"""An image's tag identifies its sources, and a release is one commit and one tag, or nothing at all."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from images.platforms import REPOSITORY, SERVICES, VARIANTS, read_platforms
from images.release import release
from images.versions import describe_build, is_released
from services.common.errors import DeviceError, MillraceError, RecipeError
from tests.architecture.documents import list_files
from tests.images.checkout import CHANGELOG, begin, commit, git, make_checkout, write


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return make_checkout(tmp_path)


def tags(repository: Path, variant: str = "cpu") -> dict[str, str]:
    return {service: describe_build(service, variant, repository).commit_tag for service in SERVICES}


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {service for service in before if before[service] != after[service]}


@pytest.mark.parametrize(
    ("file", "services"),
    [
        ("services/trainer/work.py", {"trainer"}),
        ("services/common/errors.py", {*SERVICES}),
        ("images/head.Dockerfile", {"head"}),
        ("images/program.Dockerfile", {"compiler", "trainer"}),
        ("images/install.sh", {*SERVICES}),
        ("k8s/controller/work.py", {"head"}),
        ("k8s/client/work.py", set()),
        ("images/release.py", set()),
        ("services/trainer/tests/test_work.py", set()),
        ("services/trainer/README.md", set()),
        ("services/common/testing/more.py", set()),
    ],
)
def test_a_commit_gives_a_new_tag_to_the_images_that_have_the_file(
    repository: Path, file: str, services: set[str]
) -> None:
    before = tags(repository)
    path = repository / file
    write(path, (path.read_text(encoding="utf-8") if path.exists() else "") + "# changed\n")
    commit(repository, "Change a file")
    after = tags(repository)
    assert changed(before, after) == services
    assert {after[each] for each in services} <= {f"0.1.0-g{git(repository, 'rev-parse', 'HEAD')[:7]}-cpu"}


def test_a_lock_of_one_variant_gives_the_images_of_another_no_new_tag(repository: Path) -> None:
    before = {f"{each}-{variant}": tag for variant in VARIANTS for each, tag in tags(repository, variant).items()}
    write(repository / "lockfiles/compiler-cuda.txt", "torch==2.14.0\n")
    commit(repository, "Raise torch for GPUs")
    after = {f"{each}-{variant}": tag for variant in VARIANTS for each, tag in tags(repository, variant).items()}
    # The trainer's image begins with the compiler's packages.
    assert changed(before, after) == {"compiler-cuda", "trainer-cuda"}


def test_sources_that_no_commit_has_are_in_the_tag(repository: Path) -> None:
    committed = tags(repository)
    write(repository / "services/trainer/work.py", "print('two')\n")
    first = tags(repository)
    write(repository / "services/trainer/work.py", "print('three')\n")
    second = tags(repository)
    write(repository / "services/trainer/new.py", "print('four')\n")
    third = tags(repository)
    assert "-dirty" in first["trainer"]
    assert len({each["trainer"] for each in (committed, first, second, third)}) == 4
    assert changed(committed, third) == {"trainer"}


def test_a_version_is_released_only_at_the_sources_of_its_tag(repository: Path) -> None:
    assert not is_released(describe_build("trainer", "cpu", repository), repository)
    git(repository, "tag", "trainer-v0.1.0")
    write(repository / "services/tokenizer/work.py", "print('two')\n")
    commit(repository, "Change the tokenizer")
    assert is_released(describe_build("trainer", "cpu", repository), repository)
    write(repository / "services/trainer/work.py", "print('two')\n")
    assert not is_released(describe_build("trainer", "cpu", repository), repository)
    commit(repository, "Change the trainer")
    assert not is_released(describe_build("trainer", "cpu", repository), repository)


def test_a_shallow_clone_is_told_to_fetch_its_history(repository: Path, tmp_path: Path) -> None:
    write(repository / "services/tokenizer/work.py", "print('two')\n")
    commit(repository, "Go on")
    git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{repository}", "shallow")
    with pytest.raises(DeviceError, match="git fetch --unshallow"):
        describe_build("trainer", "cpu", tmp_path / "shallow")


def state(repository: Path) -> tuple[str, str, str]:
    return git(repository, "rev-parse", "HEAD"), git(repository, "tag", "--list"), git(repository, "status", "--short")


VERSIONS = {"tokenizer": "0.2.0", "compiler": "0.1.1", "trainer": "1.0.0"}


def test_three_stages_are_released_with_numbers_of_their_own(repository: Path) -> None:
    """A release changes its own stage's files alone, and the images of the others stay those of their releases."""
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
def test_a_version_has_three_numbers_and_is_no_older_one(repository: Path, version: str) -> None:
    with pytest.raises(RecipeError):
        release("trainer", version, repository)


def copy_checkout(folder: Path) -> Path:
    """A repository with this checkout's files, in which the base images of one variant for Trainium have digests."""
    repository = folder / "copy"
    for name in list_files("images", "services", "lockfiles", "recipes", "Makefile", "bootstrap", ".*ignore"):
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, repository / name)
    platforms = repository / "images/platforms.toml"
    pinned = f'[digests]\n"{read_platforms()["trn2"].platform}" = "sha256:{"0" * 64}"\n'
    write(platforms, platforms.read_text(encoding="utf-8").partition("[digests]")[0] + pinned)
    write(repository / "services/trainer/CHANGELOG.md", CHANGELOG)
    begin(repository)
    return repository


def test_a_release_prints_the_deployment_of_each_variant(tmp_path: Path) -> None:
    """It needs no digest of a base image; a push then leaves out the version's tag of the variants that lack one."""
    repository = copy_checkout(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/git").symlink_to(str(shutil.which("git")))  # and no Docker, whose images would be looked at
    environment = {"PATH": str(tmp_path / "bin"), "STAGE": "trainer", "VERSION": "9.0.0"}
    command = [sys.executable, "-m", "images", "release"]
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    commit_id = git(repository, "rev-parse", "trainer-v9.0.0^{commit}")[:7]
    pushed = {
        "cpu": "9.0.0-cpu",
        "cuda": "9.0.0-cuda",
        "neuron": f"9.0.0-g{commit_id}-neuron",
        "trn2": "9.0.0-trn2",
    }
    commands = [line.partition("#")[0].strip() for line in done.stdout.splitlines() if "  make" in line]
    assert commands == [
        command
        for variant, tag in pushed.items()
        for command in (
            f"make images STAGE=trainer VARIANT={variant} PUSH=REGISTRY",
            f"make deploy-stage STAGE=trainer TAG={tag}",
        )
    ]


def dirty_the_tree(repository: Path) -> None:
    write(repository / "services/tokenizer/work.py", "print('unsaved')\n")


def empty_the_changelog(repository: Path) -> None:
    write(repository / "services/trainer/CHANGELOG.md", CHANGELOG.replace("### Fixed\n- A thing that users see.\n", ""))
    commit(repository, "Empty the changelog")


def tag_the_version(repository: Path) -> None:
    git(repository, "tag", "trainer-v0.2.0")


def change_a_schema(repository: Path) -> None:
    write(repository / "tests/contract/manifests/corpus-5.json", "{}")
    commit(repository, "Write a golden manifest")
    git(repository, "tag", "tokenizer-v0.1.0")
    write(repository / "tests/contract/manifests/corpus-5.json", '{"title": ""}')
    commit(repository, "Change the corpus schema")


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (dirty_the_tree, "services/tokenizer/work.py"),
        (empty_the_changelog, r"services/trainer/CHANGELOG.md.*Unreleased"),
        (tag_the_version, "trainer-v0.2.0"),
        (change_a_schema, "corpus-5.json.*tokenizer-v0.1.0"),
    ],
)
def test_what_is_not_fit_for_a_release_is_refused_and_nothing_is_written(
    repository: Path, spoil: Callable[[Path], None], named: str
) -> None:
    spoil(repository)
    before = state(repository)
    with pytest.raises(MillraceError, match=named):
        release("trainer", "0.2.0", repository)
    assert state(repository) == before


@pytest.mark.parametrize("signed", ["commit", "tag"])
def test_a_release_that_fails_half_way_leaves_the_tree_as_it_was(repository: Path, signed: str) -> None:
    git(repository, "config", f"{signed}.gpgSign", "true")
    git(repository, "config", "gpg.program", "false")
    before = state(repository)
    with pytest.raises(DeviceError):
        release("trainer", "0.2.0", repository)
    assert state(repository) == before
