"""People who deploy are no administrators: the API server refuses all ways around queue, accounts and images.

No image is needed: the API server judges, and nothing that it takes has to run.
"""

from __future__ import annotations

import copy
import io
import itertools
import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from images.platforms import REPOSITORY
from k8s.client.overlay import write_overlay
from k8s.client.probe import Probe, probe_head, probe_stage
from k8s.client.reaper_job import start_reaper
from k8s.objects.api import Api, Object
from k8s.objects.deploy_job import render_deploy_job
from k8s.objects.names import RUN_LABEL
from k8s.objects.one_off_job import OneOff, cpu_group_of, render_one_off_job, render_one_off_nodes_job
from k8s.objects.placement import heads_of
from k8s.objects.worker_group import WorkerGroup, read_worker_group
from services.common.recipe.schema import STAGES, Stage
from services.common.testing.waiting import wait_until
from tests.cluster.harness import write_overlay as write_overlay_of
from tests.cluster.kit import cluster
from tests.k8s.builders import deployment_of

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


class Recorder:
    """An API whose new objects are only written down."""

    def __init__(self, api: Api) -> None:
        self.created: list[Object] = []
        self.find = api.find

    def create(self, body: Object) -> Object:
        self.created.append(body)
        return body | {"metadata": body["metadata"] | {"uid": "none"}}

    def delete(self, *_: object, **__: object) -> None: ...


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
    bad = changed(jobs["deploy"], lambda job: pod_of(job).update(serviceAccountName="reaper"))
    wait_until(lambda: not would_create(bad).is_taken, 60)  # the API server takes a moment to know its policies
    yield kit
    cluster.kubectl("-n", "millrace", "delete", "rayclusters,jobs,cronjobs", "--all")
    cluster.kubectl("delete", "--ignore-not-found", "-f", "-", input=text.getvalue())
    wait_until(lambda: kit.find("Namespace", "millrace") is None, 120)


def jobs_of(api: Api) -> dict[str, Object]:
    """A Job of each kind as the client makes it, by the label of its pods."""
    recorder: Any = Recorder(api)
    trainer = read_worker_group(api, "trainer")
    in_pool = copy.deepcopy(trainer.cluster)
    in_pool["metadata"]["annotations"]["millrace.dev/trainer-node-pool"] = "millrace/trainium"
    probes: list[Probe] = [
        probe_head(recorder, WorkerGroup("trainer", in_pool, trainer.index)),
        probe_head(recorder, trainer),
        *(probe_stage(recorder, read_worker_group(api, name), PULLED, "", [], 1800) for name in STAGES),
    ]
    for probe in probes:
        with probe:
            pass
    assert start_reaper(recorder)
    recorder.created += [render_deploy_job(read_worker_group(api, name), deployment_of(name)) for name in STAGES]
    cpu_group = cpu_group_of(trainer.cluster)
    for stage in reversed(STAGES):  # of the kind one-off the tokenizer's is the one that is changed below
        one_off = one_off_of(stage)
        recorder.created.append(render_one_off_job(read_worker_group(api, stage), cpu_group, one_off))
        recorder.created.append(render_one_off_nodes_job(cpu_group, one_off))
    return {each["spec"]["template"]["metadata"]["labels"]["millrace.dev/component"]: each for each in recorder.created}


def one_off_of(stage: Stage) -> OneOff:
    image = PULLED.replace("trainer", stage)
    return OneOff(stage, "abc123", "0" * 16, image, ("artifacts", "list", "."), "packed", 3_600, "somebody")


def pod_of(job: Object) -> Object:
    return dict.__getitem__(job["spec"]["template"], "spec")


def container_of(job: Object) -> Object:
    return dict(pod_of(job))["containers"][0]


def changed(thing: Object, change: Callable[[Object], object]) -> Object:
    result = copy.deepcopy(thing)
    change(result)
    return result


def test_what_the_client_makes_is_taken(guarded: Api) -> None:
    answers = {kind: would_create(job) for kind, job in jobs_of(guarded).items()}
    assert {kind: answer.said for kind, answer in answers.items() if not answer.is_taken} == {}
    assert answers.keys() == {"deploy", "preflight", "preflight-pool", "reaper", "one-off", "one-off-nodes"}


def with_label(key: str, value: str) -> Callable[[Object], object]:
    return lambda job: job["spec"]["template"]["metadata"]["labels"].update({key: value})


def with_pod(**fields: object) -> Callable[[Object], object]:
    return lambda job: pod_of(job).update(fields)


def with_container(**fields: object) -> Callable[[Object], object]:
    return lambda job: container_of(job).update(fields)


