"""People who deploy are no administrators: the API server refuses all ways around queue, accounts and images.

No image is needed: the API server judges, and nothing that it takes has to run.
"""

from __future__ import annotations

import copy
import io
import itertools
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from images.platforms import REPOSITORY
from k8s.client.network_probe import render_network_job
from k8s.client.overlay import write_overlay
from k8s.objects.api import Api, Object
from k8s.objects.deploy_job import render_deploy_job
from k8s.objects.names import RUN_LABEL
from k8s.objects.one_off_job import cpu_group_of, render_one_off_job, render_one_off_nodes_job
from k8s.objects.placement import heads_of
from k8s.objects.worker_group import read_worker_group
from services.common.recipe.schema import STAGES
from services.common.testing.waiting import wait_until
from tests.cluster.harness import write_overlay_of
from tests.cluster.kit import cluster
from tests.k8s.builders import deployment_of, one_off_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

DIGEST = f"sha256:{'0' * 64}"
HEAD_IMAGE = f"millrace/head@{DIGEST}"
NEURON = "aws.amazon.com/neuron"
PERSON = ("--as=somebody", "--as-group=millrace-deployers")
DEPLOYER = ("--as=system:serviceaccount:millrace:deployer",)
PULLED = f"millrace/trainer@{DIGEST}"


@dataclass(frozen=True)
class Answer:
    """The answer of the API server to one request."""

    is_taken: bool
    said: str

    @property
    def refused_by(self) -> str:
        """The admission policy, or the quota, that refused it; else the server's own words."""
        for name in ("millrace-jobs", "millrace-pods", "millrace-exec", "millrace-deployments"):
            if f"ValidatingAdmissionPolicy '{name}'" in self.said:
                return name
        return "quota" if "exceeded quota: millrace" in self.said else self.said


def ask(*words: str, body: Object | None = None, by: tuple[str, ...] = PERSON) -> Answer:
    text = json.dumps(body) if body else None
    command = [str(cluster.BIN / "kubectl"), "--kubeconfig", str(cluster.KUBECONFIG), "-n", "millrace", *by, *words]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    return Answer(done.returncode == 0, done.stdout + done.stderr)


def would_create(body: Object, by: tuple[str, ...] = PERSON) -> Answer:
    return ask("create", "--dry-run=server", "-f", "-", body=body, by=by)


@pytest.fixture(scope="module")
def guarded(kit: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """The manifests of stages on Trainium nodes, applied with images that no node has."""
    folder = tmp_path_factory.mktemp("admission")
    (folder / "fsx").mkdir()
    overlay = write_overlay_of(REPOSITORY / "tests/cluster/overlays/fake", folder / "overlay", folder / "fsx")
    text = io.StringIO()
    write_overlay(text, lambda: kit, overlay, HEAD_IMAGE)
    cluster.kubectl("apply", "--server-side", "-f", "-", input=text.getvalue())
    jobs = jobs_of(kit)
    bad = changed(jobs["deploy"], {f"{POD}/serviceAccountName": "reaper"})
    wait_until(lambda: not would_create(bad).is_taken, 60)  # the API server takes a moment to know its policies
    yield kit
    cluster.kubectl("-n", "millrace", "delete", "rayclusters,jobs,cronjobs", "--all")
    cluster.kubectl("delete", "--ignore-not-found", "-f", "-", input=text.getvalue())
    wait_until(lambda: kit.find("Namespace", "millrace") is None, 120)


def jobs_of(api: Api) -> dict[str, Object]:
    """A Job of each kind as the client makes it, by the label of its pods."""
    trainer = read_worker_group(api, "trainer")
    made = [render_network_job(read_worker_group(api, STAGES[0]), ["true"]), reaper_job(api)]
    made += [render_deploy_job(read_worker_group(api, name), deployment_of(name)) for name in STAGES]
    cpu_group = cpu_group_of(trainer.cluster)
    for stage in reversed(STAGES):  # of the kind one-off the tokenizer's is the one that is changed below
        one_off = one_off_of(stage, image=PULLED.replace("trainer", stage))
        made.append(render_one_off_job(read_worker_group(api, stage), cpu_group, one_off))
        made.append(render_one_off_nodes_job(cpu_group, one_off))
    return {each["spec"]["template"]["metadata"]["labels"]["millrace.dev/component"]: each for each in made}


def reaper_job(api: Api) -> Object:
    """A run of the reaper, as the CronJob's controller makes it."""
    cron = api.find("CronJob", "reaper")
    assert cron
    spec = cron["spec"]["jobTemplate"]["spec"]
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "reaper-1"}, "spec": spec}


