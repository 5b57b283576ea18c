"""The rules of the manifests: each is a function that returns the violations of one rule."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from kubernetes.utils.quantity import parse_quantity
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

from images.platforms import read_platforms
from infra.shapes import read_shapes
from k8s.objects.names import EFA, INSTANCE_TYPE_LABEL, NEURON, POOL_LABEL
from services.common.recipe.schema import STAGES
from tests.k8s.rendered import (
    Thing,
    cluster_of,
    containers_of,
    groups_of,
    labels_of,
    name_of,
    of_kind,
    pods_of,
)

Rule = Callable[[list[Thing]], list[str]]

SETUP = dict.fromkeys(
    ("NetworkPolicy/deny", "PersistentVolumeClaim/fsx-setup", "Job/file-system-owner"), "millrace-setup"
)
OUTSIDE_OF_NAMESPACES = {"Namespace", "PriorityClass", "PersistentVolume", "ClusterRole", "ClusterRoleBinding"}
# Who deploys: an administrator maps people to it. They look at these of the whole cluster, and ask what they may.
PEOPLE = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": "millrace-deployers"}
LOOKED_AT = {"nodes", "queues", "priorityclasses"}
QUESTIONS = ["selfsubjectaccessreviews", "subjectaccessreviews"]
# Pods that no manifest here describes: the deploy tool's, and the operator's, however it was installed.
DEPLOY_JOB = {"millrace.dev/component": "deploy"}
POOL_PROBE = {"millrace.dev/component": "preflight-pool"}
ONE_OFFS = [
    *({"millrace.dev/component": "one-off", "millrace.dev/stage": stage} for stage in STAGES),
    {"millrace.dev/component": "one-off-nodes", "millrace.dev/stage": "trainer"},
]
OPERATOR = {"app.kubernetes.io/component": "kuberay-operator"}


def a_stage_has_one_name(things: list[Thing]) -> list[str]:
    """The group's name is in everything that belongs to the stage: the deploy tool and the operators go by it."""
    cluster = cluster_of(things)["metadata"]["name"]
    return [
        f"{stage}: {what} is {found!r}, not {expected!r}"
        for stage, group in groups_of(things).items()
        for what, found, expected in _names_of(stage, group, cluster)
        if found != expected
    ]


def _names_of(stage: str, group: Thing, cluster: str) -> list[tuple[str, Any, Any]]:
    """Yield the things that are named after a stage: their kind, their name, and the name that they should have."""
    meta, spec = group["template"]["metadata"], group["template"]["spec"]
    annotations = meta.get("annotations", {})
    recipes = [volume["configMap"]["name"] for volume in spec["volumes"] if "configMap" in volume]
    routes = {name: amount for name, amount in group.get("resources", {}).items() if name.startswith("stage_")}
    return [
        ("Ray's label", group.get("labels"), {"stage": stage}),
        ("the resource that routes", routes, {f"stage_{stage}": "1"}),
        ("the component", meta.get("labels", {}).get("millrace.dev/component"), stage),
        ("the PodGroup", annotations.get("scheduling.k8s.io/group-name"), f"{cluster}-{stage}"),
        ("Volcano's task", annotations.get("volcano.sh/task-spec"), stage),
        ("the service account", spec.get("serviceAccountName"), stage),
        ("the recipe", recipes, [f"{stage}-recipe"]),
        ("the containers", [each["name"] for each in spec["containers"]], [stage]),
        ("the image", re.findall(r"millrace/[^:@]+", spec["containers"][0]["image"]), [f"millrace/{stage}"]),
    ]


def what_pods_name_is_there(things: list[Thing]) -> list[str]:
    wanted = {f"{name}: {each}" for name, pod in pods_of(things).items() for each in _named_by(pod)}
    wanted |= {f"the gangs: Queue {cluster_of(things)['metadata'].get('annotations', {}).get('volcano.sh/queue-name')}"}
    there = {f"{thing['kind']} {thing['metadata']['name']}" for thing in things}
    return sorted(f"{each} is not there" for each in wanted if each.partition(": ")[2] not in there)


