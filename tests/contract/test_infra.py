"""The manifests of k8s/ use what infra/ makes. A change of one side in a copy is reported with both values."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from images.platforms import REPOSITORY
from infra.account import managed_node_groups
from infra.apply.overlay_settings import write_settings
from infra.workloads import cluster_workloads
from k8s.client.overlay import render
from tests.contract.agreements import example_outputs, list_agreements, read_settings

Thing = dict[str, Any]
OVERLAY = "k8s/overlays/eks"
PARTS = ("k8s/base", "k8s/stages", OVERLAY, "infra/stacks", "infra/modules", "infra/addons")
MAIN, COMMON, VARIABLES = (f"infra/stacks/eks/{name}.tf" for name in ("main", "common", "variables"))
ADDONS = "infra/modules/eks/addons.tf"
OUTPUTS, VALUES = "infra/stacks/eks/outputs.tf", "infra/addons/values"
RELEASES, KIT = "infra/addons/addons.yaml", "tests/cluster/kit"
FILES = (
    *("infra/shapes.json", "infra/aws_releases.json"),
    *(f"{KIT}/{name}" for name in ("go.mod", "cluster.py", "README.md")),
)
PEOPLE_BINDING = (
    "  name: millrace-people\nsubjects:\n  - apiGroup: rbac.authorization.k8s.io\n    kind: Group\n    name: "
)

# By file: the agreement that is broken, a text in the file, and its replacement.
MUTATIONS: dict[str, list[tuple[str, str, str]]] = {
    MAIN: [
        ("namespace", 'namespace       = "millrace"', 'namespace       = "train"'),
        ("group of the people who deploy", '"millrace-deployers"', '"deployers"'),
        ("images", '["head", "tokenizer"', '["ray-head", "tokenizer"'),
        ("label of the pools, in the commands", '"millrace.dev/pool"', '"pool"'),
        ("label of node groups' shapes, in the commands", '"millrace.dev/shape"', '"shape"'),
        ("shape on the label of pool cpu", "cpu = var.cpu_nodes.shape", "cpu = var.core_nodes.shape"),
        ("shape on the label of pool trainium", "trainium = var.trainium.shape }", "trainium = var.cpu_nodes.shape }"),
        ("taint of Trainium nodes, in the commands", 'key = "aws.amazon.com/neuron"', 'key = "neuron"'),
        ("service accounts that change node groups", '["deployer", "reaper"]', '["deploy", "reaper"]'),
        ("label of the nodes of pool trainium", "= local.node_labels.trainium", "= local.node_labels.core"),
        ("label of the nodes of pool cpu", "= local.node_labels.cpu", "= local.node_labels.core"),
    ],
    "k8s/base/kustomization.yaml": [
        ("namespace that infra-down empties", "namespace: millrace", "namespace: train"),
    ],
    COMMON: [
        ("stages that reach the bucket", 'bucket_users      = ["tokenizer"]', 'bucket_users      = ["trainer"]'),
        ("TRAINIUM_SHAPE of settings.env", '"trn1.32xlarge")', '"trn2.48xlarge")'),
    ],
    "k8s/base/reaper.yaml": [
        ("service accounts that change node groups", "serviceAccountName: reaper", "serviceAccountName: mower"),
    ],
    "k8s/stages/trainer/worker-group.yaml": [
        ("pools, in the commands of infra", "millrace.dev/pool: trainium", "millrace.dev/pool: cpu"),
        (
            "zones that pods select (the pool is in one)",
            "millrace.dev/pool: trainium",
            "topology.kubernetes.io/zone: us-west-2d, millrace.dev/pool: trainium",
        ),
    ],
    f"{OVERLAY}/settings.env": [
        ("TRAINIUM_NODE_GROUP of settings.env", "TRAINIUM_NODE_GROUP=trainium", "TRAINIUM_NODE_GROUP=trn"),
    ],
    "infra/shapes.json": [
        ("GiB of volume millrace-fsx", '"gib": 1200', '"gib": 2400'),
    ],
    "infra/modules/storage/main.tf": [
        ("folders that are copied to the bucket", 'checkpoint = "at once"', 'checkpoints = "at once"'),
        ("folders that are copied to the bucket", 'run = "hourly"', 'runs = "hourly"'),
    ],
    RELEASES: [
        ("extended resources", "chart: aws-efa-k8s-device-plugin", "chart: efa"),
        ("version of kuberay-operator, here and in the test cluster", "version: 1.6.1", "version: 1.7.0"),
        ("namespace of Prometheus", "namespace: monitoring", "namespace: prometheus"),
    ],
    f"{KIT}/go.mod": [
        ("version of volcano, here and in the test cluster", "volcano v1.14.1", "volcano v1.15.0"),
        ("minor version of Kubernetes, here and in the test cluster", "kubernetes v1.34.4", "kubernetes v1.35.4"),
    ],
    VARIABLES: [
        ("minor version of Kubernetes, here and in the test cluster", '= "1.34"', '= "1.35"'),
        ("newest Kubernetes that Volcano 1.14 lists", '= "1.34"', '= "1.35"'),
    ],
    f"{KIT}/cluster.py": [
        ("Kubernetes that the test cluster says it is", 'KUBERNETES = "v1.34.4"', 'KUBERNETES = "v1.34.5"'),
    ],
    f"{KIT}/README.md": [
        ("versions on the test cluster's page", "Volcano 1.14.1", "Volcano 1.14.2"),
    ],
    "infra/aws_releases.json": [
        ("Kubernetes with a Neuron AMI whose driver the images take", '"1.34": {', '"1.33": {'),
    ],
    f"{VALUES}/monitoring.yaml": [
        ("labels of the PodMonitor", "app.kubernetes.io/part-of: millrace", "release: monitoring"),
    ],
    ADDONS: [
        ("network policies are enforced", 'enableNetworkPolicy = "true"', 'enableNetworkPolicy = "false"'),
        ("CSI drivers", "aws-fsx-csi-driver  ", "aws-efs-csi-driver  "),
    ],
    "k8s/base/people.yaml": [
        ("group of the people who deploy", PEOPLE_BINDING + "millrace-deployers", PEOPLE_BINDING + "deployers"),
    ],
    "infra/modules/trn-nodes/main.tf": [
        ("taint of the nodes", "key    = var.taint.key", 'key    = "neuron"'),
    ],
    "infra/modules/eks/identities.tf": [
        ("namespace of the identities", "namespace       = var.namespace", 'namespace       = "default"'),
    ],
    OUTPUTS: [
        ("images", ".dkr.ecr.", ".ecr."),
        ("pool of output cpu_node_group", "[local.node_groups.cpu]", "[local.node_groups.core]"),
        ("settings that are outputs", 'output "fsx_mount_name"', 'output "fsx_mount"'),
    ],
    f"{VALUES}/volcano.yaml": [
        ("nodes of add-on volcano", "millrace.dev/pool: core", "millrace.dev/pool: head"),
    ],
    f"{VALUES}/neuron.yaml": [
        ("nodes of add-on neuron", "millrace.dev/pool: trainium", "millrace.dev/pool: trn"),
        ("taint that add-on neuron tolerates", "key: aws.amazon.com/neuron", "key: neuron"),
    ],
    f"{VALUES}/efa.yaml": [
        ("nodes of add-on efa", "millrace.dev/pool: trainium", "millrace.dev/pool: cpu"),
        ("taint that add-on efa tolerates", "key: aws.amazon.com/neuron", "key: neuron"),
    ],
    "k8s/base/network-policies.yaml": [
        ("namespace of Prometheus", "name: monitoring", "name: metrics"),
    ],
}


def copy_repository(target: Path) -> Path:
    for part in PARTS:
        shutil.copytree(REPOSITORY / part, target / part, ignore=shutil.ignore_patterns(".terraform*", "*.tfstate*"))
    for name in FILES:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, target / name)
    return target


def render_with_outputs(root: Path, outputs: Thing) -> list[Thing]:
    """Render the overlay with the settings that `make infra-up` writes."""
    settings = root / OVERLAY / "settings.env"
    before = settings.read_text(encoding="utf-8")
    write_settings(outputs, settings)
    try:
        return render(root / OVERLAY)
    finally:
        settings.write_text(before, encoding="utf-8")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the repository's facts; a test that changes a file changes it back."""
    return copy_repository(tmp_path_factory.mktemp("contract"))