def with_resources(**amounts: str) -> Callable[[Object], object]:
    named = {name.replace("neuron", NEURON): amount for name, amount in amounts.items()}
    return lambda job: container_of(job)["resources"].update(
        requests=container_of(job)["resources"]["requests"] | named,
        limits=container_of(job)["resources"]["limits"] | {k: v for k, v in named.items() if k != "cpu"},
    )


def with_second_container(job: Object) -> None:
    pod_of(job)["containers"].append({**container_of(job), "name": "b"})


def with_cpus(amount: str) -> Callable[[Object], object]:
    return lambda job: [each.update(cpu=amount) for each in container_of(job)["resources"].values()]


def with_volume(source: Object) -> Callable[[Object], object]:
    return lambda job: pod_of(job)["volumes"].append({"name": "more", **source})


def with_mount(path: str) -> Callable[[Object], object]:
    return lambda job: container_of(job)["volumeMounts"].append({"name": "fsx", "mountPath": path})


def with_variable(**variable: object) -> Callable[[Object], object]:
    return lambda job: container_of(job)["env"].append(variable)


def with_spec(**fields: object) -> Callable[[Object], object]:
    return lambda job: job["spec"].update(fields)


SHELL = ["sh", "-c", "id"]
SECRET_OF_RAY = {"secretKeyRef": {"name": "millrace", "key": "auth_token"}}
SECRET = {"secretKeyRef": {"name": "hugging-face", "key": "token"}}
TOLERATES_NEURON = [{"key": NEURON, "operator": "Exists", "effect": "NoSchedule"}]
JOB_ATTACKS: list[tuple[str, str, Callable[[Object], object]]] = [
    ("a Job of no kind", "preflight", with_label("millrace.dev/component", "mine")),
    ("a deployment's name on another Job", "preflight", lambda job: job["metadata"].update(name="deploy-trainer")),
    ("the reaper's account for a script", "preflight", with_pod(serviceAccountName="reaper")),
    ("the default account", "preflight", with_pod(serviceAccountName="default")),
    ("a Ray pod's label", "preflight", with_label("ray.io/is-ray-node", "yes")),
    ("a shell as the reaper", "reaper", with_container(command=SHELL)),
    ("a shell as the deployer", "deploy", with_container(command=SHELL)),
    ("a stage's image as the reaper", "reaper", with_container(image=PULLED)),
    ("modules from a folder", "reaper", with_container(workingDir="/fsx/mine")),
    ("modules from a variable", "reaper", with_variable(name="PYTHONPATH", value="/fsx/mine")),
    ("a hook", "reaper", with_container(lifecycle={"postStart": {"exec": {"command": SHELL}}})),
    ("a second container", "reaper", with_second_container),
    (
        "a container before",
        "reaper",
        lambda job: pod_of(job).update(initContainers=[{**container_of(job), "name": "b"}]),
    ),
    ("many pods", "preflight", with_spec(parallelism=50, completions=50)),
    ("another secret", "preflight", with_variable(name="TOKEN", valueFrom=SECRET)),
    ("a mounted secret", "preflight", with_volume({"secret": {"secretName": "hugging-face"}})),
    ("a folder of the node", "preflight", with_volume({"hostPath": {"path": "/dev"}})),
    ("the node's network", "preflight", with_pod(hostNetwork=True)),
    ("a privileged container", "preflight", with_container(securityContext={"privileged": True})),
    ("modules from a mount", "deploy", with_mount("/app")),
    ("a probe", "deploy", with_container(livenessProbe={"exec": {"command": SHELL}})),
    ("a mounted account's token", "preflight", with_volume({"projected": {"sources": []}})),
    ("the node's processes", "preflight", with_pod(hostPID=True)),
    ("a node by its name", "preflight", with_pod(nodeName="node-a")),
    ("a whole node's memory", "preflight", with_resources(memory="100Gi")),
    ("a subcommand of a week", "one-off", with_spec(activeDeadlineSeconds=604_800)),
    ("a subcommand where it likes", "one-off", lambda job: pod_of(job).pop("nodeSelector")),
    ("a subcommand of any size", "one-off", lambda job: container_of(job).pop("resources")),
    ("a subcommand in Ray's network", "one-off", with_label("ray.io/is-ray-node", "yes")),
    ("a priority", "preflight", with_pod(priorityClassName="system-node-critical")),
    ("Volcano's default queue", "preflight", with_pod(schedulerName="volcano")),
    ("Trainium nodes", "deploy", with_pod(tolerations=TOLERATES_NEURON)),
    ("devices past the queue", "preflight", with_resources(neuron="16")),
    ("a whole node's CPUs", "preflight", with_resources(cpu="31")),
    ("an image from elsewhere", "preflight", with_container(image=f"docker.io/somebody/trainer@{DIGEST}")),
    ("an image by its tag", "preflight", with_container(image="millrace/trainer:latest")),
    ("a subcommand under another name", "one-off", lambda job: job["metadata"].update(name="one-off-trainer-1")),
    ("a subcommand as another stage", "one-off", with_pod(serviceAccountName="trainer")),
    ("a subcommand of no stage", "one-off", with_label("millrace.dev/stage", "nodes")),
    ("a subcommand in another stage's image", "one-off", with_container(image=PULLED)),
    ("a shell in place of a subcommand", "one-off", with_container(command=SHELL)),
    ("a stage in place of a subcommand", "one-off", with_container(command=["python", "-m", "services.tokenizer"])),
    ("a subcommand without an end", "one-off", lambda job: job["spec"].pop("activeDeadlineSeconds")),
    ("a subcommand whose time does not run", "one-off", with_spec(suspend=True)),
    ("a subcommand on Trainium nodes", "one-off", with_pod(tolerations=TOLERATES_NEURON)),
    ("a subcommand beside the head", "one-off", with_pod(nodeSelector={"millrace.dev/pool": "core"})),
    ("a subcommand with devices", "one-off", with_resources(neuron="16")),
    ("a subcommand larger than a CPU node", "one-off", with_cpus("31")),
    ("a subcommand that goes first", "one-off", with_pod(priorityClassName="millrace-head")),
    ("the Ray token in a subcommand", "one-off", with_variable(name="T", valueFrom=SECRET_OF_RAY)),
    ("a shell that holds nodes", "one-off-nodes", with_container(command=SHELL)),
    ("a stage's image that holds nodes", "one-off-nodes", with_container(image=PULLED)),
    (
        "nodes held under a deployment's name",
        "one-off-nodes",
        lambda job: job["metadata"].update(name="deploy-trainer"),
    ),
]