def _named_by(pod: Thing) -> set[str]:
    spec = pod["spec"]
    claims = [volume["persistentVolumeClaim"] for volume in spec["volumes"] if "persistentVolumeClaim" in volume]
    return {
        f"ServiceAccount {spec.get('serviceAccountName')}",
        f"PriorityClass {spec.get('priorityClassName')}",
        *(f"PersistentVolumeClaim {claim['claimName']}" for claim in claims),
    }


def a_claim_and_its_volume_hold_each_other(things: list[Thing]) -> list[str]:
    """Else another claim takes the volume, or deleting the claim deletes the artifacts."""
    problems = []
    for name, claim in of_kind(things, "PersistentVolumeClaim").items():
        volume = of_kind(things, "PersistentVolume").get(claim["spec"]["volumeName"], {"spec": {}})["spec"]
        if volume.get("claimRef") != {"namespace": claim["metadata"]["namespace"], "name": name}:
            problems.append(f"{name}: its volume does not name it")
        if volume.get("persistentVolumeReclaimPolicy") != "Retain":
            problems.append(f"{name}: its volume is not retained")
    return problems


def everything_is_in_one_namespace(things: list[Thing]) -> list[str]:
    """kustomize writes it into the Queue and the policy too, which have none; an API server takes it out again. What
    prepares the cluster as root is in another, because this one is restricted."""
    namespace = _restricted_namespace(things)
    return [
        f"{thing['kind']} {thing['metadata']['name']} is in {thing['metadata'].get('namespace')}"
        for thing in things
        if thing["metadata"].get("namespace")
        != (None if thing["kind"] in OUTSIDE_OF_NAMESPACES else SETUP.get(name_of(thing), namespace))
    ]


def _restricted_namespace(things: list[Thing]) -> str:
    label = "pod-security.kubernetes.io/enforce"
    [name] = [
        name for name, each in of_kind(things, "Namespace").items() if each["metadata"]["labels"][label] == "restricted"
    ]
    return name


