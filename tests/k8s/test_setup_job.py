"""A new file system is root's. `make cluster-up` gives it to the images' user, and may run again at any time."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from images.demo import IMAGE_USER
from k8s.client.setup_job import run_setup_job
from services.common.errors import DeviceError, TryAgain
from tests.k8s.builders import Clock
from tests.k8s.memory_api import MemoryApi
from tests.k8s.rendered import Thing, containers_of, of_kind, pods_of

# What the pod security standard `baseline` lets a container add, of which this is all that the Job may need.
ADDED = {"CHOWN", "DAC_OVERRIDE"}


@pytest.fixture
def job(overlays: dict[str, list[Thing]]) -> Thing:
    return of_kind(overlays["eks"], "Job")["file-system-owner"]


def test_it_sees_the_stages_file_system_outside_of_their_namespace(
    overlays: dict[str, list[Thing]], job: Thing
) -> None:
    things = overlays["eks"]
    volumes = of_kind(things, "PersistentVolume")
    assert volumes["millrace-fsx-setup"]["spec"]["csi"] == volumes["millrace-fsx"]["spec"]["csi"]
    [claim] = [volume["persistentVolumeClaim"]["claimName"] for volume in job["spec"]["template"]["spec"]["volumes"]]
    claims = of_kind(things, "PersistentVolumeClaim")
    assert claims[claim]["spec"]["volumeName"] == "millrace-fsx-setup"
    assert claims[claim]["metadata"]["namespace"] == job["metadata"]["namespace"] == "millrace-setup"
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert (pod["securityContext"]["runAsUser"], pod["automountServiceAccountToken"]) == (0, False)
    assert set(container["securityContext"]["capabilities"]["add"]) == ADDED
    users = {each["spec"]["securityContext"]["runAsUser"] for each in pods_of(things).values()}
    assert users == {IMAGE_USER}


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


class Cluster(MemoryApi):
    """Plays the Job's controller: a poll later the Job has ended as it is to."""

    def __init__(self, condition: str) -> None:
        super().__init__()
        self.condition, self.created = condition, 0

    def create(self, body: Thing) -> Thing:
        self.created += body["kind"] == "Job"
        return super().create(body)

    def log(self, pod: str, container: str) -> list[str]:
        return ["2026-11-23T00:00:00Z beginning", "2026-11-23T00:00:01Z the last word"]

    def pass_second(self) -> None:
        if self.find("Job", "file-system-owner") and not self.find("Pod", "owner"):
            labels = {"job-name": "file-system-owner"}
            pod = {"kind": "Pod", "metadata": {"name": "owner", "labels": labels}, "status": {}}
            self.create(pod | {"spec": {"containers": [{"name": "owner"}]}})
        elif self.condition:
            status: Thing = {"conditions": [{"type": self.condition, "status": "True"}]}
            status |= {"succeeded": 1} if self.condition == "Complete" else {}
            self.merge("Job", "file-system-owner", {"status": status})


def run(job: Thing, cluster: Cluster, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> str:
    def sleep(seconds: float) -> None:
        clock.now += seconds
        cluster.pass_second()

    monkeypatch.setattr("time.sleep", sleep)
    return run_setup_job(cluster, job)  # type: ignore[arg-type]


def test_it_runs_to_its_end_each_time(job: Thing, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster("Complete")
    assert [run(job, cluster, clock, monkeypatch) for _ in range(2)] == ["the last word"] * 2
    assert cluster.created == 2


def test_a_failure_tells_its_last_word(job: Thing, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match=r"Job file-system-owner in namespace .* failed, .*: the last word"):
        run(job, Cluster("Failed"), clock, monkeypatch)


def made_as(pod: Thing, name: str, creation: str) -> Thing:
    return pod | {"metadata": pod["metadata"] | {"name": name, "creationTimestamp": creation}}


def test_the_last_try_has_the_last_word(job: Thing, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    class TriedTwice(Cluster):
        """The API server lists pods by name, which tells nothing of their order."""

        def log(self, pod: str, container: str) -> list[str]:
            return [f"2026-11-23T00:00:00Z said by {pod}"]

        def find_all(self, kind: str, selector: str = "", fields: str = "") -> list[Thing]:
            found = super().find_all(kind, selector, fields)
            if kind != "Pod" or not found:
                return found
            tries = {"second": "2026-11-23T00:00:09Z", "first": "2026-11-23T00:00:00Z"}
            return [made_as(found[0], name, at) for name, at in tries.items()]

    assert run(job, TriedTwice("Complete"), clock, monkeypatch) == "said by second"


def test_one_that_does_not_end_is_not_waited_for_for_ever(
    job: Thing, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TryAgain, match="did not end in 900 s"):
        run(job, Cluster(""), clock, monkeypatch)
