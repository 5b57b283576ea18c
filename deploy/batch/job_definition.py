"""Renders a stage's contract as a request to AWS Batch's RegisterJobDefinition.

Every deployment and every one-off has its own job definition: Batch cannot override the image of one, and a job
definition records what its job ran. docs/operations/batch.md gives the reason for every setting.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from deploy.batch.config import Config, JobQueue
from deploy.exit_codes import EXIT_AGAIN
from deploy.stage_contract import (
    ONE_OFF_DRAIN_SECONDS,
    ROOT,
    SCRATCH,
    Resources,
    StageContract,
    find_contract,
    make_command,
    make_one_off_command,
)
from services.common.launch.batch.node import RECIPES
from services.common.process.subcommands import ON_BATCH, ONE_OFF
from services.common.recipe.packed_recipe import RECIPE_VARIABLE, pack_recipe
from services.common.recipe.schema import WEBHOOK_VARIABLE, Stage

Request = dict[str, Any]

MIB_PER_GIB = 1024
MAIN_NODE = 0
UNLIMITED = -1
OPEN_FILES = 1_048_576
STACK_BYTES = 64 * 2**20
DEVICE_PERMISSIONS = ["READ", "WRITE", "MKNOD"]
HOST_FOLDERS = {ROOT.name: ROOT.path, SCRATCH.name: SCRATCH.path}
"""Folders of a node, by their volume: the mounted file system, and scratch space on the node's disks. The launch
template prepares both."""
DEPLOYMENT_TAG = "millrace.dev/deployment"
RUN_TAG = "millrace.dev/run"
"""Tag of a job and its tasks with the recipe's name, for reports of costs, or with the name of a one-off."""
RETRY_RULES: tuple[Request, ...] = (
    {"onStatusReason": "Host EC2*", "action": "RETRY"},
    {"onExitCode": str(EXIT_AGAIN), "action": "RETRY"},
    {"onExitCode": "*", "action": "EXIT"},  # Batch retries where no rule matches
)


@dataclass(frozen=True)
class BatchDeployment:
    """A deployment of a stage on AWS Batch."""

    stage: Stage
    image: str
    """The image's name, with its digest."""
    nodes: int
    recipe: str
    """The recipe's name."""
    recipe_text: str
    arguments: tuple[str, ...]
    attempts: int
    """Largest number of attempts, the first one included."""
    attempt_seconds: int
    """Limit of an attempt, in seconds. Batch ends the job then, and makes no further attempt."""

    @property
    def recipe_digest(self) -> str:
        return hashlib.sha256(self.recipe_text.encode()).hexdigest()


@dataclass(frozen=True)
class BatchOneOff:
    """A subcommand of a stage as a job on one CPU node."""

    stage: Stage
    digest: str
    """Digest of the request and its user."""
    image: str
    """The image's name, with its digest."""
    words: tuple[str, ...]
    """The subcommand and its arguments."""
    recipe: str
    """The packed recipe; empty where the subcommand takes none."""
    seconds: int
    """Limit of the job, in seconds, after which Batch ends it."""


def queue_of(config: Config, stage: Stage, is_compiler_on_trainium: bool) -> JobQueue:
    """The queue for a stage's jobs. The tokenizer needs no device, and the compiler only where it traces on one."""
    is_on_trainium = stage == "trainer" or (stage == "compiler" and is_compiler_on_trainium)
    return config.trainium if is_on_trainium else config.cpu


def render_job_definition(config: Config, queue: JobQueue, deployment: BatchDeployment) -> Request:
    """The request that registers a deployment's job definition.

    All jobs are multi-node parallel jobs, also those of one node: a plain job shares its machine's network, and with it
    the machine's role. The nodes are one range, `0:`, because a range with an end would fix their number. Raises
    `RecipeError` for a recipe that exceeds the size of a job definition.
    """
    contract = find_contract(deployment.stage, queue.shape.pod_resources)
    if deployment.stage == "trainer":
        contract = contract.with_drain(max(contract.drain_seconds, config.notice_seconds))
    body = _render_body(
        f"{config.name}-{deployment.stage}",
        queue,
        _render_container(config, contract, deployment),
        deployment.nodes,
        deployment.attempt_seconds,
        deployment.attempts,
    )
    return body | {"tags": {"millrace.dev/stage": deployment.stage, DEPLOYMENT_TAG: identify(body)}}


def render_one_off_definition(config: Config, one_off: BatchOneOff) -> Request:
    """The request that registers a one-off's job definition: one attempt on one CPU node.

    The job is a multi-node parallel job, for the same reason as a deployment's.
    """
    contract = find_contract(one_off.stage, config.cpu.shape.pod_resources).with_drain(ONE_OFF_DRAIN_SECONDS)
    assert contract.resources is not None  # every shape with a queue has room for a container
    command = make_one_off_command(one_off.stage, ROOT.path, one_off.words, requires_mount=True)
    container = _render_contract(
        config,
        contract,
        contract.resources,
        image=one_off.image,
        command=command[command.index(ONE_OFF) :],  # after the image's entry point
        recipe=one_off.recipe,
    )
    body = _render_body(one_off_name(config, one_off.stage), config.cpu, container, 1, one_off.seconds, 1)
    identity = identify(body | {"digest": one_off.digest})
    return body | {"tags": {"millrace.dev/stage": one_off.stage, DEPLOYMENT_TAG: identity}}