def the_cluster_is_guarded_where_it_is(things: list[Thing]) -> list[str]:
    """The policies name the namespace in a selector, which kustomize does not write."""
    namespace = _restricted_namespace(things)
    policies = of_kind(things, "ValidatingAdmissionPolicy")
    guarded = {
        policy["spec"]["matchConstraints"]["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
        for policy in policies.values()
    }
    bound = [each["spec"]["policyName"] for each in of_kind(things, "ValidatingAdmissionPolicyBinding").values()]
    problems = [f"namespace {each} is guarded, not {namespace}" for each in guarded - {namespace}]
    return problems + [f"policy {name} is not bound" for name in policies if name not in bound]


def ray_is_the_pinned_version(things: list[Thing]) -> list[str]:
    said = cluster_of(things)["spec"].get("rayVersion")
    pins = {variant: platform.ray for variant, platform in read_platforms().items()}
    return [f"rayVersion is {said}, {variant} images have {ray}" for variant, ray in pins.items() if ray != said]


def ray_reads_the_groups_as_meant(things: list[Thing]) -> list[str]:
    types = node_types_that_ray_reads(things)
    problems = [] if types["headgroup"]["resources"]["CPU"] == 0 else ["the head has CPUs for work"]
    for stage, group in groups_of(things).items():
        found = types[stage]
        if found["max_workers"] != group["maxReplicas"]:
            problems.append(f"{stage}: Ray reads {found['max_workers']} as the most workers")
        if found["labels"] != {"stage": stage} or found["resources"].get(f"stage_{stage}") != 1:
            problems.append(f"{stage}: Ray cannot route to it by {found['labels']} and {found['resources']}")
        cores = _cores_of(group["template"])
        if found["resources"].get("neuron_cores", 0) != cores:
            problems.append(f"{stage}: Ray does not count {cores} neuron_cores")
    return problems


def _cores_of(pod: Thing) -> int:
    """NeuronCores of a node, which the workers of the pod share."""
    node = pod["spec"].get("nodeSelector", {}).get(INSTANCE_TYPE_LABEL, "")
    return read_shapes()[node].neuron_cores if NEURON in _limits_of(pod) and node in read_shapes() else 0


def node_types_that_ray_reads(things: list[Thing]) -> dict[str, Any]:
    """The head's and the groups' nodes as Ray's own reader of a RayCluster, its autoscaler's, counts them."""
    return dict(_derive_autoscaling_config_from_ray_cr(cluster_of(things))["available_node_types"])


def policies_select_pods_that_there_are(things: list[Thing]) -> list[str]:
    """A selector that matches no pod, or one too many, is accepted without a word."""
    pods = [*labels_of(things).values(), DEPLOY_JOB, POOL_PROBE, *ONE_OFFS, *labels_of_cron_jobs(things)]
    problems = []
    for name, policy in of_kind(things, "NetworkPolicy").items():
        spec = policy["spec"]
        peers = [peer for rule in spec.get("ingress", []) for peer in rule.get("from", [])]
        peers += [peer for rule in spec.get("egress", []) for peer in rule.get("to", [])]
        near = [peer for peer in peers if "namespaceSelector" not in peer and "ipBlock" not in peer]
        here = [spec["podSelector"], *(peer["podSelector"] for peer in near)]
        far = [peer["podSelector"] for peer in peers if "namespaceSelector" in peer and "podSelector" in peer]
        problems += [f"{name}: no pod has {each}" for each in here if not any(selects(each, pod) for pod in pods)]
        problems += [f"{name}: {each} is not the operator" for each in far if not selects(each, OPERATOR)]
        problems += [f"{name}: {each} is also a Ray pod" for each in far if any(selects(each, pod) for pod in pods)]
    return problems


def selects(selector: Thing, labels: dict[str, str]) -> bool:
    among = {each["key"]: each["values"] for each in selector.get("matchExpressions", [])}  # all say In
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(key) in values for key, values in among.items()
    )


def labels_of_cron_jobs(things: list[Thing]) -> list[dict[str, str]]:
    jobs = of_kind(things, "CronJob").values()
    return [job["spec"]["jobTemplate"]["spec"]["template"]["metadata"]["labels"] for job in jobs]


def the_deployer_may_touch_this_cluster_alone(things: list[Thing]) -> list[str]:
    problems = []
    for name, role in of_kind(things, "Role").items():
        for rule in role["rules"]:
            resources = set(rule["resources"])
            is_ours = rule.get("resourceNames") == [cluster_of(things)["metadata"]["name"]]
            if "rayclusters" in resources and not set(rule["verbs"]) <= {"get", "list"} and not is_ours:
                problems.append(f"{name}: every RayCluster")
            is_token = is_ours and rule["verbs"] == ["get"]
            is_too_much = resources & {"*"} or ("secrets" in resources and not is_token)
            if is_too_much or "*" in (*rule["verbs"], *rule["apiGroups"]):
                problems.append(f"{name}: {sorted(resources)}")
    for name, role in of_kind(things, "ClusterRole").items():
        for rule in role["rules"]:
            is_a_look = rule["verbs"] == ["get", "list"] and set(rule["resources"]) <= LOOKED_AT
            is_a_question = rule == {"apiGroups": ["authorization.k8s.io"], "resources": QUESTIONS, "verbs": ["create"]}
            if not (is_a_look or is_a_question):
                problems.append(f"{name}: more of the whole cluster than to look at nodes")
    bindings = of_kind(things, "RoleBinding") | of_kind(things, "ClusterRoleBinding")
    for name, binding in bindings.items():
        accounts = [subject["name"] for subject in binding["subjects"] if subject != PEOPLE]
        if binding["roleRef"]["name"] not in of_kind(things, binding["roleRef"]["kind"]):
            problems.append(f"{name}: no role {binding['roleRef']['name']}")
        problems += [f"{name}: no account {each}" for each in accounts if each not in of_kind(things, "ServiceAccount")]
    return problems


