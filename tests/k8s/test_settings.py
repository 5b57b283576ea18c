"""settings.env of an overlay describes the cluster: its region, its registry, and the shapes of its nodes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from images.platforms import REPOSITORY
from infra.shapes import find_shape
from k8s.client.overlay import find_kubectl, render, render_filled_in
from k8s.objects.deploy_job import render_deploy_job
from k8s.objects.worker_group import worker_group_of
from services.common.errors import RecipeError
from services.common.recipe.schema import STAGES
from tests.k8s.builders import DIGEST, deployment_of
from tests.k8s.rendered import (
    OVERLAYS,
    Thing,
    cluster_of,
    containers_of,
    copy_overlay,
    groups_of,
    of_kind,
    pods_of,
)
from tests.k8s.test_manifests import ALL_RULES

FILLED_IN = {
    "REGION": "us-east-2",
    "CLUSTER_NAME": "blue",
    "REGISTRY": "123456789012.dkr.ecr.us-east-2.amazonaws.com",
    "FSX_ID": "fs-0123456789abcdef0",
    "FSX_DNS_NAME": "fs-0123456789abcdef0.fsx.us-east-2.amazonaws.com",
    "FSX_MOUNT_NAME": "abcdefgh",
}
EXISTING = REPOSITORY / "k8s/overlays/existing"
Render = Callable[..., list[Thing]]


@pytest.fixture
def rendered(overlays: dict[str, list[Thing]], tmp_path: Path) -> Render:
    """The overlay eks with other settings."""

    def render_with(**settings: str) -> list[Thing]:
        return render(copy_overlay(OVERLAYS["eks"], tmp_path, **(FILLED_IN | settings)))

    return render_with


def test_trn2_instead_of_trn1_is_a_shape_and_a_recipe(rendered: Render) -> None:
    """tests/contract/test_targets.py has the devices and the memory of each shape."""
    end, recipe = "2026-12-24T11:30:00Z", "recipes/llama3.1-8b-trn2.toml"
    things = rendered(TRAINIUM_SHAPE="trn2.48xlarge", TRAINIUM_MAX_NODES="4", RECIPE=recipe, CAPACITY_ENDS_AT=end)
    trainer = groups_of(things)["trainer"]

    assert trainer["template"]["spec"]["nodeSelector"]["node.kubernetes.io/instance-type"] == "trn2.48xlarge"
    annotations = cluster_of(things)["metadata"]["annotations"]
    keys = ("node-pool", "node-shape", "node-price", "capacity-ends-at")
    told = {stage: [annotations.get(f"millrace.dev/{stage}-{key}") for key in keys] for stage in STAGES}
    assert told["trainer"] == told["compiler"] == ["blue/trainium", "trn2.48xlarge", "35.76", end]
    assert told["tokenizer"] == ["blue/cpu", "m7i.8xlarge", "1.61", None]
    assert annotations["millrace.dev/variant"] == "trn2"
    assert trainer["maxReplicas"] == 4
    assert "trn1" not in yaml.safe_dump(things)
    assert [problem for rule in ALL_RULES for problem in rule(things)] == []


def test_another_region_is_one_line(rendered: Render) -> None:
    things = rendered(REGION="ap-south-2", REGISTRY="registry.example/team")
    job = render_deploy_job(worker_group_of(cluster_of(things), "trainer"), deployment_of())
    reaper = of_kind(things, "CronJob")["reaper"]["spec"]["jobTemplate"]
    for made in (job, reaper):
        *_, container = containers_of(made["spec"]["template"])
        assert {"name": "AWS_REGION", "value": "ap-south-2"} in container["env"]
    assert "us-east-2" not in yaml.safe_dump(of_kind(things, "RayCluster"))


def test_the_queue_holds_what_all_nodes_hold(rendered: Render) -> None:
    things = rendered(TRAINIUM_MAX_NODES="3", CPU_MAX_NODES="5")
    capability = of_kind(things, "Queue")["millrace"]["spec"]["capability"]
    trainium, cpu = find_shape("trn1.32xlarge").pod_resources, find_shape("m7i.8xlarge").pod_resources
    assert capability["cpu"] == str(3 * trainium.cpus + 5 * cpu.cpus)
    assert capability["memory"] == f"{3 * trainium.memory_gib + 5 * cpu.memory_gib}Gi"
    assert capability["vpc.amazonaws.com/efa"] == str(3 * trainium.efa_cards)
    for name in groups_of(things):
        [container] = containers_of(pods_of(things)[name])
        assert container["resources"]["requests"].keys() <= capability.keys(), "a resource without a cap"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"COMPILER_POOL": "core"}, "COMPILER_POOL=core: .*trainium or cpu"),
        ({"TRAINIUM_SHAPE": "trn9"}, "instance type 'trn9' is not in infra/shapes.json, which lists trn1.32xlarge"),
        ({"CPU_SHAPE": "trn1.32xlarge"}, "CPU_SHAPE=trn1.32xlarge has 16 Neuron devices"),
        ({"TRAINIUM_SHAPE": "p5.48xlarge"}, "TRAINIUM_SHAPE=p5.48xlarge has 0 Neuron devices and 8 GPUs"),
        ({"CPU_SHAPE": ""}, "no CPU_SHAPE"),
        ({"TRAINIUM_MAX_NODES": "many"}, "TRAINIUM_MAX_NODES=many: "),
        ({"TRAINIUM_MAXNODES": "4"}, "TRAINIUM_MAXNODES; .*TRAINIUM_MAX_NODES"),
        ({"COLOUR": "red"}, "COLOUR; .*REGION, CLUSTER_NAME, REGISTRY"),
        ({"REGION": 'us-west-2"'}, 'REGION=us-west-2": expected REGION=VALUE, without quotes'),
        ({"CAPACITY_ENDS_AT": "tomorrow"}, "'tomorrow'"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(rendered: Render, settings: dict[str, str], said: str) -> None:
    with pytest.raises(RecipeError, match=said.replace("(", r"\(")):
        rendered(**settings)


@pytest.mark.parametrize(("overlay", "key"), [(OVERLAYS["eks"], "REGISTRY"), (EXISTING, "FSX_ID")])
def test_an_overlay_is_refused_until_it_is_filled_in(tmp_path: Path, overlay: Path, key: str) -> None:
    settings = FILLED_IN | {key: "CHANGE-ME" if key == "REGISTRY" else ""}
    with pytest.raises(RecipeError, match="CHANGE-ME is still in"):
        render_filled_in(copy_overlay(overlay, tmp_path, **settings))


def test_an_overlay_with_settings_uses_its_component(overlays: dict[str, list[Thing]], tmp_path: Path) -> None:
    kustomization = copy_overlay(OVERLAYS["eks"], tmp_path, **FILLED_IN) / "kustomization.yaml"
    kustomization.write_text(kustomization.read_text(encoding="utf-8").replace("- generated", ""), encoding="utf-8")
    with pytest.raises(RecipeError, match="generated"):
        render(tmp_path)


def test_kustomize_alone_renders_the_whole_for_a_gitops_tool(overlays: dict[str, list[Thing]], tmp_path: Path) -> None:
    """Once `generated` is written, and the overlay sets the head's image."""
    things = render_filled_in(copy_overlay(EXISTING, tmp_path, **FILLED_IN))
    head = f"{FILLED_IN['REGISTRY']}/millrace/head"
    with (tmp_path / "kustomization.yaml").open("a", encoding="utf-8") as file:
        file.write(f"images: [{{name: {head}, digest: 'sha256:{DIGEST}'}}]\n")
    done = subprocess.run([find_kubectl(), "kustomize", tmp_path], capture_output=True, text=True, check=True)
    expected = yaml.safe_dump(things).replace(f"{head}:unset", f"{head}@sha256:{DIGEST}")
    assert list(yaml.safe_load_all(done.stdout)) == yaml.safe_load(expected)


def test_nodes_of_an_existing_cluster_are_simply_there_and_its_overlay_keeps_the_rules(
    overlays: dict[str, list[Thing]], tmp_path: Path
) -> None:
    existing = render_filled_in(copy_overlay(EXISTING, tmp_path, **FILLED_IN))
    assert [worker_group_of(cluster_of(existing), stage).node_pool for stage in STAGES] == ["", "", ""]
    assert [problem for rule in ALL_RULES for problem in rule(existing)] == []
    assert "PodMonitor" not in {each["kind"] for each in existing}
