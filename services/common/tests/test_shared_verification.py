"""The files of an artifact are verified by tasks: each file once, and all damages are named in one error."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.artifacts.compile_cache import CompileCacheManifest
from services.common.artifacts.store import Artifact
from services.common.artifacts.verification import FILES_PER_TASK, verify_on_nodes
from services.common.errors import ArtifactError
from services.common.launch.launcher import choose_launcher
from services.common.testing.artifacts import fill, publish
from services.common.testing.file_opens import noticing_opens
from services.common.testing.recipes import make_recipe

FILES = {f"graphs/{number:03d}.bin": b"graph" * (number + 1) for number in range(2 * FILES_PER_TASK + 6)}
INLINE = choose_launcher("inline")


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact[CompileCacheManifest]:
    build = lambda workspace: fill(workspace, FILES)  # noqa: E731
    return publish(tmp_path / "fsx", make_recipe(tmp_path), build=build)[0]


def test_each_file_is_read_once_and_each_task_advances_by_its_bytes(artifact: Artifact[CompileCacheManifest]) -> None:
    advances: list[int] = []

    with noticing_opens(artifact.path) as opens:
        verify_on_nodes(INLINE, artifact.path, artifact.manifest, "full", advances.append)

    assert sorted(opens.paths) == sorted(artifact.path / path for path in FILES)
    assert len(advances) == 3
    assert sum(advances) == sum(map(len, FILES.values()))


def test_damages_of_several_tasks_are_named_in_one_error(artifact: Artifact[CompileCacheManifest]) -> None:
    first, *_, last = FILES
    (artifact.path / first).write_bytes(b"grape")
    (artifact.path / last).unlink()

    with pytest.raises(
        ArtifactError, match=rf"2 of 70 files are damaged:\n  {first}: xxh3-128 is .*\n  {last}: missing"
    ):
        verify_on_nodes(INLINE, artifact.path, artifact.manifest)
    with pytest.raises(ArtifactError, match="1 of 70 files are damaged"):
        verify_on_nodes(INLINE, artifact.path, artifact.manifest, "size")
