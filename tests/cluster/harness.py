"""Steps that the cluster tests share: build and load images, run a command, read the cluster."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from images.build import build_images
from images.platforms import REPOSITORY
from images.versions import describe_build
from k8s.objects.api import Api, Object
from k8s.objects.attempt import has_ended, rayjobs_of
from k8s.objects.placement import heads_of, is_ready, pods_of
from k8s.objects.record import Record, read_record
from k8s.objects.worker_group import WorkerGroup, read_worker_group
from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.store import open_artifact
from services.common.testing.waiting import wait_until
from tests.cluster.kit import cluster, node_images
from tests.containers import IMAGE_USER
from tests.k8s.rendered import write_overlay
from tests.small import write_notes, write_small_recipe

COMMAND_SECONDS = 900


@dataclass(frozen=True)
class Done:
    """A command that ended."""

    code: int
    said: str


@dataclass(frozen=True)
class Harness:
    """A RayCluster on the kit, an artifact root of this machine behind its claim, and a small recipe."""

    api: Api
    overlay: Path
    root: Path
    recipe: Path

    def run(self, command: str, **variables: str) -> Done:
        """A command of the deploy tool, as `make` calls it."""
        process = self.start(command, **variables)
        said, _ = process.communicate(timeout=COMMAND_SECONDS)
        return Done(process.returncode, said)

    def succeed(self, command: str, **variables: str) -> str:
        """The output of a command of the deploy tool, which must end with exit code 0."""
        done = self.run(command, **variables)
        assert done.code == 0, done.said
        return done.said

    def start(self, command: str, **variables: str) -> subprocess.Popen[str]:
        own = {"RECIPE": str(self.recipe)} if command in ("deploy-stage", "rollback-stage", "pipeline") else {}
        environment = os.environ | {"OVERLAY": str(self.overlay)} | own | variables
        return subprocess.Popen(
            [sys.executable, "-m", "k8s.client" if command.startswith("cluster-") else "deploy.commands", command],
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # so that it can be killed with its children
        )

    def worker_group(self, name: str) -> WorkerGroup:
        return read_worker_group(self.api, name)

    def record(self, stage: str) -> Record:
        record = read_record(self.api, stage)
        assert record is not None, f"{stage} is not deployed"
        return record

    def pods(self, stage: str) -> list[Object]:
        return pods_of(self.api, stage)

    def bound(self, stage: str) -> list[str]:
        """Nodes that the stage's pods are on."""
        return sorted(pod["spec"]["nodeName"] for pod in self.pods(stage) if pod["spec"].get("nodeName"))

    def ready(self, stage: str) -> list[Object]:
        return [pod for pod in self.pods(stage) if is_ready(pod)]

    def steps(self) -> list[int]:
        """Every step that the trainer recorded, in the order in which it was taken."""
        files = list((self.root / "run").glob("*/metrics.jsonl"))
        lines = files[0].read_text(encoding="utf-8").splitlines() if files else []
        return [int(json.loads(line)["step"]) for line in lines if line.endswith("}")]

    def head(self) -> Object:
        heads = heads_of(self.api)
        return next(head for head in heads if "deletionTimestamp" not in head["metadata"])

    def is_down(self, stage: str) -> bool:
        """No pods, no gang, no lease, no RayJob that has not ended."""
        group = self.worker_group(stage)
        return (
            group.replicas == 0
            and not self.pods(stage)
            and self.api.find("PodGroup", group.pod_group) is None
            and self.api.find("Lease", f"stage-{stage}") is None
            and all(map(has_ended, rayjobs_of(self.api, stage)))
        )

    def stop(self, stage: str) -> None:
        self.succeed("stop-stage", STAGE=stage)
        assert self.is_down(stage)

    def log_of(self, stage: str) -> str:
        """Everything that the stage's drivers wrote, from below the artifact root."""
        files = sorted((self.root / "log" / stage).glob("*.log"), key=lambda file: file.stat().st_mtime)
        return "".join(file.read_text(encoding="utf-8") for file in files)


