"""Both overlays are what the API servers take, what Ray reads, and what the house promises; each check can fail.

Nothing is started: kubectl renders, and the schemas come from the modules that the test cluster is compiled from.
"""

from __future__ import annotations

import pytest

from infra.shapes import find_shape
from tests.k8s import rules
from tests.k8s.rendered import OVERLAYS, REMOVED, Thing, changed, name_of, pods_of
from tests.k8s.rules import Rule
from tests.k8s.schemas import WITHOUT_SCHEMA, Kind, Schema, problems_of

Breach = tuple[str, str, object, str]

ALL_RULES: list[Rule] = [*rules.EVERYWHERE, *rules.IN_PRODUCTION]
RULES_OF: dict[str, list[Rule]] = {"local": rules.EVERYWHERE, "eks": ALL_RULES}

TRN1 = find_shape("trn1.32xlarge")
CLUSTER, QUEUE = "RayCluster/millrace", "Queue/millrace"
HEAD = "/spec/headGroupSpec"
TRAINER = "/spec/workerGroupSpecs/2"
POD = f"{TRAINER}/template/spec"
CONTAINER = f"{POD}/containers/0"
LIMITS = f"{CONTAINER}/resources/limits"
OPERATOR = "/spec/ingress/0/from/1/podSelector/matchLabels"

