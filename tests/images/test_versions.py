"""An image's tag identifies its sources, and changes only with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from images.platforms import SERVICES, VARIANTS
from images.versions import describe_build, is_released
from services.common.errors import DeviceError
from tests.images.checkout import commit, git, make_checkout, write


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
    tmp_path: Path, file: str, services: set[str]
) -> None:
    repository = make_checkout(tmp_path)
    before = tags(repository)
    path = repository / file
    write(path, (path.read_text(encoding="utf-8") if path.exists() else "") + "# changed\n")
    commit(repository, "Change a file")
    after = tags(repository)
    assert changed(before, after) == services
    assert {after[each] for each in services} <= {f"0.1.0-g{git(repository, 'rev-parse', 'HEAD')[:7]}-cpu"}


def test_a_lock_of_one_variant_gives_the_images_of_another_no_new_tag(tmp_path: Path) -> None:
    repository = make_checkout(tmp_path)
    before = {f"{each}-{variant}": tag for variant in VARIANTS for each, tag in tags(repository, variant).items()}
    write(repository / "lockfiles/compiler-cuda.txt", "torch==2.14.0\n")
    commit(repository, "Raise torch for GPUs")
    after = {f"{each}-{variant}": tag for variant in VARIANTS for each, tag in tags(repository, variant).items()}
    # The trainer's image begins with the compiler's packages.
    assert changed(before, after) == {"compiler-cuda", "trainer-cuda"}


def test_sources_that_no_commit_has_are_in_the_tag(tmp_path: Path) -> None:
    repository = make_checkout(tmp_path)
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


def test_a_version_is_released_only_at_the_sources_of_its_tag(tmp_path: Path) -> None:
    repository = make_checkout(tmp_path)
    assert not is_released(describe_build("trainer", "cpu", repository), repository)
    git(repository, "tag", "trainer-v0.1.0")
    write(repository / "services/tokenizer/work.py", "print('two')\n")
    commit(repository, "Change the tokenizer")
    assert is_released(describe_build("trainer", "cpu", repository), repository)
    write(repository / "services/trainer/work.py", "print('two')\n")
    assert not is_released(describe_build("trainer", "cpu", repository), repository)
    commit(repository, "Change the trainer")
    assert not is_released(describe_build("trainer", "cpu", repository), repository)


def test_a_shallow_clone_is_told_to_fetch_its_history(tmp_path: Path) -> None:
    repository = make_checkout(tmp_path)
    write(repository / "services/tokenizer/work.py", "print('two')\n")
    commit(repository, "Go on")
    git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{repository}", "shallow")
    with pytest.raises(DeviceError, match="git fetch --unshallow"):
        describe_build("trainer", "cpu", tmp_path / "shallow")