def changed(thing: Object, fields: dict[str, object]) -> Object:
    """A copy with other values at these JSON pointers. `-` appends to a list, and None removes a field."""
    result = copy.deepcopy(thing)
    for pointer, value in fields.items():
        part: Any = result
        *path, last = [word.replace("~1", "/") for word in pointer.split("/")[1:]]
        for word in path:
            part = part[int(word)] if isinstance(part, list) else part[word]
        if last == "-":
            part.append(value)
        elif value is None:
            del part[last]
        else:
            part[int(last) if isinstance(part, list) else last] = value
    return result


def test_what_the_client_makes_is_taken(guarded: Api) -> None:
    answers = {kind: would_create(job) for kind, job in jobs_of(guarded).items()}
    assert {kind: answer.said for kind, answer in answers.items() if not answer.is_taken} == {}
    assert answers.keys() == {"deploy", "preflight", "reaper", "one-off", "one-off-nodes"}


SHELL = ["sh", "-c", "id"]
HOOK = {"postStart": {"exec": {"command": SHELL}}}
SECRET_OF_RAY = {"name": "T", "valueFrom": {"secretKeyRef": {"name": "millrace", "key": "auth_token"}}}
SECRET = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hugging-face", "key": "token"}}}
TOLERATES_NEURON = [{"key": NEURON, "operator": "Exists", "effect": "NoSchedule"}]
NODES_FOLDER = {"name": "more", "hostPath": {"path": "/dev"}}
TOKEN_MOUNT = {"name": "token", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"}
OTHER_SOURCE = {"secret": {"name": "millrace"}}
HOME_ON_CLAIM = {"name": "scratch", "persistentVolumeClaim": {"claimName": "fsx"}}
NAME = "/metadata/name"
LABELS = "/spec/template/metadata/labels"
POD = "/spec/template/spec"
CONTAINER = f"{POD}/containers/0"
INIT = f"{POD}/initContainers/0"
REQUESTS, LIMITS = f"{CONTAINER}/resources/requests", f"{CONTAINER}/resources/limits"
DEVICES: dict[str, object] = {f"{each}/aws.amazon.com~1neuron": "16" for each in (REQUESTS, LIMITS)}
JOB_ATTACKS: list[tuple[str, str, dict[str, object]]] = [
    ("a Job of no kind", "preflight", {f"{LABELS}/millrace.dev~1component": "mine"}),
    ("a deployment's name on another Job", "preflight", {NAME: "deploy-trainer"}),
    ("the reaper's account for a script", "preflight", {f"{POD}/serviceAccountName": "reaper"}),
    ("a Ray pod's label", "preflight", {f"{LABELS}/ray.io~1is-ray-node": "yes"}),
    ("a shell as the reaper", "reaper", {f"{CONTAINER}/command": SHELL}),
    ("a shell as the deployer", "deploy", {f"{CONTAINER}/command": SHELL}),
    ("modules from a folder", "reaper", {f"{CONTAINER}/workingDir": "/fsx/mine"}),
    ("a hook", "reaper", {f"{CONTAINER}/lifecycle": HOOK}),
    ("a second container", "reaper", {f"{POD}/containers/-": {"name": "b", "image": HEAD_IMAGE}}),
    ("many pods", "preflight", {"/spec/parallelism": 50, "/spec/completions": 50}),
    ("another secret", "deploy", {f"{CONTAINER}/env/-": SECRET}),
    ("a folder of the node", "deploy", {f"{POD}/volumes/-": NODES_FOLDER}),
    ("the node's network", "preflight", {f"{POD}/hostNetwork": True}),
    ("modules from a mount", "deploy", {f"{CONTAINER}/volumeMounts/-": {"name": "fsx", "mountPath": "/app"}}),
    ("a node by its name", "preflight", {f"{POD}/nodeName": "node-a"}),
    ("a subcommand of a week", "one-off", {"/spec/activeDeadlineSeconds": 604_800}),
    ("a priority", "preflight", {f"{POD}/priorityClassName": "system-node-critical"}),
    ("Volcano's default queue", "preflight", {f"{POD}/schedulerName": "volcano"}),
    ("Trainium nodes", "deploy", {f"{POD}/tolerations": TOLERATES_NEURON}),
    ("devices past the queue", "preflight", DEVICES),
    ("a whole node's CPUs", "preflight", {f"{REQUESTS}/cpu": "31"}),
    ("an image from elsewhere", "preflight", {f"{CONTAINER}/image": f"docker.io/somebody/trainer@{DIGEST}"}),
    ("an image by its tag", "preflight", {f"{CONTAINER}/image": "millrace/trainer:latest"}),
    ("a subcommand under another name", "one-off", {NAME: "one-off-trainer-1"}),
    ("a subcommand as another stage", "one-off", {f"{POD}/serviceAccountName": "trainer"}),
    ("a subcommand in another stage's image", "one-off", {f"{CONTAINER}/image": PULLED}),
    ("a shell in place of a subcommand", "one-off", {f"{CONTAINER}/command": SHELL}),
    ("a subcommand whose time does not run", "one-off", {"/spec/suspend": True}),
    ("a subcommand beside the head", "one-off", {f"{POD}/nodeSelector": {"millrace.dev/pool": "core"}}),
    ("a subcommand larger than a CPU node", "one-off", {f"{REQUESTS}/cpu": "31", f"{LIMITS}/cpu": "31"}),
    ("the Ray token in a subcommand", "one-off", {f"{CONTAINER}/env/-": SECRET_OF_RAY}),
    ("a shell that holds nodes", "one-off-nodes", {f"{CONTAINER}/command": SHELL}),
    ("a stage's image from elsewhere", "deploy", {f"{INIT}/image": f"docker.io/somebody/trainer@{DIGEST}"}),
    ("a stage's image by its tag", "deploy", {f"{INIT}/image": "millrace/trainer:latest"}),
    ("a second image before the controller", "deploy", {f"{POD}/initContainers/-": {"name": "b", "image": PULLED}}),
    ("an image before a subcommand", "one-off", {f"{POD}/initContainers": [{"name": "preflight", "image": PULLED}]}),
    ("a stage's image beside the controller", "deploy", {f"{INIT}/restartPolicy": "Always"}),
    ("the controller's processes in sight", "deploy", {f"{POD}/shareProcessNamespace": True}),
    ("the deployer's token for the stage's image", "deploy", {f"{INIT}/volumeMounts/-": TOKEN_MOUNT}),
    ("the deployer's token for every container", "deploy", {f"{POD}/automountServiceAccountToken": True}),
    ("the deployer's AWS account for the stage's image", "deploy", {"/spec/template/metadata/annotations": None}),
    ("the Ray token for the stage's image", "deploy", {f"{INIT}/env": [SECRET_OF_RAY]}),
    ("a secret beside the deployer's token", "deploy", {f"{POD}/volumes/4/projected/sources/-": OTHER_SOURCE}),
    ("a folder of the node in place of the token", "deploy", {f"{POD}/volumes/4": NODES_FOLDER | {"name": "token"}}),
    ("another config map than a recipe", "deploy", {f"{POD}/volumes/2/configMap/name": "kube-root-ca.crt"}),
    ("devices for the stage's image", "deploy", {f"{INIT}/resources/limits/aws.amazon.com~1neuron": "16"}),
    ("privileges for the stage's image", "deploy", {f"{INIT}/securityContext": None}),
    ("the controller's HOME for the stage's image", "deploy", {f"{INIT}/volumeMounts/0/name": "scratch"}),
    ("the stage's folder as the controller's HOME", "deploy", {f"{CONTAINER}/volumeMounts/0/name": "preflight"}),
    ("the file system as the controller's HOME", "deploy", {f"{POD}/volumes/0": HOME_ON_CLAIM}),
]


@pytest.mark.parametrize(
    ("kind", "fields"), [pytest.param(kind, fields, id=name) for name, kind, fields in JOB_ATTACKS]
)
def test_a_job_beyond_what_deploys_is_refused(guarded: Api, kind: str, fields: dict[str, object]) -> None:
    job = jobs_of(guarded)[kind]
    assert would_create(job).is_taken
    assert would_create(changed(job, fields)).refused_by == "millrace-jobs"


def test_a_token_for_text_is_the_tokenizer_s_alone(guarded: Api) -> None:
    """The tokenizer's pods have the token."""
    group = read_worker_group(guarded, "trainer")
    job = render_one_off_job(group, cpu_group_of(group.cluster), one_off_of("trainer", image=PULLED))
    assert would_create(job).is_taken
    assert would_create(changed(job, {f"{CONTAINER}/env/-": SECRET})).refused_by == "millrace-jobs"
    assert "hugging-face" in json.dumps(jobs_of(guarded)["one-off"])


def stage_pod(api: Api, stage: str = "trainer") -> Object:
    """A pod of the stage as the operator makes it, in what the policies look at."""
    template = read_worker_group(api, stage).spec["template"]
    labels = template["metadata"]["labels"] | {"ray.io/is-ray-node": "yes", "ray.io/group": stage}
    metadata = {"name": f"millrace-{stage}-worker-1", "labels": labels} | {
        "annotations": template["metadata"]["annotations"]
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": copy.deepcopy(template["spec"])}
    pod["spec"]["containers"][0]["image"] = PULLED
    return pod


COMPONENT = "/metadata/labels/millrace.dev~1component"
IMAGE = "/spec/containers/0/image"
POD_ATTACKS: list[tuple[str, dict[str, object]]] = [
    ("another account", {"/spec/serviceAccountName": "reaper"}),
    ("no component", {COMPONENT: None}),
    ("a deploy pod with Ray's labels", {COMPONENT: "deploy"}),
    ("no label of Ray's", {"/metadata/labels/ray.io~1is-ray-node": None, "/metadata/labels/ray.io~1group": None}),
    ("devices past Volcano", {"/spec/schedulerName": "default-scheduler"}),
    ("devices past the queue", {"/metadata/annotations/scheduling.k8s.io~1group-name": None}),
    ("an image from elsewhere", {IMAGE: f"ghcr.io/x/trainer@{DIGEST}"}),
    ("an image by its tag", {IMAGE: "millrace/trainer:latest"}),
    ("a subcommand with devices", {"/metadata/labels": {"millrace.dev/component": "one-off"}}),
    ("what holds a node, as a stage", {"/metadata/labels": {"millrace.dev/component": "one-off-nodes"}}),
]


@pytest.mark.parametrize("fields", [pytest.param(fields, id=name) for name, fields in POD_ATTACKS])
def test_a_pod_beyond_the_manifests_is_refused_to_everybody(guarded: Api, fields: dict[str, object]) -> None:
    pod = stage_pod(guarded)
    assert would_create(pod, by=()).said == "pod/millrace-trainer-worker-1 created (server dry run)\n"
    assert would_create(changed(pod, fields), by=()).refused_by == "millrace-pods"


def test_the_quota_bounds_what_the_policies_let_through(guarded: Api) -> None:
    resources = "/spec/containers/0/resources"
    devices: dict[str, object] = {
        f"{resources}/{kind}/aws.amazon.com~1neuron": "100000" for kind in ("requests", "limits")
    }
    assert would_create(changed(stage_pod(guarded), devices), by=()).refused_by == "quota"


def patch_cluster(api: Api, by: tuple[str, ...], fields: dict[str, object]) -> Answer:
    live = api.find("RayCluster", "millrace")
    assert live is not None
    patch = json.dumps({"spec": changed(live["spec"], fields)})
    return ask("patch", "raycluster", "millrace", "--type=merge", "--dry-run=server", "-p", patch, by=by)


GROUP = "/workerGroupSpecs/2"
GROUP_POD = f"{GROUP}/template/spec"
GROUP_LABELS = f"{GROUP}/template/metadata/labels"
HEADS_IMAGE = "/headGroupSpec/template/spec/containers/0/image"
OTHER_HEAD = f"millrace/other@{DIGEST}"


@pytest.mark.parametrize(
    ("by", "fields"),
    [
        pytest.param(PERSON, {f"{GROUP}/replicas": 1}, id="a person scales up"),
        pytest.param(PERSON, {f"{GROUP_POD}/containers/0/image": PULLED}, id="a person sets an image"),
        pytest.param(PERSON, {HEADS_IMAGE: OTHER_HEAD}, id="a person changes the head"),
        pytest.param(PERSON, {"/enableInTreeAutoscaling": True}, id="a person adds a scaler"),
        pytest.param(PERSON, {"/workerGroupSpecs": []}, id="a person removes the groups"),
        pytest.param(DEPLOYER, {HEADS_IMAGE: OTHER_HEAD}, id="a deploy Job changes the head"),
        pytest.param(DEPLOYER, {f"{GROUP_POD}/serviceAccountName": "reaper"}, id="a deploy Job changes the account"),
        pytest.param(DEPLOYER, {f"{GROUP_LABELS}/millrace.dev~1component": "head"}, id="a deploy Job changes a label"),
        pytest.param(DEPLOYER, {f"{GROUP_LABELS}/mine": "yes"}, id="a deploy Job adds a label"),
        pytest.param(DEPLOYER, {f"{GROUP_POD}/schedulerName": "default-scheduler"}, id="a deploy Job leaves the queue"),
    ],
)
def test_a_ray_cluster_is_changed_by_deployments_alone(
    guarded: Api, by: tuple[str, ...], fields: dict[str, object]
) -> None:
    assert patch_cluster(guarded, by, {}).is_taken
    assert patch_cluster(guarded, by, fields).refused_by == "millrace-deployments"


def test_a_deploy_job_gives_a_group_its_image_its_pods_and_the_label_of_its_run(guarded: Api) -> None:
    label = f"{GROUP_LABELS}/{RUN_LABEL.replace('/', '~1')}"
    fields = {f"{GROUP_POD}/containers/0/image": PULLED, f"{GROUP}/replicas": 2, label: "llama"}
    answer = patch_cluster(guarded, DEPLOYER, fields)
    assert answer.is_taken, answer.said


def test_a_person_looks_into_ray_s_pods_and_no_job_s(guarded: Api) -> None:
    """No container runs in these pods, which the API server reports only for pods that it would open."""
    jobs = jobs_of(guarded)
    for kind in ("deploy", "one-off"):
        assert ask("create", "-f", "-", body=jobs[kind]).is_taken
    selector = "millrace.dev/component in (deploy,one-off)"
    wait_until(lambda: len(guarded.find_all("Pod", selector)) == 2 and heads_of(guarded), 60)
    [one, other], [head] = guarded.find_all("Pod", selector), heads_of(guarded)
    parts = ("exec?command=id&stdout=true", "portforward?ports=8265")
    for part, of_a_job in itertools.product(parts, (one, other)):
        refused, opened = (
            ask(
                "create",
                "--raw",
                f"/api/v1/namespaces/millrace/pods/{pod['metadata']['name']}/{part}",
                "-f",
                "/dev/null",
            )
            for pod in (of_a_job, head)
        )
        assert refused.refused_by == "millrace-exec"
        assert not opened.is_taken
        assert "denied" not in opened.said
        assert "forbidden" not in opened.said.lower(), opened.said
    for kind in ("deploy", "one-off"):
        guarded.delete("Job", jobs[kind]["metadata"]["name"])


OTHERS = ("--as=somebody", "--as-group=others")
REAPER = ("--as=system:serviceaccount:millrace:reaper",)
RIGHTS_OF_PEOPLE = [
    *("create jobs.batch", "patch jobs.batch", "delete jobs.batch", "create configmaps", "get pods --subresource=log"),
    *("create pods --subresource=exec", "list events", "get secrets/millrace", "delete pods", "delete rayjobs.ray.io"),
    *("patch rayclusters.ray.io/millrace", "delete podgroups.scheduling.volcano.sh", "list nodes"),
    "list queues.scheduling.volcano.sh",
]
BEYOND_PEOPLE = ["get secrets/hugging-face", "create pods", "patch rayclusters.ray.io/other", "create rayjobs.ray.io"]


@pytest.mark.parametrize(
    ("by", "may", "may_not"),
    [
        (PERSON, RIGHTS_OF_PEOPLE, [*BEYOND_PEOPLE, "delete leases.coordination.k8s.io"]),
        (OTHERS, [], RIGHTS_OF_PEOPLE),
        (
            DEPLOYER,
            ["patch rayclusters.ray.io/millrace", "get rayclusters.ray.io/another", "delete pods", "get nodes"],
            ["patch rayclusters.ray.io/another", "get secrets", "get configmaps", "create pods", "create jobs"],
        ),
        (
            REAPER,
            ["patch rayclusters.ray.io/millrace"],
            ["get secrets", "create pods", "delete jobs", "create rayjobs.ray.io"],
        ),
    ],
    ids=["people", "others", "deployer", "reaper"],
)
def test_people_and_programs_may_do_their_work_and_no_more(
    guarded: Api, by: tuple[str, ...], may: list[str], may_not: list[str]
) -> None:
    asked = [*may, *may_not, "delete nodes"]
    assert [each for each in asked if ask("auth", "can-i", *each.split(), by=by).is_taken] == may
