"""A stage is swapped on a cluster that pulls images from a registry, while another stage trains.

The images of the other tests are brought to the node, and never pulled.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest

from images.build import publish_images
from images.platforms import REPOSITORY
from k8s.objects.api import Api, Object
from services.common.errors import DeviceError
from services.common.testing.waiting import wait_until
from tests.cluster.harness import Harness, name_of, running_harness
from tests.cluster.kit.processes import BIN, KUBECONFIG
from tests.cluster.test_admission import changed
from tests.containers import docker
from tests.k8s.rendered import OVERLAYS, write_overlay
from tests.registry import running_registry

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]

SERVICES = ("head", "tokenizer", "trainer")
MINUTE = 60.0
TRAINING = "--compile.enabled=false --train.max_steps=1000000 --checkpoint.interval_steps=500"


@dataclass(frozen=True)
class Place:
    """A cluster that pulls from a registry."""

    harness: Harness
    registry: str

    def deploy(self, **variables: str) -> str:
        """Run the tokenizer to its good end; what it said."""
        said = self.harness.succeed("deploy-stage", STAGE="tokenizer", **variables)
        assert self.harness.is_down("tokenizer")
        return said

    def refused(self, **variables: str) -> tuple[int, str]:
        done = self.harness.run("deploy-stage", STAGE="tokenizer", FOLLOW="0", **variables)
        assert done.code != 0, done.said
        assert "Traceback" not in done.said
        assert self.harness.is_down("tokenizer")
        return done.code, done.said

    def push(self, local: str, service: str, tag: str) -> str:
        name = f"{self.registry}/millrace/{service}:{tag}"
        docker("tag", local, name)
        docker("push", "--quiet", name)
        return name

    def uids(self) -> dict[str, str]:
        """The UIDs of the head's pod and the trainer's pods."""
        pods = [self.harness.head(), *self.harness.ready("trainer")]
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in pods}

    def steps(self) -> int:
        """The newest that the trainer recorded."""
        return max(self.harness.steps(), default=0)


@pytest.fixture(scope="module")
def registry(kit: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A registry with the working tree's images, as `make images PUSH=` leaves them."""
    with running_registry(tmp_path_factory.mktemp("registry")) as address:
        publish_images(SERVICES, "cpu", address)
        yield address


