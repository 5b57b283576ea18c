"""The plan of a deployment: what it will run and cost, and what of its job definition is new."""

from __future__ import annotations

import json
from typing import Any

from deploy.batch.config import Pool
from deploy.batch.job_definition import Deployment, Request, read_container
from deploy.batch.jobs import Definition
from deploy.client.outline import Outline
from services.common.launch.batch.node import RECIPE_VARIABLE

ABSENT = "nothing"
SET_BY_BATCH = ("jobDefinitionArn", "revision", "status", "containerOrchestrationType", "parameters", "tags")


def describe_plan(
    pool: Pool, deployment: Deployment, outline: Outline, body: Request, before: Definition | None
) -> str:
    """Lines; cost first."""
    hours = deployment.attempt_seconds / 3600
    price = pool.shape.price
    hourly = deployment.nodes * price.dollars_per_hour
    lines = [
        f"cost        {deployment.nodes} x {pool.shape.name} x ${price.dollars_per_hour:,.2f} = ${hourly:,.2f} an hour"
        f"; an attempt ends after {hours:g} h: ${hourly * hours:,.2f} at most (list price of {price.region}, "
        f"{price.dated})",
        f"nodes       queue {pool.queue}: they come for the job and go some minutes after it",
        f"stage       {deployment.stage}: {outline.describe_topology(deployment.stage, deployment.nodes, 'nodes')}",
        f"image       {deployment.image}",
        f"recipe      {outline.name}, {deployment.recipe_digest[:10]}",
        f"arguments   {' '.join(deployment.arguments) or 'none'}",
        f"tries       {deployment.attempts}, after exit code 75 or a lost host of the main node",
    ]
    if before is None:
        return "\n".join([*lines, f"definition  {body['jobDefinitionName']} is new"])
    told = [f"  {line}" for line in find_differences(before.body, body)]
    title = f"definition  {body['jobDefinitionName']}, as revision {before.revision}"
    return "\n".join([*lines, f"{title} but for" if told else title, *told])


def find_differences(before: Request, after: Request) -> list[str]:
    """Each value that is another one, by its place."""
    flat = [
        _flatten({key: value for key, value in body.items() if key not in SET_BY_BATCH}) for body in (before, after)
    ]
    places = [*dict.fromkeys([*flat[1], *flat[0]])]
    changed = [(place, *(each.get(place, ABSENT) for each in flat)) for place in places]
    return [_describe(place, old, new) for place, old, new in changed if old != new]


def write_definition(body: Request) -> str:
    """As RegisterJobDefinition takes it. JSON, which is YAML too."""
    return json.dumps(body, indent=2) + "\n"


def describe_definition(body: Request) -> str:
    """What a person looks at first in a definition, the container's command on a line of its own."""
    container = read_container(body)
    shown = {key: value for key, value in body.items() if key != "nodeProperties"}
    variables = [each for each in container["environment"] if each["name"] != RECIPE_VARIABLE]
    return json.dumps(shown | {"container": container | {"environment": variables}}, indent=2)


def _describe(place: str, old: str, new: str) -> str:
    if place.endswith(RECIPE_VARIABLE):
        return f"{place}: another recipe" if new != ABSENT else f"{place}: no recipe"
    return f"{place}: {old} -> {new}"


def _flatten(value: Any, place: str = "") -> dict[str, str]:
    """Leaves by their place. Items of a list that have a name are told by it."""
    if isinstance(value, dict):
        parts = [(f"{place}.{key}" if place else str(key), part) for key, part in value.items()]
    elif isinstance(value, list) and value:
        parts = [(f"{place}.{_name(part, at)}", _content(part)) for at, part in enumerate(value)]
    else:
        return {place: str(value)}
    return {key: leaf for at, part in parts for key, leaf in _flatten(part, at).items()}


def _name(part: Any, at: int) -> str:
    return str(part["name"]) if isinstance(part, dict) and "name" in part else str(at)


def _content(part: Any) -> Any:
    """Of a variable its value alone."""
    return part["value"] if isinstance(part, dict) and part.keys() == {"name", "value"} else part
