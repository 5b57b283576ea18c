"""An image's tag identifies its sources, and changes only with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from images.platforms import SERVICES, VARIANTS
from images.versions import describe_build, is_released
from services.common.errors import DeviceError
from tests.images.checkout import commit, git, make_checkout, make_shallow_checkout, write


def tags(repository: Path, variant: str = "cpu") -> dict[str, str]:
    return {service: describe_build(service, variant, repository).commit_tag for service in SERVICES}


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {service for service in before if before[service] != after[service]}


def test_a_commit_to_the_trainer_gives_the_trainer_alone_a_new_tag(tmp_path: Path) -> None:
    repository = make_checkout(tmp_path)
    before = tags(repository)
    write(repository / "services/trainer/work.py", "print('two')\n")
    commit(repository, "Change the trainer")
    assert changed(before, tags(repository)) == {"trainer"}
    assert tags(repository)["trainer"] == f"0.1.0-g{git(repository, 'rev-parse', 'HEAD')[:7]}-cpu"


def test_a_commit_to_the_contracts_gives_every_image_a_new_tag(tmp_path: Path) -> None:
    repository = make_checkout(tmp_path)
    before = tags(repository)
    write(repository / "services/common/errors.py", "# changed\n")
    commit(repository, "Change the contracts")
    assert changed(before, tags(repository)) == set(SERVICES)


def test_a_lock_of_one_variant_gives_the_images_of_another_no_new_tag(tmp_path: Path) -> None:
    repository = make_checkout(tmp_path)
    before = {f"{each}-{variant}": tag for variant in VARIANTS for each, tag in tags(repository, variant).items()}
    write(repository / "lockfiles/compiler-cuda.txt", "torch==2.14.0\n")
    commit(repository, "Raise torch for GPUs")
    after = {f"{each}-{variant}": tag for variant in VARIANTS for each, tag in tags(repository, variant).items()}
    # The trainer's image begins with the compiler's packages.
    assert changed(before, after) == {"compiler-cuda", "trainer-cuda"}
    assert after["trainer-cuda"] == f"0.1.0-g{git(repository, 'rev-parse', 'HEAD')[:7]}-cuda"


def test_tests_and_documents_give_no_image_a_new_tag(tmp_path: Path) -> None:
    repository = make_checkout(tmp_path)
    before = tags(repository)
    write(repository / "services/trainer/tests/test_work.py", "assert True\n")
    write(repository / "services/trainer/README.md", "# trainer\n")
    write(repository / "services/common/tests/test_more.py", "assert True\n")
    write(repository / "services/common/testing/more.py", "assert True\n")
    assert tags(repository) == before
    commit(repository, "Test and document")
    assert tags(repository) == before


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
    with pytest.raises(DeviceError, match="git fetch --unshallow"):
        describe_build("trainer", "cpu", make_shallow_checkout(tmp_path))
