"""The job definition of a stage: the stage's contract in the words of AWS Batch's RegisterJobDefinition.

Every deployment and every one-off has one of its own, because Batch overrides no image, and what a job ran must stay
readable. What is set here and why is in docs/operations/batch.md.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from deploy.batch.config import Config, Pool
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
from services.common.launch.batch.node import RECIPE_VARIABLE, RECIPES, pack_recipe
from services.common.process.stage_program import ON_BATCH
from services.common.process.subcommands import ONE_OFF
from services.common.recipe.schema import Stage

Request = dict[str, Any]

MIB_PER_GIB = 1024
MAIN_NODE = 0
UNLIMITED = -1
OPEN_FILES = 1_048_576
STACK_BYTES = 64 * 2**20
DEVICE_PERMISSIONS = ["READ", "WRITE", "MKNOD"]
HOST_FOLDERS = {ROOT.name: ROOT.path, SCRATCH.name: SCRATCH.path}
"""On the nodes, as the launch template prepares them: the mounted file system, and a folder on their own disks."""
DEPLOYMENT_TAG = "millrace.dev/deployment"


@dataclass(frozen=True)
class Deployment:
    """What one deployment runs."""

    stage: Stage
    image: str
    """With its digest."""
    nodes: int
    recipe: str
    """Its name."""
    recipe_text: str
    arguments: tuple[str, ...]
    attempts: int
    """At most, counting the first."""
    attempt_seconds: int
    """At most; Batch then ends it, and does not try again."""

    @property
    def recipe_digest(self) -> str:
        return hashlib.sha256(self.recipe_text.encode()).hexdigest()


@dataclass(frozen=True)
class OneOff:
    """What a one-off runs: a subcommand of a stage, on one CPU node."""

    stage: Stage
    digest: str
    """The same for the same request of the same person."""
    image: str
    """With its digest."""
    words: tuple[str, ...]
    """The subcommand and its arguments."""
    bring: tuple[str, ...]
    recipe: str
    """Packed; empty where the subcommand takes none."""
    seconds: int
    """After which Batch ends it."""


def pool_of(config: Config, stage: Stage, is_compiler_on_trainium: bool) -> Pool:
    """Where a stage's nodes come from. The tokenizer has no use for a device, and a compiler mostly none."""
    is_on_trainium = stage == "trainer" or (stage == "compiler" and is_compiler_on_trainium)
    return config.trainium if is_on_trainium else config.cpu


def render_job_definition(config: Config, pool: Pool, deployment: Deployment) -> Request:
    """The request that registers it. Raises `RecipeError` for a recipe that is too long to travel in it.

    All are multi-node parallel jobs, of one node as well: a plain job shares its machine's network, and with that the
    machine's role. Nodes are one range, `0:`: a range with an end would fix their number.
    """
    contract = find_contract(deployment.stage, pool.shape.pod_resources)
    if deployment.stage == "trainer":
        contract = contract.with_drain(max(contract.drain_seconds, config.notice_seconds))
    body = _render_body(
        f"{config.name}-{deployment.stage}",
        pool,
        _render_container(config, contract, deployment),
        deployment.nodes,
        deployment.attempt_seconds,
        deployment.attempts,
    )
    return body | {"tags": {"millrace.dev/stage": deployment.stage, DEPLOYMENT_TAG: identify(body)}}


def render_one_off_definition(config: Config, one_off: OneOff) -> Request:
    """The request that registers the job of a one-off: one attempt on one CPU node.

    It is multi-node as well, for the same reason as a deployment.
    """
    contract = find_contract(one_off.stage, config.cpu.shape.pod_resources).with_drain(ONE_OFF_DRAIN_SECONDS)
    assert contract.resources is not None  # every shape that has a queue leaves a container room
    command = make_one_off_command(one_off.stage, ROOT.path, one_off.words, one_off.bring, requires_mount=True)
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
    """The name of the job definitions of a stage's one-offs, which are none of its deployments."""
    return f"{config.name}-{stage}-{ONE_OFF}"


def _render_body(name: str, pool: Pool, container: Request, nodes: int, attempt_seconds: int, attempts: int) -> Request:
    group = {"targetNodes": "0:", "container": container, "instanceTypes": [pool.shape.name]}
    return {
        "jobDefinitionName": name,
        "type": "multinode",
        "nodeProperties": {"numNodes": nodes, "mainNode": MAIN_NODE, "nodeRangeProperties": [group]},
        "platformCapabilities": ["EC2"],
        "propagateTags": True,
        "timeout": {"attemptDurationSeconds": attempt_seconds},
        "retryStrategy": {"attempts": attempts, "evaluateOnExit": _rules()},
    }


def identify(body: Request) -> str:
    """The same for what runs the same."""
    told = {key: value for key, value in body.items() if key != "tags"}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def read_container(body: Request) -> Request:
    """The one container of all nodes."""
    return dict(body["nodeProperties"]["nodeRangeProperties"][0]["container"])


def _render_container(config: Config, contract: StageContract, deployment: Deployment) -> Request:
    resources = contract.resources
    assert resources is not None  # every shape that has a queue leaves a container room
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
    )


def _render_contract(
    config: Config, contract: StageContract, resources: Resources, *, image: str, command: list[str], recipe: str
) -> Request:
    """A container with all that the stage's contract promises. `recipe` is packed, or empty where it reads none."""
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
    if contract.secrets and config.hugging_face_secret:
        container["executionRoleArn"] = config.execution_role
        container["secrets"] = [
            {"name": each.name, "valueFrom": config.hugging_face_secret} for each in contract.secrets
        ]
    return container


def _render_linux_parameters(resources: Resources) -> Request:
    parameters: Request = {"initProcessEnabled": True}  # reaps what dies, and hands on SIGTERM
    if resources.shared_memory_gib:
        parameters["sharedMemorySize"] = resources.shared_memory_gib * MIB_PER_GIB
    paths = [f"/dev/neuron{number}" for number in range(resources.neuron_devices)]
    paths += [f"/dev/infiniband/uverbs{number}" for number in range(resources.efa_cards)]
    if paths:
        parameters["devices"] = [
            {"hostPath": path, "containerPath": path, "permissions": DEVICE_PERMISSIONS} for path in paths
        ]
    return parameters


def _rules() -> list[Request]:
    """What is tried again. The last one is needed: what no rule matches is tried again."""
    return [
        {"onStatusReason": "Host EC2*", "action": "RETRY"},
        {"onExitCode": str(EXIT_AGAIN), "action": "RETRY"},
        {"onExitCode": "*", "action": "EXIT"},
    ]
