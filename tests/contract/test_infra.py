"""The manifests of k8s/ use what infra/ makes. A change of one side in a copy is reported with both values."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from images.platforms import REPOSITORY
from infra.account import managed_node_groups
from infra.apply.overlay_settings import write_settings
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
WORKER_GROUP, STORAGE = "k8s/stages/trainer/worker-group.yaml", "infra/modules/storage/main.tf"

# The agreement that is broken, the file, a text in it, and its replacement: one or two of each group of agreements.
MUTATIONS: list[tuple[str, str, str, str]] = [
    ("namespace", MAIN, 'namespace       = "millrace"', 'namespace       = "train"'),
    ("namespace that infra-down empties", "k8s/base/kustomization.yaml", "namespace: millrace", "namespace: train"),
    ("images", MAIN, '["head", "tokenizer"', '["ray-head", "tokenizer"'),
    ("stages that reach the bucket", COMMON, '= ["tokenizer"]', '= ["trainer"]'),
    ("group of the people who deploy", MAIN, '"millrace-deployers"', '"deployers"'),
    ("service accounts that change node groups", MAIN, '["deployer", "reaper"]', '["deploy", "reaper"]'),
    ("label of the pools, in the commands", MAIN, '"millrace.dev/pool"', '"pool"'),
    ("shape on the label of pool cpu", MAIN, "cpu = var.cpu_nodes.shape", "cpu = var.core_nodes.shape"),
    ("label of the nodes of pool cpu", MAIN, "= local.node_labels.cpu", "= local.node_labels.core"),
    ("taint of Trainium nodes, in the commands", MAIN, 'key = "aws.amazon.com/neuron"', 'key = "neuron"'),
    ("pools, in the commands of infra", WORKER_GROUP, "millrace.dev/pool: trainium", "millrace.dev/pool: cpu"),
    ("TRAINIUM_SHAPE of settings.env", COMMON, '"trn1.32xlarge")', '"trn2.48xlarge")'),
    ("settings that are outputs", OUTPUTS, 'output "fsx_mount_name"', 'output "fsx_mount"'),
    ("GiB of volume millrace-fsx", "infra/shapes.json", '"gib": 1200', '"gib": 2400'),
    ("folders that are copied to the bucket", STORAGE, 'run = "hourly"', 'runs = "hourly"'),
    ("extended resources", RELEASES, "chart: aws-efa-k8s-device-plugin", "chart: efa"),
    ("version of volcano, here and in the test cluster", f"{KIT}/go.mod", "volcano v1.14.1", "volcano v1.15.0"),
    ("minor version of Kubernetes, here and in the test cluster", VARIABLES, '= "1.34"', '= "1.35"'),
    ("labels of the PodMonitor", f"{VALUES}/monitoring.yaml", "app.kubernetes.io/part-of: millrace", "release: x"),
    ("network policies are enforced", ADDONS, 'enableNetworkPolicy = "true"', 'enableNetworkPolicy = "false"'),
    ("nodes of add-on neuron", f"{VALUES}/neuron.yaml", "millrace.dev/pool: trainium", "millrace.dev/pool: trn"),
    ("taint that add-on efa tolerates", f"{VALUES}/efa.yaml", "key: aws.amazon.com/neuron", "key: neuron"),
]


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


def test_a_name_in_the_commands_of_infra_that_is_changed_alone_is_found(
    rendered: list[Thing], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(managed_node_groups, "TRAINIUM", "another")
    [found] = disagreements(REPOSITORY, rendered)
    assert found.startswith("pools, in the commands of infra: infra has {'another'")


@pytest.mark.parametrize(("what", "name", "before", "after"), MUTATIONS)
def test_a_side_that_is_changed_alone_is_found(
    what: str, name: str, before: str, after: str, rendered: list[Thing], root: Path
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