# By rule: the object of the overlay eks, the field, its value, and a text that the rule then reports.
BREACHES: dict[Rule, list[Breach]] = {
    rules.every_stage_has_a_group: [
        (CLUSTER, TRAINER, REMOVED, "groups are ['tokenizer', 'compiler']"),
    ],
    rules.a_stage_has_one_name: [
        (CLUSTER, f"{TRAINER}/resources/stage_trainer", REMOVED, "routes is {}"),
        (CLUSTER, f"{TRAINER}/resources/stage_tokenizer", "1", "routes is"),
        (CLUSTER, f"{TRAINER}/labels/stage", "train", "Ray's label is"),
        (CLUSTER, f"{POD}/volumes/2/configMap/name", "recipe", "the recipe is"),
        (CLUSTER, f"{CONTAINER}/image", "millrace/compiler:1", "the image is"),
        (
            CLUSTER,
            f"{TRAINER}/template/metadata/annotations/scheduling.k8s.io~1group-name",
            "trainer",
            "the PodGroup is 'trainer', not 'millrace-trainer'",
        ),
    ],
    rules.what_pods_name_is_there: [
        ("PersistentVolumeClaim/fsx", "/metadata/name", "fs", "PersistentVolumeClaim fsx"),
        ("PriorityClass/millrace-head", "/metadata/name", "head", "head: PriorityClass"),
        (CLUSTER, f"{POD}/serviceAccountName", REMOVED, "trainer: ServiceAccount None"),
        (QUEUE, "/metadata/name", "other", "Queue millrace is not there"),
    ],
    rules.every_pod_mounts_the_file_system: [
        (CLUSTER, f"{POD}/volumes/1", REMOVED, "trainer: no claim"),
        (CLUSTER, f"{CONTAINER}/volumeMounts/2/name", "ini", "no volume ini"),
    ],
    rules.every_pod_can_write_where_its_image_writes: [
        (CLUSTER, f"{CONTAINER}/volumeMounts/0", REMOVED, "trainer: no folder of its own is mounted at /scratch"),
        (CLUSTER, f"{CONTAINER}/env/0", {"name": "TMPDIR", "value": "/tmp"}, "trainer: TMPDIR is the image's to say"),
        (CLUSTER, f"{CONTAINER}/workingDir", "/app", "the working dir"),
    ],
    rules.a_claim_and_its_volume_hold_each_other: [
        ("PersistentVolume/millrace-fsx", "/spec/claimRef/name", "other", "does not name it"),
        ("PersistentVolume/millrace-fsx", "/spec/persistentVolumeReclaimPolicy", "Delete", "is not retained"),
    ],
    rules.everything_is_in_one_namespace: [
        (CLUSTER, "/metadata/namespace", "default", "is in default"),
    ],
    rules.the_cluster_is_guarded_where_it_is: [
        (
            "ValidatingAdmissionPolicy/millrace-deployments",
            "/spec/matchConstraints/namespaceSelector/matchLabels/kubernetes.io~1metadata.name",
            "other",
            "namespace other is guarded, not millrace",
        ),
        (
            "ValidatingAdmissionPolicyBinding/millrace-deployments",
            "/spec/policyName",
            "other",
            "policy millrace-deployments is not bound",
        ),
    ],
    rules.names_fit_into_pods_names: [
        (CLUSTER, "/metadata/name", "m" * 43, "longer than 50"),
        (CLUSTER, "/metadata/name", "1-millrace", "no name for a RayCluster"),
    ],
    rules.ray_is_the_pinned_version: [
        (CLUSTER, "/spec/rayVersion", "2.59.0", "neuron images have 2.60.0"),
    ],
    rules.ray_reads_the_groups_as_meant: [
        (CLUSTER, f"{TRAINER}/resources/neuron_cores", REMOVED, f"{TRN1.neuron_cores} neuron_cores"),
        (CLUSTER, f"{TRAINER}/resources/stage_trainer", REMOVED, "cannot route"),
        (CLUSTER, f"{HEAD}/rayStartParams/num-cpus", REMOVED, "the head has CPUs"),
    ],
    rules.policies_select_pods_that_there_are: [
        ("NetworkPolicy/ray", "/spec/podSelector/matchLabels", {"ray.io/node": "yes"}, "ray: no pod has"),
        ("NetworkPolicy/jobs-api", OPERATOR, {"app.kubernetes.io/created-by": "kuberay-operator"}, "is also a Ray pod"),
    ],
    rules.the_deployer_may_touch_this_cluster_alone: [
        ("Role/deployer", "/rules/1/resourceNames", ["other"], "every RayCluster"),
        ("Role/deployer", "/rules/6/resources", ["secrets"], "deployer: ['secrets']"),
        ("RoleBinding/deployer", "/subjects/0/name", "default", "no account default"),
    ],
    rules.the_queue_has_room_for_each_gang: [
        (QUEUE, "/spec/capability/vpc.amazonaws.com~1efa", REMOVED, "trainer: vpc.amazonaws.com/efa is not capped"),
        (
            CLUSTER,
            f"{TRAINER}/maxReplicas",
            17,
            f"trainer: 17 pods need {17 * TRN1.neuron_devices} aws.amazon.com/neuron, above the cap",
        ),
    ],
    rules.the_operator_leaves_the_cluster_alone: [
        (CLUSTER, "/spec/upgradeStrategy/type", "Recreate", "Recreate"),
        (CLUSTER, "/spec/enableInTreeAutoscaling", True, "is set"),
    ],
    rules.ray_asks_for_a_token: [
        (CLUSTER, "/spec/authOptions", REMOVED, "authOptions is None"),
    ],
    rules.groups_wait_at_zero: [
        (CLUSTER, f"{TRAINER}/replicas", 1, "trainer: replicas is 1"),
        (CLUSTER, f"{TRAINER}/minReplicas", REMOVED, "minReplicas is None"),
    ],
    rules.gangs_are_volcanos: [
        (CLUSTER, f"{POD}/schedulerName", REMOVED, "trainer: None places it"),
        (CLUSTER, f"{HEAD}/template/spec/schedulerName", "volcano", "head: volcano places it"),
    ],
    rules.pods_may_do_nothing_else: [
        (CLUSTER, f"{POD}/securityContext/runAsNonRoot", False, "run as root"),
        (CLUSTER, f"{POD}/volumes/0", {"hostPath": {}}, "a folder of the node"),
        (CLUSTER, f"{POD}/hostNetwork", True, "the node's namespaces"),
        (CLUSTER, f"{CONTAINER}/securityContext/readOnlyRootFilesystem", REMOVED, "its root is writable"),
        (CLUSTER, f"{CONTAINER}/securityContext/capabilities", {}, "keeps capabilities"),
    ],
    rules.requests_are_limits: [
        (CLUSTER, f"{LIMITS}/memory", "441Gi", "trainer: requests and limits differ"),
    ],
    rules.ray_counts_the_pods_cpus: [
        (CLUSTER, f"{TRAINER}/resources/CPU", "128", f"counts 128 CPUs, the pod has {TRN1.pod_resources.cpus}"),
    ],
    rules.scratch_is_within_the_pods_storage: [
        (CLUSTER, f"{POD}/volumes/0/emptyDir", {}, "may grow to None"),
        (CLUSTER, f"{POD}/volumes/0/emptyDir/sizeLimit", "1Ti", "grow to 1Ti"),
        (CLUSTER, f"{POD}/volumes/3/emptyDir/sizeLimit", "441Gi", "grow to 441"),
    ],
    rules.trainium_pods_reach_trainium_nodes: [
        (CLUSTER, f"{POD}/tolerations", REMOVED, "the taint"),
        (CLUSTER, f"{POD}/nodeSelector", REMOVED, "no instance type"),
        (CLUSTER, f"{POD}/nodeSelector/millrace.dev~1pool", REMOVED, "its gang may straddle pools"),
        (CLUSTER, f"{LIMITS}/aws.amazon.com~1neuron", "8", "trainer: 8 of aws"),
    ],
}

