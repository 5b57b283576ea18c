"""Renders a stage's contract as a request to AWS Batch's RegisterJobDefinition.

Every deployment and every one-off has its own job definition: Batch cannot override the image of one, and a job
definition records what its job ran. docs/operations/batch.md gives the reason for every setting.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any

from deploy.batch.config import Config, JobQueue
from deploy.client.requested_recipe import RequestedRecipe
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

MAIN_NODE = 0
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
class JobSpec:
    """A deployment of a stage, or a one-off, which runs a subcommand of the stage on one CPU node."""

    stage: Stage
    image: str
    """The image's name, with its digest."""
    recipe: RequestedRecipe | None
    """The recipe, with the options of a deployment's command; None for a subcommand that takes none."""
    attempt_seconds: int
    """Limit of an attempt, in seconds. Batch ends the job then, and makes no further attempt."""
    nodes: int = 1
    attempts: int = 1
    """Largest number of attempts, the first one included."""
    words: tuple[str, ...] = ()
    """A one-off's subcommand and its arguments; empty for a deployment."""
    digest: str = ""
    """Digest of a one-off's request and its user."""

    @property
    def is_one_off(self) -> bool:
        return bool(self.words)

    @property
    def run(self) -> str:
        """The name of what runs, in the job's name and for reports of costs."""
        return self.recipe.outline.name if self.recipe and not self.is_one_off else f"{ONE_OFF}-{self.words[0]}"


def queue_of(config: Config, stage: Stage, is_compiler_on_trainium: bool) -> JobQueue:
    """The queue for a stage's jobs. The tokenizer needs no device, and the compiler only where it traces on one."""
    is_on_trainium = stage == "trainer" or (stage == "compiler" and is_compiler_on_trainium)
    return config.trainium if is_on_trainium else config.cpu


def name_definition(config: Config, stage: Stage, *, of_one_offs: bool = False) -> str:
    """Name of the job definitions of a stage's deployments, or of its one-offs."""
    return f"{config.name}-{stage}{f'-{ONE_OFF}' if of_one_offs else ''}"


def render_job_definition(config: Config, queue: JobQueue, spec: JobSpec) -> Request:
    """The request that registers a job definition.

    All jobs are multi-node parallel jobs, also those of one node: a plain job shares its machine's network, and with it
    the machine's role. The nodes are one range, `0:`, because a range with an end would fix their number. Raises
    `RecipeError` for a recipe that exceeds the size of a job definition.
    """
    contract = find_contract(spec.stage, queue.shape.pod_resources)
    if spec.is_one_off:
        contract = contract.with_drain(ONE_OFF_DRAIN_SECONDS)
    elif spec.stage == "trainer":
        contract = contract.with_drain(max(contract.drain_seconds, math.floor(config.notice_seconds)))
    group = {
        "targetNodes": "0:",
        "container": _render_container(config, contract, spec),
        "instanceTypes": [queue.shape.name],
    }
    body = {
        "jobDefinitionName": name_definition(config, spec.stage, of_one_offs=spec.is_one_off),
        "type": "multinode",
        "nodeProperties": {"numNodes": spec.nodes, "mainNode": MAIN_NODE, "nodeRangeProperties": [group]},
        "platformCapabilities": ["EC2"],
        "propagateTags": True,
        "timeout": {"attemptDurationSeconds": spec.attempt_seconds},
        "retryStrategy": {"attempts": spec.attempts, "evaluateOnExit": [*RETRY_RULES]},
    }
    identity = hashlib.sha256(json.dumps([body, spec.digest], sort_keys=True).encode()).hexdigest()[:16]
    return body | {"tags": {"millrace.dev/stage": spec.stage, DEPLOYMENT_TAG: identity}}


def read_container(body: Request) -> Request:
    """The container of a job definition, which is the same on all nodes."""
    return dict(body["nodeProperties"]["nodeRangeProperties"][0]["container"])


def _make_command(contract: StageContract, resources: Resources, spec: JobSpec) -> list[str]:
    """The words after the image's entry point."""
    if spec.is_one_off:
        command = make_one_off_command(spec.stage, ROOT.path, spec.words, requires_mount=True)
        return command[command.index(ONE_OFF) :]
    assert spec.recipe is not None
    recipe_file = f"{ROOT.path}/{RECIPES}/{spec.recipe.digest}.toml"
    cores = ["--neuron-cores", str(resources.neuron_cores)] if resources.neuron_cores else []
    command = make_command(contract.stage, recipe_file, ROOT.path, spec.recipe.arguments)
    return [ON_BATCH, "--cpus", str(resources.cpus), *cores, "--", *command]


def _render_container(config: Config, contract: StageContract, spec: JobSpec) -> Request:
    """A container that keeps the stage's contract."""
    resources = contract.resources
    assert resources is not None  # every shape with a queue has room for a container
    variables = contract.variables | ({RECIPE_VARIABLE: pack_recipe(spec.recipe.text.encode())} if spec.recipe else {})
    secrets = {each.name: config.hf_token_secret for each in contract.secrets}
    if not spec.is_one_off:  # one-offs send no notices
        secrets[WEBHOOK_VARIABLE] = config.webhook_secret
    container: Request = {
        "image": spec.image,
        "command": _make_command(contract, resources, spec),
        "jobRoleArn": config.job_roles[contract.stage],
        "environment": [{"name": name, "value": value} for name, value in variables.items()],
        "resourceRequirements": [
            {"type": "VCPU", "value": str(resources.cpus)},
            {"type": "MEMORY", "value": str(resources.memory_gib * 1024)},
        ],
        "volumes": [{"name": name, "host": {"sourcePath": path}} for name, path in HOST_FOLDERS.items()],
        "mountPoints": [
            {"sourceVolume": each.name, "containerPath": each.path, "readOnly": each.kind == "recipe"}
            for each in contract.mounts
            if each.name in HOST_FOLDERS
        ],
        "linuxParameters": _render_linux_parameters(resources),
        "ulimits": [
            # EFA pins the memory that it sends from; Docker's default is 8 MiB.
            {"name": name, "softLimit": limit, "hardLimit": limit}
            for name, limit in (("memlock", -1), ("nofile", 1_048_576), ("stack", 64 * 2**20))
        ],
        "logConfiguration": {
            "logDriver": "awslogs",
            "options": {
                "awslogs-group": config.log_groups[contract.stage],
                "awslogs-region": config.region,
                "awslogs-stream-prefix": contract.stage,
            },
        },
        "privileged": False,
    }
    if named := [{"name": name, "valueFrom": arn} for name, arn in secrets.items() if arn]:
        container["executionRoleArn"] = config.execution_role
        container["secrets"] = named
    return container


def _render_linux_parameters(resources: Resources) -> Request:
    parameters: Request = {"initProcessEnabled": True}  # reaps orphaned processes and passes SIGTERM on
    if resources.shared_memory_gib:
        parameters["sharedMemorySize"] = resources.shared_memory_gib * 1024
    paths = [f"/dev/neuron{number}" for number in range(resources.neuron_devices)]
    paths += [f"/dev/infiniband/uverbs{number}" for number in range(resources.efa_cards)]
    if paths:
        permissions = ["READ", "WRITE", "MKNOD"]
        parameters["devices"] = [
            {"hostPath": path, "containerPath": path, "permissions": permissions} for path in paths
        ]
    return parameters