def one_off_name(config: Config, stage: Stage) -> str:
    """Name of the job definitions of a stage's one-offs, which keeps them apart from its deployments'."""
    return f"{config.name}-{stage}-{ONE_OFF}"


def _render_body(
    name: str, queue: JobQueue, container: Request, nodes: int, attempt_seconds: int, attempts: int
) -> Request:
    group = {"targetNodes": "0:", "container": container, "instanceTypes": [queue.shape.name]}
    return {
        "jobDefinitionName": name,
        "type": "multinode",
        "nodeProperties": {"numNodes": nodes, "mainNode": MAIN_NODE, "nodeRangeProperties": [group]},
        "platformCapabilities": ["EC2"],
        "propagateTags": True,
        "timeout": {"attemptDurationSeconds": attempt_seconds},
        "retryStrategy": {"attempts": attempts, "evaluateOnExit": [*RETRY_RULES]},
    }


def identify(body: Request) -> str:
    """The digest that identical job definitions share."""
    untagged = {key: value for key, value in body.items() if key != "tags"}
    return hashlib.sha256(json.dumps(untagged, sort_keys=True).encode()).hexdigest()[:16]


def read_container(body: Request) -> Request:
    """The container of a job definition, which is the same on all nodes."""
    return dict(body["nodeProperties"]["nodeRangeProperties"][0]["container"])


def _render_container(config: Config, contract: StageContract, deployment: BatchDeployment) -> Request:
    resources = contract.resources
    assert resources is not None  # every shape with a queue has room for a container
    recipe = f"{ROOT.path}/{RECIPES}/{deployment.recipe_digest}.toml"
    command = make_command(contract.stage, recipe, ROOT.path, deployment.arguments)
    cores = ["--neuron-cores", str(resources.neuron_cores)] if resources.neuron_cores else []
    return _render_contract(
        config,
        contract,
        resources,
        image=deployment.image,
        command=[ON_BATCH, "--cpus", str(resources.cpus), *cores, "--", *command],
        recipe=pack_recipe(deployment.recipe_text.encode()),
        webhook_secret=config.webhook_secret,
    )


def _render_contract(
    config: Config,
    contract: StageContract,
    resources: Resources,
    *,
    image: str,
    command: list[str],
    recipe: str,
    webhook_secret: str = "",
) -> Request:
    """A container that keeps the stage's contract.

    `recipe` is packed, or empty where the command reads none. `webhook_secret` is the ARN of the secret with the URL of
    the notices' webhook, or empty where the command sends no notices.
    """
    variables = contract.variables | ({RECIPE_VARIABLE: recipe} if recipe else {})
    group = config.log_groups[contract.stage]
    container: Request = {
        "image": image,
        "command": command,
        "jobRoleArn": config.job_roles[contract.stage],
        "environment": [{"name": name, "value": value} for name, value in variables.items()],
        "resourceRequirements": [
            {"type": "VCPU", "value": str(resources.cpus)},
            {"type": "MEMORY", "value": str(resources.memory_gib * MIB_PER_GIB)},
        ],
        "volumes": [{"name": name, "host": {"sourcePath": path}} for name, path in HOST_FOLDERS.items()],
        "mountPoints": [
            {"sourceVolume": each.name, "containerPath": each.path, "readOnly": each.is_read_only}
            for each in contract.mounts
            if each.name in HOST_FOLDERS
        ],
        "linuxParameters": _render_linux_parameters(resources),
        "ulimits": [
            # EFA pins the memory that it sends from; Docker's default is 8 MiB.
            {"name": "memlock", "softLimit": UNLIMITED, "hardLimit": UNLIMITED},
            {"name": "nofile", "softLimit": OPEN_FILES, "hardLimit": OPEN_FILES},
            {"name": "stack", "softLimit": STACK_BYTES, "hardLimit": STACK_BYTES},
        ],
        "logConfiguration": {
            "logDriver": "awslogs",
            "options": {
                "awslogs-group": group,
                "awslogs-region": config.region,
                "awslogs-stream-prefix": contract.stage,
            },
        },
        "privileged": False,
    }
    secrets = {each.name: config.hugging_face_secret for each in contract.secrets} | {WEBHOOK_VARIABLE: webhook_secret}
    if named := [{"name": name, "valueFrom": arn} for name, arn in secrets.items() if arn]:
        container["executionRoleArn"] = config.execution_role
        container["secrets"] = named
    return container


def _render_linux_parameters(resources: Resources) -> Request:
    parameters: Request = {"initProcessEnabled": True}  # reaps orphaned processes and passes SIGTERM on
    if resources.shared_memory_gib:
        parameters["sharedMemorySize"] = resources.shared_memory_gib * MIB_PER_GIB
    paths = [f"/dev/neuron{number}" for number in range(resources.neuron_devices)]
    paths += [f"/dev/infiniband/uverbs{number}" for number in range(resources.efa_cards)]
    if paths:
        parameters["devices"] = [
            {"hostPath": path, "containerPath": path, "permissions": DEVICE_PERMISSIONS} for path in paths
        ]
    return parameters
