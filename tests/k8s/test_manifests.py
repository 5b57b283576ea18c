"""Both overlays keep the rules, each a function that lists violations. An API server judges in `tests/cluster`."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

import pytest
from kubernetes.utils.quantity import parse_quantity

from images.platforms import read_platforms
from tests.k8s.rendered import Thing, cluster_of, containers_of, groups_of, of_kind, pods_of

Rule = Callable[[list[Thing]], list[str]]


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


def ray_asks_for_a_token_and_the_operator_replaces_no_pods(things: list[Thing]) -> list[str]:
    """tests/cluster has gangs, groups and images."""
    expected = {"authOptions": {"mode": "token"}, "upgradeStrategy": {"type": "None"}, "enableInTreeAutoscaling": None}
    spec = cluster_of(things)["spec"]
    return [f"{field} is {spec.get(field)}" for field, value in expected.items() if spec.get(field) != value]


def pods_may_do_nothing_else(things: list[Thing]) -> list[str]:
    """The API server holds pods to the standard `restricted`. Beyond it: a read-only root, and no token of the API."""
    standard = of_kind(things, "Namespace")["millrace"]["metadata"]["labels"].get("pod-security.kubernetes.io/enforce")
    problems = [] if standard == "restricted" else [f"pod security is {standard}"]
    for name, pod in pods_of(things).items():
        if pod["spec"].get("automountServiceAccountToken") is not False:
            problems.append(f"{name}: it has a token of the Kubernetes API")
        roots = [each.get("securityContext", {}).get("readOnlyRootFilesystem") for each in containers_of(pod)]
        if roots != [True] * len(roots):
            problems.append(f"{name}: its root is writable")
    return problems


def requests_are_limits(things: list[Thing]) -> list[str]:
    """Ray counts the limits and the schedulers the requests; tests/contract/test_targets.py has what Ray is told."""
    sizes = {name: pod["spec"]["containers"][0]["resources"] for name, pod in pods_of(things).items()}
    return [f"{name}: requests and limits differ" for name, size in sizes.items() if size["requests"] != size["limits"]]


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


def the_quota_is_what_all_pods_ask_for(things: list[Thing]) -> list[str]:
    """Jobs as large as the policies allow, five heads, four one-offs, and worker groups at full size."""
    hard = of_kind(things, "ResourceQuota")["millrace"]["spec"]["hard"]
    notes = of_kind(things, "Namespace")["millrace"]["metadata"]["annotations"]
    one_off = {name: notes[f"millrace.dev/one-off-{key}"] for name, key in (("cpu", "cpus"), ("memory", "memory"))}
    pods = pods_of(things)
    sizes = {name: pod["spec"]["containers"][0]["resources"]["requests"] for name, pod in pods.items()}
    counts = {name: group["maxReplicas"] for name, group in groups_of(things).items()}
    asked = [({"cpu": "200m", "memory": "1Gi"}, int(hard["count/jobs.batch"])), (one_off, 4), (sizes["head"], 5)]
    asked += [(sizes[name], count) for name, count in counts.items()]
    total = {"pods": Decimal(sum(count for _, count in asked))}
    for name in ("cpu", "memory", "aws.amazon.com/neuron", "vpc.amazonaws.com/efa"):
        total[f"requests.{name}"] = sum((parse_quantity(size.get(name, 0)) * n for size, n in asked), Decimal(0))
    return [f"{name}: {hard[name]}, not {most}" for name, most in total.items() if parse_quantity(hard[name]) != most]


def a_notice_is_said_once(things: list[Thing]) -> list[str]:
    """Kubernetes waits 30 s longer than the annotation says; tests/contract has the variables of Ray."""
    pods = {stage: group["template"] for stage, group in groups_of(things).items()}
    drains = {stage: int(pod["metadata"]["annotations"]["millrace.dev/drain-seconds"]) for stage, pod in pods.items()}
    found = {stage: pod["spec"]["terminationGracePeriodSeconds"] - 30 for stage, pod in pods.items()}
    return [f"{stage}: {found[stage]} s, not {drain}" for stage, drain in drains.items() if found[stage] != drain]


def _limits_of(pod: Thing) -> dict[str, Decimal]:
    limits = pod["spec"]["containers"][0]["resources"]["limits"]
    return {name: parse_quantity(amount) for name, amount in limits.items()}


EVERYWHERE: list[Rule] = [
    a_claim_and_its_volume_hold_each_other,
    ray_is_the_pinned_version,
    ray_asks_for_a_token_and_the_operator_replaces_no_pods,
    pods_may_do_nothing_else,
    the_quota_is_what_all_pods_ask_for,
    a_notice_is_said_once,
]
# The local overlay asks its one small node for less than Ray may count.
IN_PRODUCTION: list[Rule] = [
    requests_are_limits,
    scratch_is_within_the_pods_storage,
]
ALL_RULES: list[Rule] = [*EVERYWHERE, *IN_PRODUCTION]
ON_CPUS = "eks with a compiler on CPU nodes"
RULES_OF: dict[str, list[Rule]] = {"local": EVERYWHERE, "eks": ALL_RULES, ON_CPUS: ALL_RULES}


def word_for(part: object) -> str | None:
    return part.rpartition("/")[2] if isinstance(part, str) else getattr(part, "__name__", None)


@pytest.mark.parametrize(
    ("overlay", "rule"), [(overlay, rule) for overlay in RULES_OF for rule in RULES_OF[overlay]], ids=word_for
)
def test_the_manifests_keep_the_rules(
    overlays: dict[str, list[Thing]], compiler_on_cpus: list[Thing], overlay: str, rule: Rule
) -> None:
    assert rule(compiler_on_cpus if overlay == ON_CPUS else overlays[overlay]) == []


def test_a_compile_on_cpu_nodes_takes_no_neuron_device(compiler_on_cpus: list[Thing]) -> None:
    """The compiler's pods select no Trainium node, so no such node idles while graphs are compiled."""
    pod = pods_of(compiler_on_cpus)["compiler"]["spec"]
    [container] = pod["containers"]

    assert container["resources"]["limits"].keys() == {"cpu", "memory", "ephemeral-storage"}
    assert "tolerations" not in pod
    assert pod["nodeSelector"] == {"millrace.dev/pool": "cpu"}
    assert "neuron_cores" not in groups_of(compiler_on_cpus)["compiler"]["resources"]
    assert cluster_of(compiler_on_cpus)["metadata"]["annotations"]["millrace.dev/compiler-node-pool"].endswith("/cpu")