def the_queue_has_room_for_each_gang(things: list[Thing]) -> list[str]:
    """Every resource is capped, because one that is not named has no cap, and no gang is larger than the cap."""
    [queue] = of_kind(things, "Queue").values()
    caps = queue["spec"]["capability"]
    problems = []
    for stage, group in groups_of(things).items():
        for resource, amount in _requests_of(group["template"]).items():
            whole = amount * group["maxReplicas"]
            if resource not in caps:
                problems.append(f"{stage}: {resource} is not capped")
            elif parse_quantity(caps[resource]) < whole:
                problems.append(f"{stage}: {group['maxReplicas']} pods need {whole} {resource}, above the cap")
    return problems


def the_operator_leaves_the_cluster_alone(things: list[Thing]) -> list[str]:
    """The operator scales no group by itself, and restarts no pods because an image has changed."""
    spec = cluster_of(things)["spec"]
    unwanted = ("enableInTreeAutoscaling", "autoscalerOptions", "gcsFaultToleranceOptions", "suspend")
    problems = [f"{field} is set" for field in unwanted if field in spec]
    if spec.get("upgradeStrategy") != {"type": "None"}:
        problems.append(f"upgradeStrategy is {spec.get('upgradeStrategy')}")
    return problems


def ray_asks_for_a_token(things: list[Thing]) -> list[str]:
    options = cluster_of(things)["spec"].get("authOptions")
    return [] if options == {"mode": "token"} else [f"authOptions is {options}"]


def groups_wait_at_zero(things: list[Thing]) -> list[str]:
    return [
        f"{stage}: {field} is {group.get(field)}"
        for stage, group in groups_of(things).items()
        for field in ("replicas", "minReplicas")
        if group.get(field) != 0
    ]


def gangs_are_volcanos(things: list[Thing]) -> list[str]:
    """The head is no member of a gang: it is there before and after all of them."""
    expected = dict.fromkeys(groups_of(things), "volcano") | {"head": None}
    found = {name: pod["spec"].get("schedulerName") for name, pod in pods_of(things).items()}
    return [f"{name}: {found[name]} places it" for name in expected if found[name] != expected[name]]


def pods_may_do_nothing_else(things: list[Thing]) -> list[str]:
    """The pod security standard `restricted`, a read-only root, and no token of the Kubernetes API."""
    problems = []
    for name, pod in pods_of(things).items():
        spec, context = pod["spec"], pod["spec"].get("securityContext", {})
        rules = {
            "it may run as root": context.get("runAsNonRoot") is not True or context.get("runAsUser") == 0,
            "no seccomp profile": context.get("seccompProfile") != {"type": "RuntimeDefault"},
            "it has a token of the Kubernetes API": spec.get("automountServiceAccountToken") is not False,
            "it mounts a folder of the node": any("hostPath" in volume for volume in spec["volumes"]),
            "it shares the node's namespaces": any(spec.get(f"host{each}") for each in ("Network", "PID", "IPC")),
        }
        problems += [f"{name}: {rule}" for rule, is_broken in rules.items() if is_broken]
        problems += [f"{name}: {each}" for container in containers_of(pod) for each in _liberties_of(container)]
    return problems


def _liberties_of(container: Thing) -> list[str]:
    context = container.get("securityContext", {})
    rules = {
        "privileged": context.get("privileged") is True,
        "its root is writable": context.get("readOnlyRootFilesystem") is not True,
        "it may gain privileges": context.get("allowPrivilegeEscalation") is not False,
        "it keeps capabilities": context.get("capabilities") != {"drop": ["ALL"]},
        "it overrides the pod's user": bool({"runAsUser", "runAsNonRoot"} & context.keys()),
    }
    return [rule for rule, is_broken in rules.items() if is_broken]


