"""The rules of the manifests: each is a function that returns the violations of one rule."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

from kubernetes.utils.quantity import parse_quantity

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
    of_kind,
    pods_of,
)

Rule = Callable[[list[Thing]], list[str]]

# Who deploys: an administrator maps people to it. They look at these of the whole cluster.
PEOPLE = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": "millrace-deployers"}
LOOKED_AT = {"nodes", "queues", "priorityclasses"}
# Pods that no manifest here describes: the deploy tool's, and the operator's, however it was installed.
DEPLOY_JOB = {"millrace.dev/component": "deploy"}
POOL_PROBE = {"millrace.dev/component": "preflight-pool"}
ONE_OFFS = [
    *({"millrace.dev/component": "one-off", "millrace.dev/stage": stage} for stage in STAGES),
    {"millrace.dev/component": "one-off-nodes", "millrace.dev/stage": "trainer"},
]
OPERATOR = {"app.kubernetes.io/component": "kuberay-operator"}


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


def ray_is_the_pinned_version(things: list[Thing]) -> list[str]:
    said = cluster_of(things)["spec"].get("rayVersion")
    pins = {variant: platform.ray for variant, platform in read_platforms().items()}
    return [f"rayVersion is {said}, {variant} images have {ray}" for variant, ray in pins.items() if ray != said]


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
            if not is_a_look:
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
    a_claim_and_its_volume_hold_each_other,
    ray_is_the_pinned_version,
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
