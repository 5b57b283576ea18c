"""Reads the facts that infra/ and k8s/ must agree on: from HCL and tables there, from rendered manifests here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args

import hcl2
import yaml

from images.platforms import REPOSITORY
from infra.account import cluster_resources
from infra.teardown import neighbours
from infra.workloads import cluster_workloads
from k8s.objects.names import DEPLOYER, NAMESPACE, NEURON, NODE_POOL, POOL_LABEL, SHAPE_LABEL, stage_annotation
from services.common.recipe.section import Kind

Thing = dict[str, Any]

STACK = REPOSITORY / "infra/stacks/eks"
REGISTRY = "123456789012.dkr.ecr.us-west-2.amazonaws.com"
# Settings that people choose; no output of the stack has them.
CHOSEN = ("COMPILER_POOL", "RECIPE")
# Extended resource that a device plugin's chart adds to its nodes.
RESOURCE_OF_CHART = {"neuron-helm-chart": "aws.amazon.com/neuron", "aws-efa-k8s-device-plugin": "vpc.amazonaws.com/efa"}


class Agreement(NamedTuple):
    """A fact that infra/ and k8s/ both state, with both values."""

    what: str
    infra: Any
    k8s: Any


def read_text(path: str) -> str:
    return (REPOSITORY / path).read_text(encoding="utf-8")


def read_locals() -> Thing:
    """Read the stack's locals as literals."""
    blocks = plain([block for name in ("common.tf", "main.tf") for block in read_hcl(STACK / name)["locals"]])
    return {name: value for block in blocks for name, value in block.items()}


def read_defaults() -> dict[str, Thing]:
    """Read the defaults of the stack's variables by variable and attribute, which is "" for all but objects."""
    found: dict[str, Thing] = {}
    for block in [each for name in ("common.tf", "variables.tf") for each in read_hcl(STACK / name)["variable"]]:
        for name, variable in block.items():
            attributes = re.findall(r"(\w+)\s*=\s*optional\(\w+,\s*(\"[^\"]*\"|[0-9]+)\)", str(variable.get("type")))
            found[plain(name)] = {key: json.loads(text) for key, text in attributes} or {
                "": plain(variable.get("default"))
            }
    return found


def read_outputs() -> dict[str, str]:
    """Read the expressions of the stack's outputs."""
    blocks = plain(read_hcl(STACK / "outputs.tf")["output"])
    return {name: str(output["value"]) for block in blocks for name, output in block.items()}


def example_outputs() -> Thing:
    """Return the outputs that terraform has for the defaults, with ids like those of AWS, for `write_settings`."""
    own, defaults = read_locals(), read_defaults()
    return {
        "region": "us-west-2",
        "cluster_name": defaults["name"][""],
        "registry": REGISTRY,
        "fsx_id": "fs-0123456789abcdef0",
        "fsx_dns_name": "fs-0123456789abcdef0.fsx.us-west-2.amazonaws.com",
        "fsx_mount_name": "abcdefgh",
        "trainium_shape": defaults["trainium"]["shape"],
        "trainium_node_group": own["node_groups"]["trainium"],
        "trainium_max_nodes": defaults["trainium"]["max_nodes"],
        "cpu_shape": defaults["cpu_nodes"]["shape"],
        "cpu_node_group": own["node_groups"]["cpu"],
        "cpu_max_nodes": defaults["cpu_nodes"]["max_nodes"],
        "capacity_ends_at": "",
    }