def kill_group(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def load_images(*services: str) -> None:
    """Build the working tree's cpu images and bring them to the node."""
    build_images(services, "cpu")
    node_images.load(*(name_of(service) for service in services))
    wanted = {f"docker.io/{name_of(service)}" for service in services}
    # Kubelet looks every few seconds, perhaps between the two names that an image is given.
    wait_until(lambda: wanted <= held_images(with_digest=True), seconds=120)


def another_version(stage: str, version: str = "0.1.1") -> str:
    """The same program in an image of another version, on the node."""
    name = f"millrace/{stage}:{version}-cpu"
    dockerfile = f"FROM {name_of(stage)}\nLABEL org.opencontainers.image.version={version}\n"
    subprocess.run(["docker", "build", "-q", "-t", name, "-"], input=dockerfile, text=True, check=True)
    node_images.load(name)
    wait_until(lambda: f"docker.io/{name}" in held_images(), 120)
    return name


def name_of(service: str) -> str:
    return f"millrace/{service}:{describe_build(service, 'cpu').commit_tag}"


def held_images(*, with_digest: bool = False) -> set[str]:
    """Names of the images that the node tells of; `with_digest`, of those that have a digest among their names."""
    node = json.loads(cluster.kubectl("get", "node", "node-a", "-o", "json"))
    images = [image.get("names") or [] for image in node["status"].get("images") or []]
    return {name for names in images if not with_digest or any("@sha256:" in each for each in names) for name in names}


def write_overlay_of(base: Path, folder: Path, root: Path) -> Path:
    """An overlay on `base` whose volume is `root`."""
    patch = [{"op": "replace", "path": "/spec/hostPath/path", "value": str(root)}]
    return write_overlay(folder, base, patches=[{"target": {"kind": "PersistentVolume"}, "patch": json.dumps(patch)}])


def make_harness(api: Api, folder: Path, base: Path) -> Harness:
    """An overlay over an empty root with a little text, of which nothing is on the cluster yet."""
    root = folder / "fsx"
    write_notes(root / "notes")
    give_to_stages(root)
    return Harness(
        api,
        write_overlay_of(base, folder / "overlay", root),
        root,
        write_small_recipe(folder / "small.toml", "/fsx/notes"),
    )


@contextmanager
def running_harness(api: Api, folder: Path, base: Path) -> Iterator[Harness]:
    """The RayCluster of an overlay, up, over an empty root with a little text; at the end it is deleted.

    The head's image must be on the node.
    """
    harness = make_harness(api, folder, base)
    harness.succeed("cluster-up")
    yield harness
    harness.succeed("cluster-down", FORCE="1")


def give_to_stages(folder: Path) -> None:
    """The stages' user owns it, and can reach it."""
    for path in (folder, *folder.rglob("*")):
        os.chown(path, IMAGE_USER, IMAGE_USER)
    for parent in folder.parents:
        if parent.stat().st_uid == os.getuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o011)


def forget_training(harness: Harness) -> None:
    """Remove the run's checkpoints and folder, as if it had never begun."""
    for kind in ("checkpoint", "run"):
        shutil.rmtree(harness.root / kind, ignore_errors=True)


def corpus_digest(root: Path) -> str:
    return open_artifact(one(root, "corpus/*/[0-9a-f]*/manifest.json"), CorpusManifest).manifest.content_digest


def one(root: Path, pattern: str) -> Path:
    """The folder of the one manifest that fits."""
    (manifest,) = root.glob(pattern)
    return manifest.parent


def publish_corpus(harness: Harness) -> None:
    """Tokenize the harness's recipe on this machine, into the root that the cluster's claim shows."""
    command = [sys.executable, "-m", "services.tokenizer", "--recipe", str(harness.recipe), "--root", str(harness.root)]
    subprocess.run([*command, "--launch", "inline"], cwd=REPOSITORY, check=True)
    give_to_stages(harness.root)
