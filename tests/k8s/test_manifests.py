"""Both overlays are what the API servers take, what Ray reads, and what the house promises; each check can fail.

Nothing is started: kubectl renders, and the schemas come from the modules that the test cluster is compiled from.
"""

from __future__ import annotations

import pytest

from tests.k8s import rules
from tests.k8s.rendered import OVERLAYS, REMOVED, Thing, changed, name_of, pods_of
from tests.k8s.rules import Rule
from tests.k8s.schemas import WITHOUT_SCHEMA, Kind, Schema, problems_of

ALL_RULES: list[Rule] = [*rules.EVERYWHERE, *rules.IN_PRODUCTION]
RULES_OF: dict[str, list[Rule]] = {"local": rules.EVERYWHERE, "eks": ALL_RULES}

CLUSTER, QUEUE = "RayCluster/millrace", "Queue/millrace"
HEAD = "/spec/headGroupSpec"
TRAINER = "/spec/workerGroupSpecs/2"
POD = f"{TRAINER}/template/spec"
CONTAINER = f"{POD}/containers/0"
LIMITS = f"{CONTAINER}/resources/limits"
OPERATOR = "/spec/ingress/0/from/1/podSelector/matchLabels"
GUARD = "ValidatingAdmissionPolicy/millrace-deployments"
GUARDED = "/spec/matchConstraints/namespaceSelector/matchLabels/kubernetes.io~1metadata.name"
VOLUME = "PersistentVolume/millrace-fsx"

# The rule, the object of the overlay eks, the field, and a value that breaks the rule.
BREACHES: list[tuple[Rule, str, str, object]] = [
    (rules.a_stage_has_one_name, CLUSTER, f"{TRAINER}/resources/stage_trainer", REMOVED),
    (rules.a_stage_has_one_name, CLUSTER, f"{TRAINER}/resources/stage_tokenizer", "1"),
    (rules.what_pods_name_is_there, "PersistentVolumeClaim/fsx", "/metadata/name", "fs"),
    (rules.what_pods_name_is_there, "PriorityClass/millrace-head", "/metadata/name", "head"),
    (rules.a_claim_and_its_volume_hold_each_other, VOLUME, "/spec/claimRef/name", "other"),
    (rules.a_claim_and_its_volume_hold_each_other, VOLUME, "/spec/persistentVolumeReclaimPolicy", "Delete"),
    (rules.everything_is_in_one_namespace, CLUSTER, "/metadata/namespace", "default"),
    (rules.the_cluster_is_guarded_where_it_is, GUARD, GUARDED, "other"),
    (
        rules.the_cluster_is_guarded_where_it_is,
        "ValidatingAdmissionPolicyBinding/millrace-deployments",
        "/spec/policyName",
        "other",
    ),
    (rules.ray_is_the_pinned_version, CLUSTER, "/spec/rayVersion", "2.59.0"),
    (rules.ray_reads_the_groups_as_meant, CLUSTER, f"{TRAINER}/resources/neuron_cores", REMOVED),
    (rules.ray_reads_the_groups_as_meant, CLUSTER, f"{TRAINER}/resources/stage_trainer", REMOVED),
    (
        rules.policies_select_pods_that_there_are,
        "NetworkPolicy/ray",
        "/spec/podSelector/matchLabels",
        {"ray.io/node": "yes"},
    ),
    (
        rules.policies_select_pods_that_there_are,
        "NetworkPolicy/jobs-api",
        OPERATOR,
        {"app.kubernetes.io/created-by": "kuberay-operator"},
    ),
    (rules.the_deployer_may_touch_this_cluster_alone, "Role/deployer", "/rules/1/resourceNames", ["other"]),
    (rules.the_deployer_may_touch_this_cluster_alone, "Role/deployer", "/rules/6/resources", ["secrets"]),
    (rules.the_queue_has_room_for_each_gang, QUEUE, "/spec/capability/vpc.amazonaws.com~1efa", REMOVED),
    (rules.the_queue_has_room_for_each_gang, CLUSTER, f"{TRAINER}/maxReplicas", 17),
    (rules.the_operator_leaves_the_cluster_alone, CLUSTER, "/spec/upgradeStrategy/type", "Recreate"),
    (rules.the_operator_leaves_the_cluster_alone, CLUSTER, "/spec/enableInTreeAutoscaling", True),
    (rules.ray_asks_for_a_token, CLUSTER, "/spec/authOptions", REMOVED),
    (rules.groups_wait_at_zero, CLUSTER, f"{TRAINER}/replicas", 1),
    (rules.groups_wait_at_zero, CLUSTER, f"{TRAINER}/minReplicas", REMOVED),
    (rules.gangs_are_volcanos, CLUSTER, f"{POD}/schedulerName", REMOVED),
    (rules.gangs_are_volcanos, CLUSTER, f"{HEAD}/template/spec/schedulerName", "volcano"),
    (rules.pods_may_do_nothing_else, CLUSTER, f"{POD}/securityContext/runAsNonRoot", False),
    (rules.pods_may_do_nothing_else, CLUSTER, f"{POD}/volumes/0", {"hostPath": {}}),
    (rules.pods_may_do_nothing_else, CLUSTER, f"{POD}/hostNetwork", True),
    (rules.pods_may_do_nothing_else, CLUSTER, f"{CONTAINER}/securityContext/readOnlyRootFilesystem", REMOVED),
    (rules.requests_are_limits, CLUSTER, f"{LIMITS}/memory", "441Gi"),
    (rules.ray_counts_the_pods_cpus, CLUSTER, f"{TRAINER}/resources/CPU", "128"),
    (rules.scratch_is_within_the_pods_storage, CLUSTER, f"{POD}/volumes/0/emptyDir", {}),
    (rules.scratch_is_within_the_pods_storage, CLUSTER, f"{POD}/volumes/0/emptyDir/sizeLimit", "1Ti"),
    (rules.trainium_pods_reach_trainium_nodes, CLUSTER, f"{POD}/tolerations", REMOVED),
    (rules.trainium_pods_reach_trainium_nodes, CLUSTER, f"{POD}/nodeSelector", REMOVED),
    (rules.trainium_pods_reach_trainium_nodes, CLUSTER, f"{POD}/nodeSelector/millrace.dev~1pool", REMOVED),
    (rules.trainium_pods_reach_trainium_nodes, CLUSTER, f"{LIMITS}/aws.amazon.com~1neuron", "8"),
]