def read_settings(path: Path) -> dict[str, str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def list_agreements(objects: list[Thing], committed: dict[str, str]) -> Iterator[Agreement]:
    """Compare both sides. `objects` is the overlay eks with `example_outputs`; `committed` its settings in git."""
    own, defaults = read_locals(), read_defaults()
    yield from _names(own, objects)
    yield from _placement(own, defaults, objects)
    yield from _volumes(objects)
    yield from _addons(defaults, objects)
    yield Agreement(
        "settings that are outputs",
        set(committed) - set(CHOSEN),
        {key for key in committed if key.lower() in read_outputs()},
    )
    example = {name.upper(): str(value) for name, value in example_outputs().items()}
    for key in ("TRAINIUM_SHAPE", "TRAINIUM_NODE_GROUP", "CPU_SHAPE", "CPU_NODE_GROUP"):
        yield Agreement(f"{key} of settings.env", example[key], committed.get(key))
    for pool, key in (("trainium", "TRAINIUM_SHAPE"), ("cpu", "CPU_SHAPE")):
        labelled = _resolved(own["node_shapes"][pool], defaults)
        yield Agreement(f"shape on the label of pool {pool}", labelled, committed.get(key))


def _names(own: Thing, objects: list[Thing]) -> Iterator[Agreement]:
    cluster = _one(objects, "RayCluster")
    yield Agreement("namespace", own["namespace"], cluster["metadata"]["namespace"])
    yield Agreement("namespace of the commands", own["namespace"], NAMESPACE)
    yield Agreement("namespace that infra-down empties", cluster_workloads.NAMESPACE, cluster["metadata"]["namespace"])
    namespaces = {each["metadata"]["name"] for each in _all(objects, "Namespace")}
    yield Agreement("namespaces that infra-down takes for its own", set(neighbours.NAMESPACES), namespaces)
    identities = read_text("infra/modules/eks/identities.tf")
    associated = re.findall(r"^  namespace += (.+)$", identities, re.MULTILINE)
    given = [own["namespace"] if each == "var.namespace" else each for each in associated]
    yield Agreement("namespace of the identities", given, [cluster["metadata"]["namespace"]])
    accounts = {_pod(group)["serviceAccountName"] for group in _groups(objects).values()}
    reaper = _one(objects, "CronJob")["spec"]["jobTemplate"]["spec"]["template"]["spec"]["serviceAccountName"]
    let_out = {
        name
        for policy in _all(objects, "NetworkPolicy")
        if policy["metadata"]["name"] == "text-sources"
        for name in [policy["spec"]["podSelector"]["matchLabels"]["ray.io/group"]]
    }
    yield Agreement("stages that reach the bucket", set(own["bucket_users"]), let_out & accounts)
    made = {each["metadata"]["name"] for each in _all(objects, "ServiceAccount")}
    # The client makes the deploy Jobs, so that no manifest has their account.
    scalers = {DEPLOYER} & made | {reaper}
    yield Agreement("service accounts that change node groups", set(own["node_scalers"]), scalers)
    bindings = _all(objects, "RoleBinding") + _all(objects, "ClusterRoleBinding")
    subjects = [subject for binding in bindings for subject in binding["subjects"]]
    groups = {subject["name"] for subject in subjects if subject["kind"] == "Group"}
    yield Agreement("group of the people who deploy", {own["operators_group"]}, groups)
    repositories = {f"{own['repository_prefix']}/{image}" for image in own["images"]}
    images = {container["image"] for pod in _pods(objects) for container in pod["containers"]}
    yield Agreement(
        "images",
        {f"{REGISTRY}/{name}" for name in repositories},
        {each.rpartition(":")[0] for each in images},
    )


def _placement(own: Thing, defaults: dict[str, Thing], objects: list[Thing]) -> Iterator[Agreement]:
    """Every pod selects its pool, by labels that only this pool's nodes have; terraform's tests hold the nodes' own."""
    label, taint = own["pool_label"], own["taint"]
    pods = {"head": _one(objects, "RayCluster")["spec"]["headGroupSpec"]["template"]["spec"]}
    pods |= {name: _pod(group) for name, group in _groups(objects).items()}
    used = {key: pod.get("nodeSelector", {}).get(label) for key, pod in pods.items()}
    yield Agreement("pools, by their label", set(own["node_groups"]), set(used.values()))
    zones = {key for pod in pods.values() for key in pod.get("nodeSelector", {}) if "zone" in key}
    yield Agreement("zones that pods select (the pool is in one)", set(), zones)
    yield Agreement("label of the pools, in the commands", label, POOL_LABEL)
    yield Agreement("label of the pools, in the commands of infra", cluster_resources.POOL_LABEL, POOL_LABEL)
    yield Agreement("pool of the head, in the commands of infra", cluster_resources.CORE, used["head"])
    yield Agreement("taint of Trainium nodes, in the commands", taint["key"], NEURON)
    yield Agreement("label of node groups' shapes, in the commands", own["shape_label"], SHAPE_LABEL)
    for name in _groups(objects):
        pool = used[name]
        annotation = _one(objects, "RayCluster")["metadata"]["annotations"].get(stage_annotation(name, NODE_POOL))
        made = f"{defaults['name']['']}/{own['node_groups'].get(pool)}"
        yield Agreement(f"node group of {name}", made, annotation)
        tolerated = [(each["key"], each["effect"]) for each in pods[name].get("tolerations", [])]
        tainted = [(taint["key"], taint["effect"])] if pool == "trainium" else []
        yield Agreement(f"taints that {name} tolerates", tainted, tolerated)


def _resolved(expression: str, defaults: dict[str, Thing]) -> Any:
    """Return the default of `${var.NAME.ATTRIBUTE}`."""
    _, name, attribute = expression.removeprefix("${").removesuffix("}").split(".")
    return defaults[name][attribute]


def _volumes(objects: list[Thing]) -> Iterator[Agreement]:
    example = example_outputs()
    made_gib = json.loads(read_text("infra/shapes.json"))["file_system"]["gib"]
    for volume in _all(objects, "PersistentVolume"):
        name, source = volume["metadata"]["name"], volume["spec"]["csi"]
        facts = [source["volumeHandle"], source["volumeAttributes"]["dnsname"], source["volumeAttributes"]["mountname"]]
        made = [example["fsx_id"], example["fsx_dns_name"], example["fsx_mount_name"]]
        yield Agreement(f"file system of volume {name}", made, facts)
        gib = int(volume["spec"]["capacity"]["storage"].removesuffix("Gi"))
        yield Agreement(f"GiB of volume {name}", made_gib, gib)
    text = read_text("infra/modules/storage/main.tf")
    [folders] = re.findall(r"exported_folders = { (.+) }", text)
    exported = set(re.findall(r"(\w+) =", folders))
    # Read and not imported, because the module needs torch.
    job = read_text("services/trainer/job.py")
    known = {*get_args(Kind), *re.findall(r'return root / "(\w+)" / run$', job, re.MULTILINE)}
    yield Agreement("folders that are copied to the bucket", exported, exported & known)


def _addons(defaults: dict[str, Thing], objects: list[Thing]) -> Iterator[Agreement]:
    releases = yaml.safe_load(read_text("infra/addons/addons.yaml"))["releases"]
    charts = {each["chart"]: each for each in releases}
    asked = {
        name
        for group in _groups(objects).values()
        for name in _pod(group)["containers"][0]["resources"]["requests"]
        if "/" in name
    }
    yield Agreement(
        "extended resources", {RESOURCE_OF_CHART[each] for each in charts if each in RESOURCE_OF_CHART}, asked
    )
    modules = dict(re.findall(r"^\s+(\S+) v(\S+)$", read_text("tests/cluster/kit/go.mod"), re.MULTILINE))
    volcano = charts["volcano"]["version"]
    yield Agreement("version of Volcano, here and in the test cluster", volcano, modules["volcano.sh/volcano"])
    version = str(defaults["kubernetes_version"][""])
    tested = modules["k8s.io/kubernetes"].rpartition(".")[0]
    yield Agreement("minor version of Kubernetes, here and in the test cluster", version, tested)
    known = json.loads(read_text("infra/aws_releases.json"))["eks"]["versions"]
    yield Agreement("Kubernetes with a Neuron AMI whose driver the images take", version in known, True)
    yield from _addon_pods(releases)
    [metrics] = [each for each in _all(objects, "NetworkPolicy") if each["metadata"]["name"] == "metrics"]
    [source] = metrics["spec"]["ingress"][0]["from"]
    allowed = source["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
    yield Agreement("namespace of Prometheus", charts["kube-prometheus-stack"]["namespace"], allowed)
    values = yaml.safe_load(read_text("infra/addons/values/monitoring.yaml"))
    spec = values["prometheus"]["prometheusSpec"]
    wanted = spec["podMonitorSelector"]["matchLabels"]
    for monitor in _all(objects, "PodMonitor"):
        labels = monitor["metadata"].get("labels", {})
        yield Agreement("labels of the PodMonitor", wanted, {name: labels.get(name) for name in wanted})
        [selected] = spec["podMonitorNamespaceSelector"]["matchExpressions"]
        namespace = monitor["metadata"]["namespace"]
        yield Agreement("namespace of the PodMonitor", {*selected["values"]} & {namespace}, {namespace})
    catalogue = read_text("infra/modules/eks/addons.tf")
    drivers = {each["spec"]["csi"]["driver"] for each in _all(objects, "PersistentVolume")}
    yield Agreement(
        "CSI drivers",
        {"fsx.csi.aws.com"} if re.search(r"aws-fsx-csi-driver += { controller", catalogue) else set(),
        drivers,
    )
    enforced = re.search(r'enableNetworkPolicy = "(\w+)"', catalogue)
    has_policies = bool(_all(objects, "NetworkPolicy"))
    yield Agreement("network policies are enforced", bool(enforced and enforced[1] == "true"), has_policies)
    agent = {policy["metadata"]["name"] for policy in _all(objects, "NetworkPolicy")} & {"pod-identity"}
    yield Agreement(
        "Pod Identity's agent and the way to it", "eks-pod-identity-agent" in catalogue, agent == {"pod-identity"}
    )


def _addon_pods(releases: list[Thing]) -> Iterator[Agreement]:
    """Compare the pools that add-ons' pods select, and the taints that device plugins tolerate."""
    own = read_locals()
    for release in releases:
        values = yaml.safe_load(read_text(f"infra/addons/values/{release['name']}.yaml"))
        pool = "trainium" if release["chart"] in RESOURCE_OF_CHART else "core"
        selectors = [found for key in ("nodeSelector", "default_ns") for found in _find_all(values, key)]
        selected = {f"{label}={value}" for selector in selectors for label, value in selector.items()}
        yield Agreement(f"nodes of add-on {release['name']}", {f"{own['pool_label']}={pool}"}, selected)
        if pool == "trainium":
            tolerations = [each for found in _find_all(values, "tolerations") for each in found]
            tolerated = [(each["key"], each.get("effect")) for each in tolerations if each["operator"] == "Exists"]
            taint = [(own["taint"]["key"], own["taint"]["effect"])]
            others = [each for each in tolerated if each[0] != "CriticalAddonsOnly"]
            yield Agreement(f"taint that add-on {release['name']} tolerates", taint, others)


def _find_all(values: Any, key: str) -> Iterator[Any]:
    """Yield all values of a key at any depth."""
    if isinstance(values, dict):
        for name, value in values.items():
            if name == key:
                yield value
            else:
                yield from _find_all(value, key)


def _groups(objects: list[Thing]) -> dict[str, Thing]:
    return {group["groupName"]: group for group in _one(objects, "RayCluster")["spec"]["workerGroupSpecs"]}


def _pod(group: Thing) -> Thing:
    spec: Thing = group["template"]["spec"]
    return spec


def _pods(objects: list[Thing]) -> Iterator[Thing]:
    """Yield the pod specs of the stages' namespace."""
    cluster = _one(objects, "RayCluster")["spec"]
    yield cluster["headGroupSpec"]["template"]["spec"]
    yield from (_pod(group) for group in cluster["workerGroupSpecs"])
    for job in _all(objects, "Job"):
        yield job["spec"]["template"]["spec"]
    for job in _all(objects, "CronJob"):
        yield job["spec"]["jobTemplate"]["spec"]["template"]["spec"]


def _all(objects: list[Thing], kind: str) -> list[Thing]:
    return [each for each in objects if each["kind"] == kind]


def _one(objects: list[Thing], kind: str) -> Thing:
    [found] = _all(objects, kind)
    return found


@cache
def read_hcl(path: Path) -> Thing:
    """Read a file of HCL, with the quotes that the parser leaves on strings; `plain` removes them."""
    parsed: Thing = hcl2.loads(path.read_text(encoding="utf-8"))
    return parsed


def plain(value: Any) -> Any:
    """The value that HCL means: hcl2 leaves the quotes on strings and adds entries of its own."""
    if isinstance(value, dict):
        return {plain(key): plain(each) for key, each in value.items() if not str(key).startswith("__")}
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, str) and len(value) > 1 and value[0] == value[-1] == '"':
        return json.loads(value)
    return None if value == "null" else value