@pytest.fixture(scope="module")
def rendered(root: Path, kubectl: Path) -> list[Thing]:
    return render_with_outputs(root, example_outputs(root))


def disagreements(root: Path, objects: list[Thing]) -> list[str]:
    committed = read_settings(root / OVERLAY / "settings.env")
    return [str(each) for each in list_agreements(root, objects, committed) if not each.holds]


def test_both_sides_say_the_same(rendered: list[Thing]) -> None:
    found = disagreements(REPOSITORY, rendered)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "name", "what"),
    [
        (managed_node_groups, "POOL_LABEL", "label of the pools"),
        (managed_node_groups, "CORE", "pools"),
        (managed_node_groups, "TRAINIUM", "pools"),
        (cluster_workloads, "NAMESPACE", "namespace that infra-down empties"),
    ],
)
def test_a_name_in_the_commands_of_infra_that_is_changed_alone_is_found(
    module: ModuleType, name: str, what: str, rendered: list[Thing], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, "another")
    [found] = disagreements(REPOSITORY, rendered)
    assert found.startswith(what)
    assert "'another'" in found.partition(", k8s has ")[0]


@pytest.mark.parametrize(
    ("name", "what", "before", "after"), [(name, *each) for name, found in MUTATIONS.items() for each in found]
)
def test_a_side_that_is_changed_alone_is_found(
    name: str, what: str, before: str, after: str, rendered: list[Thing], root: Path
) -> None:
    text = (root / name).read_text(encoding="utf-8")
    assert before in text, f"{name} has no {before!r} any more: change this mutation"
    (root / name).write_text(text.replace(before, after, 1), encoding="utf-8")
    try:
        objects = render_with_outputs(root, example_outputs(REPOSITORY)) if name.startswith("k8s/") else rendered
        found = disagreements(root, objects)
    finally:
        (root / name).write_text(text, encoding="utf-8")
    assert any(each.startswith(f"{what}: ") for each in found), found