@pytest.fixture(scope="module")
def place(kit: Api, registry: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("swap")
    with running_harness(kit, folder, write_pulling_overlay(folder / "pulling", registry)) as harness:
        yield Place(harness, registry)


@pytest.fixture(scope="module")
def training(place: Place) -> Iterator[Place]:
    """The corpus is published, and the trainer takes steps on it."""
    place.deploy()
    client = place.harness.start("deploy-stage", STAGE="trainer", NODES="1", ARGS=TRAINING)
    try:
        wait_until(lambda: place.steps() > 20 or client.poll() is not None, 15 * MINUTE)
        assert client.poll() is None, client.communicate()[0]
        yield place
        at = place.steps()
        wait_until(lambda: place.steps() > at + 20, 5 * MINUTE)
    finally:
        place.harness.stop("trainer")
        client.communicate(timeout=5 * MINUTE)


@pytest.fixture(autouse=True)
def nobody_else_notices(request: pytest.FixtureRequest) -> Iterator[None]:
    """Head and trainer keep their pods, and steps are taken, whatever a test does beside them."""
    if "training" not in request.fixturenames:
        yield
        return
    place: Place = request.getfixturevalue("training")
    before, step = place.uids(), place.steps()
    assert len(before) == 2
    yield
    assert place.uids() == before
    wait_until(lambda: place.steps() > step, 5 * MINUTE)
    assert [attempt.message for attempt in place.harness.record("trainer").attempts] == []


def write_pulling_overlay(folder: Path, registry: str) -> Path:
    """The overlay local, but for images that are pulled where they are not there."""
    paths = ["/spec/headGroupSpec", *(f"/spec/workerGroupSpecs/{index}" for index in range(3))]
    policies = [
        {"op": "replace", "path": f"{path}/template/spec/containers/0/imagePullPolicy", "value": "IfNotPresent"}
        for path in paths
    ]
    reaper = [policies[0] | {"path": "/spec/jobTemplate/spec/template/spec/containers/0/imagePullPolicy"}]
    prefixes = [
        {"op": "replace", "path": "/metadata/annotations/millrace.dev~1images", "value": f"{registry}/millrace/"}
    ]
    names = [f"millrace/{service}" for service in ("head", "tokenizer", "compiler", "trainer")]
    return write_overlay(
        folder,
        OVERLAYS["local"],
        images=[{"name": name, "newName": f"{registry}/{name}"} for name in names],
        patches=[
            {"target": {"kind": kind}, "patch": json.dumps(patch)}
            for kind, patch in (("RayCluster", policies), ("CronJob", reaper), ("Namespace", prefixes))
        ],
    )


def with_new_key(place: Place, folder: Path) -> tuple[str, Path]:
    """A tokenizer of the next version, whose recipe has a key more, in the registry; and a recipe with that key."""
    recipe = (REPOSITORY / "services/common/recipe/schema.py").read_text(encoding="utf-8")
    changed = recipe.replace("class Tokenizer(Section):\n", 'class Tokenizer(Section):\n    note: str = ""\n')
    assert changed != recipe
    (folder / "schema.py").write_text(changed, encoding="utf-8")
    (folder / "Dockerfile").write_text(
        f"FROM {name_of('tokenizer')}\nCOPY --chown=0:0 schema.py /app/services/common/recipe/schema.py\n",
        encoding="utf-8",
    )
    (folder / "schema.py").chmod(0o644)
    docker("build", "--quiet", "--tag", "millrace-test/tokenizer:next", str(folder))
    small = place.harness.recipe.read_text(encoding="utf-8")
    file = folder / "next.toml"
    file.write_text(small.replace("[tokenizer]\n", '[tokenizer]\nnote = "new"\n'), encoding="utf-8")
    return place.push("millrace-test/tokenizer:next", "tokenizer", "next-cpu"), file


def test_a_stage_with_a_new_key_is_swapped_in_while_another_trains_and_rolled_back(
    training: Place, tmp_path: Path
) -> None:
    first = training.harness.worker_group("tokenizer").image
    assert first.startswith(f"{training.registry}/millrace/tokenizer@sha256:")
    others = [training.harness.worker_group(name).spec for name in ("compiler", "trainer")]
    swapped, recipe = with_new_key(training, tmp_path)

    code, said = training.refused(RECIPE=str(recipe))
    assert code == 2, said
    assert "unknown key 'tokenizer.note'" in said
    code, said = training.refused(RECIPE=str(recipe), TAG=first)
    assert code == 2, said
    assert f"the image {first} does not accept this recipe" in said
    assert "unknown key 'tokenizer.note'" in said

    said = training.deploy(RECIPE=str(recipe), TAG=swapped, ARGS="--corpus.validation_fraction=0.2")
    assert "the head and compiler and trainer keep their pods" in said
    second = training.harness.worker_group("tokenizer").image
    assert second != first
    assert len(list((training.harness.root / "corpus").glob("*/[0-9a-f]*/manifest.json"))) == 2

    done = training.harness.run("rollback-stage", STAGE="tokenizer", RECIPE="")
    assert done.code == 2, done.said
    assert "RECIPE= or ARGS=" in done.said
    training.harness.succeed("rollback-stage", STAGE="tokenizer")
    assert training.harness.worker_group("tokenizer").image == first
    assert [training.harness.worker_group(name).spec for name in ("compiler", "trainer")] == others


def test_the_head_is_not_changed_under_a_stage(training: Place, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {name_of('head')}\nLABEL another=yes\n", encoding="utf-8")
    docker("build", "--quiet", "--tag", "millrace-test/head:next", str(tmp_path))
    name = training.push("millrace-test/head:next", "head", "next-cpu")
    before = live_cluster(training.harness.api)
    done = training.harness.run("cluster-up", HEAD_TAG=name)
    assert done.code == 4, done.said
    assert "stage trainer " in done.said
    assert "applied     " not in done.said
    assert live_cluster(training.harness.api) == before
    training.harness.succeed("cluster-up")
    assert live_cluster(training.harness.api)["spec"] == before["spec"]


def live_cluster(api: Api) -> Object:
    found = api.find("RayCluster", "millrace")
    assert found
    return {"spec": found["spec"], "generation": found["metadata"]["generation"]}


@pytest.mark.parametrize("options", [(), ("--server-side", "--force-conflicts")])
def test_the_manifests_alone_do_not_reach_what_runs(training: Place, options: tuple[str, ...]) -> None:
    before = live_cluster(training.harness.api)
    done = subprocess.run(
        [BIN / "kubectl", "--kubeconfig", KUBECONFIG, "apply", *options, "-k", training.harness.overlay],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "make cluster-up" in done.stderr
    assert live_cluster(training.harness.api) == before


GROUP_POD = "/template/spec"
UNSET_IMAGE: dict[str, object] = {f"{GROUP_POD}/containers/0/image": "millrace/trainer:unset"}
OTHER_PRIORITY: dict[str, object] = {f"{GROUP_POD}/priorityClassName": "millrace-head"}


@pytest.mark.parametrize(
    ("stage", "fields", "said"),
    [
        ("tokenizer", UNSET_IMAGE, "takes away the image that a deployment gave"),
        ("trainer", OTHER_PRIORITY, "a worker group runs, and this changes its pods"),
        ("tokenizer", OTHER_PRIORITY, ""),
        ("trainer", {"/replicas": 0}, ""),
    ],
)
def test_only_what_a_deployment_set_is_kept(training: Place, stage: str, fields: dict[str, object], said: str) -> None:
    """A trial, which changes nothing: of a group that is down all else may change, and anybody may scale one down."""
    group = training.harness.worker_group(stage)
    spec = changed(group.cluster["spec"], {f"/workerGroupSpecs/{group.index}{at}": to for at, to in fields.items()})
    body = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {"name": "millrace"}, "spec": spec}
    with pytest.raises(DeviceError, match=said) if said else nullcontext():
        training.harness.api.apply(body, is_trial=True)