def requests_are_limits(things: list[Thing]) -> list[str]:
    """Ray counts the limits and the schedulers the requests."""
    sizes = {name: pod["spec"]["containers"][0]["resources"] for name, pod in pods_of(things).items()}
    return [f"{name}: requests and limits differ" for name, size in sizes.items() if size["requests"] != size["limits"]]


def ray_counts_the_pods_cpus(things: list[Thing]) -> list[str]:
    return [
        f"{stage}: Ray counts {group['resources'].get('CPU')} CPUs, the pod has {_limits_of(group['template'])['cpu']}"
        for stage, group in groups_of(things).items()
        if parse_quantity(group["resources"].get("CPU", 0)) != _limits_of(group["template"])["cpu"]
    ]


def scratch_is_within_the_pods_storage(things: list[Thing]) -> list[str]:
    """A pod that fills an unbounded folder is evicted, and its node's other pods before it."""
    problems = []
    for name, pod in pods_of(things).items():
        limits = _limits_of(pod)
        for volume in pod["spec"]["volumes"]:
            folder = volume.get("emptyDir", {"sizeLimit": "0"})
            size, is_memory = folder.get("sizeLimit"), folder.get("medium") == "Memory"
            limit = limits.get("memory" if is_memory else "ephemeral-storage", Decimal(0))
            if size is None or parse_quantity(size) > limit:
                problems.append(f"{name}: {volume['name']} may grow to {size}, the pod to {limit}")
    return problems


def trainium_pods_reach_trainium_nodes(things: list[Thing]) -> list[str]:
    """Whole nodes of one pool and type: no scheduler extension that picks devices acts on pods that Volcano places, and
    a gang is on one network."""
    problems = []
    for stage, group in groups_of(things).items():
        spec, limits = group["template"]["spec"], _limits_of(group["template"])
        if NEURON not in limits:
            continue
        selector = spec.get("nodeSelector", {})
        shape = read_shapes().get(selector.get(INSTANCE_TYPE_LABEL))
        wanted = {NEURON: shape.neuron_devices, EFA: shape.efa_cards} if shape else {}
        problems += [f"{stage}: {limits.get(each)} of {each}" for each in wanted if limits.get(each) != wanted[each]]
        if NEURON not in {each["key"] for each in spec.get("tolerations", [])}:
            problems.append(f"{stage}: the taint {NEURON} keeps it away")
        if shape is None:
            problems.append(f"{stage}: no instance type is selected")
        if not selector.get(POOL_LABEL):
            problems.append(f"{stage}: its gang may straddle pools")
    return problems


def _limits_of(pod: Thing) -> dict[str, Decimal]:
    return _quantities(pod["spec"]["containers"][0]["resources"]["limits"])


def _requests_of(pod: Thing) -> dict[str, Decimal]:
    """The requests that schedulers count; a limit without a request stands for the request."""
    resources = pod["spec"]["containers"][0]["resources"]
    return _quantities(resources["limits"] | resources["requests"])


def _quantities(resources: Thing) -> dict[str, Decimal]:
    return {name: parse_quantity(amount) for name, amount in resources.items()}


EVERYWHERE: list[Rule] = [
    a_stage_has_one_name,
    what_pods_name_is_there,
    a_claim_and_its_volume_hold_each_other,
    everything_is_in_one_namespace,
    the_cluster_is_guarded_where_it_is,
    ray_is_the_pinned_version,
    ray_reads_the_groups_as_meant,
    policies_select_pods_that_there_are,
    the_deployer_may_touch_this_cluster_alone,
    the_queue_has_room_for_each_gang,
    the_operator_leaves_the_cluster_alone,
    ray_asks_for_a_token,
    groups_wait_at_zero,
    gangs_are_volcanos,
    pods_may_do_nothing_else,
]
# The local overlay asks its one small node for less than Ray may count.
IN_PRODUCTION: list[Rule] = [
    requests_are_limits,
    ray_counts_the_pods_cpus,
    scratch_is_within_the_pods_storage,
    trainium_pods_reach_trainium_nodes,
]