@pytest.mark.parametrize(
    ("kind", "change"), [pytest.param(kind, change, id=name) for name, kind, change in JOB_ATTACKS]
)
def test_a_job_beyond_what_deploys_is_refused(guarded: Api, kind: str, change: Callable[[Object], object]) -> None:
    job = jobs_of(guarded)[kind]
    assert would_create(job).is_taken
    answer = would_create(changed(job, change))
    assert answer.refused_by == "millrace-jobs"


def test_a_token_for_text_is_the_tokenizer_s_alone(guarded: Api) -> None:
    """The tokenizer's pods have the token."""
    group = read_worker_group(guarded, "trainer")
    job = render_one_off_job(group, cpu_group_of(group.cluster), one_off_of("trainer"))
    assert would_create(job).is_taken
    assert would_create(changed(job, with_variable(name="HF_TOKEN", valueFrom=SECRET))).refused_by == "millrace-jobs"
    tokenizer_s = container_of(jobs_of(guarded)["one-off"])
    assert "hugging-face" in json.dumps(tokenizer_s["env"])


def test_a_subcommand_that_runs_cannot_be_made_another(guarded: Api) -> None:
    job = jobs_of(guarded)["one-off"]
    assert ask("create", "-f", "-", body=job).is_taken
    for spec in ({"suspend": True}, {"activeDeadlineSeconds": 604_800}):
        answer = ask("patch", "job", job["metadata"]["name"], "--type=merge", "-p", json.dumps({"spec": spec}))
        assert answer.refused_by == "millrace-jobs"
    guarded.delete("Job", job["metadata"]["name"])


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


def as_one_off(pod: Object, component: str = "one-off") -> None:
    pod["metadata"]["labels"] = {"millrace.dev/component": component, "millrace.dev/stage": "trainer"}


def with_spec_of_pod(**fields: object) -> Callable[[Object], object]:
    return lambda pod: pod["spec"].update(fields)


POD_ATTACKS: list[tuple[str, Callable[[Object], object]]] = [
    ("another account", with_spec_of_pod(serviceAccountName="reaper")),
    ("no component", lambda pod: pod["metadata"]["labels"].pop("millrace.dev/component")),
    (
        "a deploy pod with Ray's labels",
        lambda pod: pod["metadata"]["labels"].update({"millrace.dev/component": "deploy"}),
    ),
    (
        "no label of Ray's",
        lambda pod: [pod["metadata"]["labels"].pop(key) for key in ("ray.io/is-ray-node", "ray.io/group")],
    ),
    ("devices past Volcano", with_spec_of_pod(schedulerName="default-scheduler")),
    ("devices past the queue", lambda pod: pod["metadata"]["annotations"].pop("scheduling.k8s.io/group-name")),
    ("an image from elsewhere", lambda pod: pod["spec"]["containers"][0].update(image=f"ghcr.io/x/trainer@{DIGEST}")),
    ("an image by its tag", lambda pod: pod["spec"]["containers"][0].update(image="millrace/trainer:latest")),
    ("a subcommand with devices", as_one_off),
    ("what holds a node, as a stage", lambda pod: as_one_off(pod, "one-off-nodes")),
]