# The object of the overlay eks, the field, and a value that no API server takes.
MISSPELLED: list[tuple[str, str, object]] = [
    (CLUSTER, "/spec/rayversion", "2.60.0"),
    (CLUSTER, f"{POD}/priorityclassName", "any"),
    (CLUSTER, f"{TRAINER}/replicas", "0"),
    (CLUSTER, f"{LIMITS}/memory", "440GiB"),
    (CLUSTER, f"{HEAD}/template/spec/containers", REMOVED),
    (CLUSTER, "/spec/authOptions/mode", "password"),
    (QUEUE, "/spec/capabilities", {}),
    ("PersistentVolumeClaim/fsx", "/spec/resources/requests/storage", "1200 Gi"),
    ("NetworkPolicy/ray", "/spec/ingress/0/from/0/podselector", {}),
    ("Role/deployer", "/rules/0/resourceName", ["millrace"]),
    ("PriorityClass/millrace-head", "/apiVersion", "scheduling.k8s.io/v2"),
]


def word_for(part: object) -> str | None:
    return part.rpartition("/")[2] if isinstance(part, str) else getattr(part, "__name__", None)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_api_servers_know_every_field(
    overlays: dict[str, list[Thing]], schemas: dict[Kind, Schema], overlay: str
) -> None:
    known = [thing for thing in overlays[overlay] if thing["kind"] not in WITHOUT_SCHEMA]

    assert [problem for thing in known for problem in problems_of(thing, schemas)] == []


@pytest.mark.parametrize(("name", "pointer", "value"), MISSPELLED)
def test_a_field_that_they_do_not_know_is_noticed(
    overlays: dict[str, list[Thing]], schemas: dict[Kind, Schema], name: str, pointer: str, value: object
) -> None:
    [thing] = [each for each in changed(overlays["eks"], name, pointer, value) if name_of(each) == name]

    assert problems_of(thing, schemas)


@pytest.mark.parametrize(
    ("overlay", "rule"), [(overlay, rule) for overlay in OVERLAYS for rule in RULES_OF[overlay]], ids=word_for
)
def test_the_manifests_keep_the_rules(overlays: dict[str, list[Thing]], overlay: str, rule: Rule) -> None:
    assert rule(overlays[overlay]) == []


@pytest.mark.parametrize(("rule", "name", "pointer", "value"), BREACHES, ids=word_for)
def test_a_broken_rule_is_noticed(
    overlays: dict[str, list[Thing]], rule: Rule, name: str, pointer: str, value: object
) -> None:
    assert set(rule(changed(overlays["eks"], name, pointer, value))) - set(rule(overlays["eks"]))


@pytest.mark.parametrize("rule", ALL_RULES, ids=word_for)
def test_a_compiler_on_cpu_nodes_keeps_the_rules(compiler_on_cpus: list[Thing], rule: Rule) -> None:
    assert rule(compiler_on_cpus) == []


def test_a_compile_on_cpu_nodes_takes_no_neuron_device(compiler_on_cpus: list[Thing]) -> None:
    """The compiler's pods select no Trainium node, so no such node idles while graphs are compiled."""
    pod = pods_of(compiler_on_cpus)["compiler"]["spec"]
    [container] = pod["containers"]

    assert container["resources"]["limits"].keys() == {"cpu", "memory", "ephemeral-storage"}
    assert "tolerations" not in pod
    assert pod["nodeSelector"] == {"millrace.dev/pool": "cpu"}
    assert "neuron_cores" not in rules.node_types_that_ray_reads(compiler_on_cpus)["compiler"]["resources"]
