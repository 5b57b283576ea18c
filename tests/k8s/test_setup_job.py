"""A new file system is root's. `make cluster-up` gives it to the images' user, and may run again at any time."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from images.demo import IMAGE_USER
from tests.k8s.rendered import Thing, containers_of, of_kind


@pytest.fixture
def job(overlays: dict[str, list[Thing]]) -> Thing:
    return of_kind(overlays["eks"], "Job")["file-system-owner"]


@pytest.mark.skipif(os.getuid() != 0, reason="gives folders away, as root does")
def test_folders_in_which_stages_make_others_are_theirs_and_a_second_run_changes_nothing(
    job: Thing, tmp_path: Path
) -> None:
    root = tmp_path / "fsx"
    (root / "checkpoint/run/id/shards").mkdir(parents=True)
    (root / ".lustre/fid").mkdir(parents=True)  # Lustre's own, which looks like a folder and takes no owner
    imported = root / "checkpoint/run/id/manifest.json"
    imported.write_text("{}")

    assert run_command(job, root) == f"{root}: 4 folders given to user {IMAGE_USER}"
    assert [folder.stat().st_uid for folder in (root, *(root / "checkpoint/run/id").parents[:2])] == [IMAGE_USER] * 3
    assert (root / ".lustre/fid").stat().st_uid == 0
    assert imported.stat().st_uid == 0  # it is read alone

    assert run_command(job, root) == f"{root}: 0 folders given to user {IMAGE_USER}"


def run_command(job: Thing, root: Path) -> str:
    [container] = containers_of(job["spec"]["template"])
    *shell, script = container["command"]
    done = subprocess.run(
        [*shell, script.replace("/fsx", str(root))], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()
