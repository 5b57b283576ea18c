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
FILES = (
    *("infra/shapes.json", "infra/aws_releases.json"),
    *(f"tests/cluster/kit/{name}" for name in ("go.mod", "cluster.py", "README.md")),
)
MAIN, COMMON, VARIABLES = (f"infra/stacks/eks/{name}.tf" for name in ("main", "common", "variables"))
ADDONS = "infra/modules/eks/addons.tf"
OUTPUTS, VALUES = "infra/stacks/eks/outputs.tf", "infra/addons/values"
PEOPLE_BINDING = (
    "  name: millrace-people\nsubjects:\n  - apiGroup: rbac.authorization.k8s.io\n    kind: Group\n    name: "
)

# File, text, replacement; then the values of both sides in the message.
MUTATIONS = {
    "namespace, infra": (
        MAIN,
        'namespace       = "millrace"',
        'namespace       = "train"',
        "'train'",
        "'millrace'",
    ),
    "namespace, k8s": (
        "k8s/base/kustomization.yaml",
        "namespace: millrace",
        "namespace: train",
        "'millrace'",
        "'train'",
    ),
    "service account, infra": (
        COMMON,
        'bucket_users      = ["tokenizer"]',
        'bucket_users      = ["trainer"]',
        "'trainer'",
        "'tokenizer'",
    ),
    "reaper's account, k8s": (
        "k8s/base/reaper.yaml",
        "serviceAccountName: reaper",
        "serviceAccountName: mower",
        "'reaper'",
        "'mower'",
    ),
    "group of people, infra": (MAIN, '"millrace-deployers"', '"deployers"', "{'deployers'}", "{'millrace-deployers'}"),
    "image, infra": (MAIN, '["head", "tokenizer"', '["ray-head", "tokenizer"', "millrace/ray-head", "millrace/head"),
    "pool's label, infra": (MAIN, '"millrace.dev/pool"', '"pool"', "'trainium'", "None"),
    "shape's label, infra": (MAIN, '"millrace.dev/shape"', '"shape"', "'shape'", "'millrace.dev/shape'"),
    "shape of the CPU nodes' label, infra": (
        MAIN,
        "cpu = var.cpu_nodes.shape",
        "cpu = var.core_nodes.shape",
        "'m7i.2xlarge'",
        "'m7i.8xlarge'",
    ),
    "shape of the Trainium nodes' label, infra": (
        MAIN,
        "trainium = var.trainium.shape }",
        "trainium = var.cpu_nodes.shape }",
        "'m7i.8xlarge'",
        "'trn1.32xlarge'",
    ),
    "pool, k8s": (
        "k8s/stages/trainer/worker-group.yaml",
        "millrace.dev/pool: trainium",
        "millrace.dev/pool: cpu",
        "{'core', 'trainium'}",
        "{'core', 'cpu'}",
    ),
    "taint, infra": (
        MAIN,
        'key = "aws.amazon.com/neuron"',
        'key = "neuron"',
        "('neuron', 'NoSchedule')",
        "('aws.amazon.com/neuron', 'NoSchedule')",
    ),
    "node group, settings": (
        f"{OVERLAY}/settings.env",
        "TRAINIUM_NODE_GROUP=trainium",
        "TRAINIUM_NODE_GROUP=trn",
        "'trainium'",
        "'trn'",
    ),
    "shape, infra": (COMMON, '"trn1.32xlarge")', '"trn2.48xlarge")', "'trn2.48xlarge'", "'trn1.32xlarge'"),
    "devices, shapes": (
        "infra/shapes.json",
        '"neuron_devices": 16',
        '"neuron_devices": 12',
        "'aws.amazon.com/neuron': 12",
        "'aws.amazon.com/neuron': 16",
    ),
    "queue, k8s": (
        "k8s/base/queue.yaml",
        "  reclaimable: false",
        '  reclaimable: false\n  capability: {cpu: "1000", memory: 1500Gi}',
        "'memory': 2208",
        "'memory': 1500",
    ),
    "claim, k8s": ("k8s/base/fsx-claim.yaml", "name: fsx\n", "name: fsx-static-pvc\n", "'millrace-fsx'", "None"),
    "volume, k8s": (
        "k8s/base/fsx-claim.yaml",
        "volumeName: millrace-fsx",
        "volumeName: fsx",
        "'millrace-fsx'",
        "'fsx'",
    ),
    "size of the file system, infra": ("infra/shapes.json", '"gib": 1200', '"gib": 2400', "2400", "1200"),
    "folder in the bucket, infra": (
        "infra/modules/storage/main.tf",
        'toset(["checkpoint"])',
        'toset(["checkpoints"])',
        "{'checkpoints'}",
        "set()",
    ),
    "device plugin, add-ons": (
        "infra/addons/addons.yaml",
        "chart: aws-efa-k8s-device-plugin",
        "chart: efa",
        "{'aws.amazon.com/neuron'}",
        "'vpc.amazonaws.com/efa'",
    ),
    "KubeRay, add-ons": ("infra/addons/addons.yaml", "version: 1.6.1", "version: 1.7.0", "'1.7.0'", "'1.6.1'"),
    "Volcano, test cluster": (
        "tests/cluster/kit/go.mod",
        "volcano.sh/volcano v1.14.1",
        "volcano.sh/volcano v1.15.0",
        "'1.14.1'",
        "'1.15.0'",
    ),
    "Kubernetes, infra": (VARIABLES, '= "1.34"', '= "1.35"', "'1.35'", "'1.34'"),
    "Kubernetes that Volcano does not list, infra": (VARIABLES, '= "1.34"', '= "1.35"', "'1.34'", "'1.35'"),
    "Kubernetes, test cluster": (
        "tests/cluster/kit/go.mod",
        "k8s.io/kubernetes v1.34.4",
        "k8s.io/kubernetes v1.35.4",
        "'1.34'",
        "'1.35'",
    ),
    "Kubernetes, what the test cluster says": (
        "tests/cluster/kit/cluster.py",
        'KUBERNETES = "v1.34.4"',
        'KUBERNETES = "v1.34.5"',
        "'1.34.5'",
        "'1.34.4'",
    ),
    "Volcano, page of the test cluster": (
        "tests/cluster/kit/README.md",
        "Volcano 1.14.1",
        "Volcano 1.14.2",
        "'1.14.2'",
        "'1.14.1'",
    ),
    "AMI of the version of Kubernetes, infra": (
        "infra/aws_releases.json",
        '"1.34": {',
        '"1.33": {',
        "False",
        "True",
    ),
    "zone, k8s": (
        "k8s/stages/trainer/worker-group.yaml",
        "millrace.dev/pool: trainium",
        "millrace.dev/pool: trainium, topology.kubernetes.io/zone: us-west-2d",
        "set()",
        "'topology.kubernetes.io/zone'",
    ),
    "PodMonitor, add-ons": (
        "infra/addons/values/monitoring.yaml",
        "app.kubernetes.io/part-of: millrace",
        "release: monitoring",
        "{'release': 'monitoring'}",
        "{'release': None}",
    ),
    "network policies, infra": (
        ADDONS,
        'enableNetworkPolicy = "true"',
        'enableNetworkPolicy = "false"',
        "False",
        "True",
    ),
    "CSI driver, infra": (ADDONS, "aws-fsx-csi-driver  ", "aws-efs-csi-driver  ", "set()", "{'fsx.csi.aws.com'}"),
    "account that changes node groups, infra": (
        MAIN,
        '["deployer", "reaper"]',
        '["deploy", "reaper"]',
        "{'deploy', 'reaper'}",
        "{'deployer', 'reaper'}",
    ),
    "group of people over the whole cluster, k8s": (
        "k8s/base/people.yaml",
        PEOPLE_BINDING + "millrace-deployers",
        PEOPLE_BINDING + "deployers",
        "{'millrace-deployers'}",
        "{'deployers', 'millrace-deployers'}",
    ),
    "label of the Trainium nodes, infra": (
        MAIN,
        "labels             = local.node_labels.trainium",
        "labels             = local.node_labels.core",
        "'core'",
        "'trainium'",
    ),
    "label of the CPU nodes, infra": (
        MAIN,
        "labels     = local.node_labels.cpu",
        "labels     = local.node_labels.core",
        "'core'",
        "'cpu'",
    ),
    "taint of the nodes, infra": (
        "infra/modules/trn-nodes/main.tf",
        "key    = var.taint.key",
        'key    = "neuron"',
        "neuron",
        "'aws.amazon.com/neuron'",
    ),
    "namespace of identities, infra": (
        "infra/modules/eks/identities.tf",
        "namespace       = var.namespace",
        'namespace       = "default"',
        "default",
        "['millrace']",
    ),
    "registry, infra": (OUTPUTS, ".dkr.ecr.", ".ecr.", "123456789012.ecr.us-west-2", "123456789012.dkr.ecr.us-west-2"),
    "CPU nodes, output": (OUTPUTS, "[local.node_groups.cpu]", "[local.node_groups.core]", "'core'", "'cpu'"),
    "pool of Volcano, add-ons": (
        f"{VALUES}/volcano.yaml",
        "millrace.dev/pool: core",
        "millrace.dev/pool: head",
        "{'millrace.dev/pool=core'}",
        "{'millrace.dev/pool=head'}",
    ),
    "pool of Neuron's plugin, add-ons": (
        f"{VALUES}/neuron.yaml",
        "millrace.dev/pool: trainium",
        "millrace.dev/pool: trn",
        "{'millrace.dev/pool=trainium'}",
        "{'millrace.dev/pool=trainium', 'millrace.dev/pool=trn'}",
    ),
    "pool of EFA's plugin, add-ons": (
        f"{VALUES}/efa.yaml",
        "millrace.dev/pool: trainium",
        "millrace.dev/pool: cpu",
        "{'millrace.dev/pool=trainium'}",
        "{'millrace.dev/pool=cpu'}",
    ),
    "toleration of Neuron's plugin, add-ons": (
        f"{VALUES}/neuron.yaml",
        "key: aws.amazon.com/neuron",
        "key: neuron",
        "{'aws.amazon.com/neuron'}",
        "{'neuron'}",
    ),
    "toleration of EFA's plugin, add-ons": (
        f"{VALUES}/efa.yaml",
        "key: aws.amazon.com/neuron",
        "key: neuron",
        "{'aws.amazon.com/neuron'}",
        "{'neuron'}",
    ),
    "namespace of Prometheus, add-ons": (
        "infra/addons/addons.yaml",
        "namespace: monitoring",
        "namespace: prometheus",
        "'prometheus'",
        "'monitoring'",
    ),
    "namespace of Prometheus, k8s": (
        "k8s/base/network-policies.yaml",
        "kubernetes.io/metadata.name: monitoring",
        "kubernetes.io/metadata.name: metrics",
        "'monitoring'",
        "'metrics'",
    ),
    "an output, infra": (
        "infra/stacks/eks/outputs.tf",
        'output "fsx_mount_name"',
        'output "fsx_mount"',
        "'FSX_MOUNT_NAME'",
        "'FSX_ID'",
    ),
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


@pytest.mark.parametrize("broken", MUTATIONS)
def test_a_side_that_is_changed_alone_is_found(broken: str, rendered: list[Thing], root: Path) -> None:
    name, before, after, infra_says, k8s_says = MUTATIONS[broken]
    text = (root / name).read_text(encoding="utf-8")
    assert before in text, f"{name} has no {before!r} any more: change this mutation"
    (root / name).write_text(text.replace(before, after, 1), encoding="utf-8")
    try:
        objects = render_with_outputs(root, example_outputs(REPOSITORY)) if name.startswith("k8s/") else rendered
        found = disagreements(root, objects)
    finally:
        (root / name).write_text(text, encoding="utf-8")
    print("\n".join(found))
    assert any(
        infra_says in each.partition(", k8s has ")[0] and k8s_says in each.partition(", k8s has ")[2] for each in found
    )