# (the object of the overlay eks, the field, its value, what is reported)
MISSPELLED: list[tuple[str, str, object, str]] = [
    (CLUSTER, "/spec/rayversion", "2.60.0", "'rayversion' was unexpected"),
    (CLUSTER, f"{TRAINER}/minReplica", 0, "'minReplica' was unexpected"),
    (CLUSTER, f"{POD}/priorityclassName", "any", "'priorityclassName' was unexpected"),
    (CLUSTER, f"{CONTAINER}/volumeMounts/0/readonly", True, "'readonly' was unexpected"),
    (CLUSTER, f"{TRAINER}/template/metadata/anotations", {}, "'anotations' was unexpected"),
    (CLUSTER, "/metadata/label", {}, "'label' was unexpected"),
    (CLUSTER, f"{TRAINER}/replicas", "0", "is not of type 'integer'"),
    (CLUSTER, f"{LIMITS}/memory", "440GiB", "does not match"),
    (CLUSTER, f"{HEAD}/template/spec/containers", REMOVED, "'containers' is a required property"),
    (CLUSTER, "/spec/authOptions/mode", "password", "is not one of"),
    (QUEUE, "/spec/capabilities", {}, "'capabilities' was unexpected"),
    (QUEUE, "/spec/reclaimable", "no", "is not of type 'boolean'"),
    ("PersistentVolumeClaim/fsx", "/spec/accessMode", "any", "'accessMode' was unexpected"),
    ("PersistentVolumeClaim/fsx", "/spec/resources/requests/storage", "1200 Gi", "does not match"),
    ("NetworkPolicy/ray", "/spec/ingress/0/from/0/podselector", {}, "'podselector' was unexpected"),
    ("NetworkPolicy/dns", "/spec/egress/0/ports/0/port", [53], "is not of type"),
    ("Role/deployer", "/rules/0/resourceName", ["millrace"], "'resourceName' was unexpected"),
    ("PriorityClass/millrace-head", "/value", REMOVED, "'value' is a required property"),
    ("PriorityClass/millrace-head", "/apiVersion", "scheduling.k8s.io/v2", "has no such kind"),
]


def word_for(part: object) -> str | None:
    return part.rpartition("/")[2] if isinstance(part, str) else getattr(part, "__name__", None)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_api_servers_know_every_field(
    overlays: dict[str, list[Thing]], schemas: dict[Kind, Schema], overlay: str
) -> None:
    known = [thing for thing in overlays[overlay] if thing["kind"] not in WITHOUT_SCHEMA]

    assert [problem for thing in known for problem in problems_of(thing, schemas)] == []


@pytest.mark.parametrize(("name", "pointer", "value", "reported"), MISSPELLED)
def test_a_field_that_they_do_not_know_is_noticed(
    overlays: dict[str, list[Thing]],
    schemas: dict[Kind, Schema],
    name: str,
    pointer: str,
    value: object,
    reported: str,
) -> None:
    [thing] = [each for each in changed(overlays["eks"], name, pointer, value) if name_of(each) == name]

    assert any(reported in problem for problem in problems_of(thing, schemas))


@pytest.mark.parametrize(
    ("overlay", "rule"), [(overlay, rule) for overlay in OVERLAYS for rule in RULES_OF[overlay]], ids=word_for
)
def test_the_manifests_keep_the_rules(overlays: dict[str, list[Thing]], overlay: str, rule: Rule) -> None:
    assert rule(overlays[overlay]) == []


@pytest.mark.parametrize(
    ("rule", "name", "pointer", "value", "reported"),
    [(rule, *breach) for rule, breaches in BREACHES.items() for breach in breaches],
    ids=word_for,
)
def test_a_broken_rule_is_noticed(
    overlays: dict[str, list[Thing]], rule: Rule, name: str, pointer: str, value: object, reported: str
) -> None:
    before = rule(overlays["eks"])

    after = rule(changed(overlays["eks"], name, pointer, value))

    assert any(reported in problem for problem in after if problem not in before)


def test_every_rule_has_a_test_that_breaks_it() -> None:
    assert set(BREACHES) == set(ALL_RULES)


@pytest.mark.parametrize("rule", ALL_RULES, ids=word_for)
def test_a_compiler_on_cpu_nodes_keeps_the_rules(compiler_on_cpus: list[Thing], rule: Rule) -> None:
    assert rule(compiler_on_cpus) == []


def test_no_budget_keeps_a_drain_from_its_end(overlays: dict[str, list[Thing]]) -> None:
    """Every pod here is the only one of its kind, or one of a gang that cannot do without it."""
    assert [name_of(thing) for things in overlays.values() for thing in things if "Budget" in thing["kind"]] == []


def test_a_compile_on_cpu_nodes_takes_no_neuron_device(compiler_on_cpus: list[Thing]) -> None:
    """The compiler's pods select no Trainium node, so no such node idles while graphs are compiled."""
    pod = pods_of(compiler_on_cpus)["compiler"]["spec"]
    [container] = pod["containers"]

    assert container["resources"]["limits"].keys() == {"cpu", "memory", "ephemeral-storage"}
    assert "tolerations" not in pod
    assert pod["nodeSelector"] == {"millrace.dev/pool": "cpu"}
    assert "neuron_cores" not in rules.node_types_that_ray_reads(compiler_on_cpus)["compiler"]["resources"]