@pytest.mark.parametrize("change", [pytest.param(change, id=name) for name, change in POD_ATTACKS])
def test_a_pod_beyond_the_manifests_is_refused_to_everybody(guarded: Api, change: Callable[[Object], object]) -> None:
    pod = stage_pod(guarded)
    assert would_create(pod, by=()).said == "pod/millrace-trainer-worker-1 created (server dry run)\n"
    assert would_create(changed(pod, change), by=()).refused_by == "millrace-pods"


def test_the_quota_bounds_what_the_policies_let_through(guarded: Api) -> None:
    def grow(pod: Object) -> None:
        for amounts in pod["spec"]["containers"][0]["resources"].values():
            amounts[NEURON] = "100000"

    assert would_create(changed(stage_pod(guarded), grow), by=()).refused_by == "quota"


def patch_cluster(api: Api, by: tuple[str, ...], change: Callable[[Object], object]) -> Answer:
    live = api.find("RayCluster", "millrace")
    assert live is not None
    patch = {"spec": changed(live["spec"], change)}
    return ask("patch", "raycluster", "millrace", "--type=merge", "--dry-run=server", "-p", json.dumps(patch), by=by)


def with_group(**fields: object) -> Callable[[Object], object]:
    return lambda spec: spec["workerGroupSpecs"][2].update(fields)


def with_group_pod(**fields: object) -> Callable[[Object], object]:
    return lambda spec: spec["workerGroupSpecs"][2]["template"]["spec"].update(fields)


def with_group_label(key: str, value: str) -> Callable[[Object], object]:
    return lambda spec: spec["workerGroupSpecs"][2]["template"]["metadata"]["labels"].update({key: value})


def with_group_image(image: str) -> Callable[[Object], object]:
    return lambda spec: spec["workerGroupSpecs"][2]["template"]["spec"]["containers"][0].update(image=image)


def with_head_image(image: str) -> Callable[[Object], object]:
    return lambda spec: spec["headGroupSpec"]["template"]["spec"]["containers"][0].update(image=image)


@pytest.mark.parametrize(
    ("by", "change"),
    [
        pytest.param(PERSON, with_group(replicas=1), id="a person scales up"),
        pytest.param(PERSON, with_group_image(PULLED), id="a person sets an image"),
        pytest.param(PERSON, with_head_image(f"millrace/other@{DIGEST}"), id="a person changes the head"),
        pytest.param(PERSON, lambda spec: spec.update(enableInTreeAutoscaling=True), id="a person adds a scaler"),
        pytest.param(PERSON, lambda spec: spec["workerGroupSpecs"].pop(), id="a person removes a group"),
        pytest.param(DEPLOYER, with_head_image(f"millrace/other@{DIGEST}"), id="a deploy Job changes the head"),
        pytest.param(DEPLOYER, with_group_pod(serviceAccountName="reaper"), id="a deploy Job changes the account"),
        pytest.param(DEPLOYER, with_group_label("millrace.dev/component", "head"), id="a deploy Job changes a label"),
        pytest.param(DEPLOYER, with_group_label("mine", "yes"), id="a deploy Job adds a label"),
        pytest.param(DEPLOYER, with_group_pod(schedulerName="default-scheduler"), id="a deploy Job leaves the queue"),
    ],
)
def test_a_ray_cluster_is_changed_by_deployments_alone(
    guarded: Api, by: tuple[str, ...], change: Callable[[Object], object]
) -> None:
    assert patch_cluster(guarded, by, lambda spec: None).is_taken
    assert patch_cluster(guarded, by, change).refused_by == "millrace-deployments"


def test_a_deploy_job_gives_a_group_its_image_its_pods_and_the_label_of_its_run(guarded: Api) -> None:
    changes = (with_group_image(PULLED), with_group(replicas=2), with_group_label(RUN_LABEL, "llama"))
    answer = patch_cluster(guarded, DEPLOYER, lambda spec: [change(spec) for change in changes])
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


def test_the_accounts_of_the_programs_may_do_their_work_and_no_more(guarded: Api) -> None:
    may = {
        "deployer": ["patch rayclusters.ray.io/millrace", "get rayclusters.ray.io/another", "delete pods", "get nodes"],
        "reaper": ["patch rayclusters.ray.io/millrace"],
    }
    may_not = {
        "deployer": ["patch rayclusters.ray.io/another", "get secrets", "get configmaps", "create pods", "create jobs"],
        "reaper": ["get secrets", "create pods", "delete jobs", "create rayjobs.ray.io"],
    }
    for account, rights in may.items():
        by = (f"--as=system:serviceaccount:millrace:{account}",)
        asked = [*rights, *may_not[account], "delete nodes"]
        assert [each for each in asked if ask("auth", "can-i", *each.split(), by=by).is_taken] == rights
