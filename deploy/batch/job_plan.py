"""Describes a deployment on AWS Batch before it is made: cost, nodes, image, and changes of the job definition."""

from __future__ import annotations

import json
from typing import Any

from deploy.batch.job_definition import Request, read_container
from deploy.batch.jobs import Definition
from deploy.batch.resolved_job import ResolvedJob
from infra.shapes import Shape
from services.common.recipe.packed_recipe import RECIPE_VARIABLE

ABSENT = "nothing"
SET_BY_BATCH = ("jobDefinitionArn", "revision", "status", "containerOrchestrationType", "parameters", "tags")


def describe_plan(resolved: ResolvedJob, before: Definition | None) -> str:
    """The plan for a person, one fact a line, the cost first. `before` is the newest job definition."""
    queue, deployment, outline, body = resolved.queue, resolved.deployment, resolved.outline, resolved.body
    lines = [
        f"cost        {_describe_cost(queue.shape, deployment.nodes, deployment.attempt_seconds / 3600)}",
        f"nodes       queue {queue.name}: they start for the job and stop some minutes after it",
        f"stage       {deployment.stage}: {outline.describe_topology(deployment.stage, deployment.nodes, 'nodes')}",
        f"image       {deployment.image}",
        f"recipe      {outline.name}, {deployment.recipe_digest[:10]}",
        f"arguments   {' '.join(deployment.arguments) or 'none'}",
        f"attempts    {deployment.attempts}: after exit code 75, or after the main node lost its host",
        f"limit       {_describe_limit(resolved)}",
    ]
    if before is None:
        return "\n".join([*lines, f"definition  {body['jobDefinitionName']} is new"])
    changes = [f"  {line}" for line in find_differences(before.body, body)]
    title = f"definition  {body['jobDefinitionName']}, as revision {before.revision}"
    return "\n".join([*lines, f"{title} except for" if changes else title, *changes])


def _describe_limit(resolved: ResolvedJob) -> str:
    """What follows when an attempt exceeds its limit. How long a run takes is unknown here: `plan` estimates it."""
    deployment, seconds = resolved.deployment, resolved.outline.train.time_limit_seconds
    if deployment.stage != "trainer" or not seconds:
        return f"Batch ends an attempt of more than {deployment.attempt_seconds / 3600:g} h, and makes no further one"
    text = (
        f"{seconds / 3600:g} h of training an attempt, then a checkpoint, exit code 75 and the next attempt: "
        f"{deployment.attempts * seconds / 3600:g} h at most (services.trainer plan estimates what the run needs)"
    )
    own = resolved.own_limit_seconds
    if own and own > seconds:
        text += f". WARNING: HOURS is too short for the recipe's train.time_limit_seconds, {own / 3600:g} h an attempt"
    return text


def _describe_cost(shape: Shape, nodes: int, hours: float) -> str:
    if shape.price is None:
        return f"{nodes} x {shape.name}, whose price no public list has; an attempt ends after {hours:g} h"
    of_node = shape.price.dollars_per_hour
    of_all = nodes * of_node
    return (
        f"{nodes} x {shape.name} x ${of_node:,.2f} = ${of_all:,.2f} an hour; an attempt ends after {hours:g} h: "
        f"${of_all * hours:,.2f} at most ({shape.price.describe_origin()})"
    )


def find_differences(before: Request, after: Request) -> list[str]:
    """The values that differ between two job definitions, one a line, by their place."""
    flat = [
        _flatten({key: value for key, value in body.items() if key not in SET_BY_BATCH}) for body in (before, after)
    ]
    places = [*dict.fromkeys([*flat[1], *flat[0]])]
    changed = [(place, *(each.get(place, ABSENT) for each in flat)) for place in places]
    return [_describe(place, old, new) for place, old, new in changed if old != new]


def write_definition(body: Request) -> str:
    """The request to RegisterJobDefinition as JSON, which is YAML as well."""
    return json.dumps(body, indent=2) + "\n"


def describe_definition(body: Request) -> str:
    """A job definition for a person, without its packed recipe."""
    container = read_container(body)
    shown = {key: value for key, value in body.items() if key != "nodeProperties"}
    variables = [each for each in container["environment"] if each["name"] != RECIPE_VARIABLE]
    return json.dumps(shown | {"container": container | {"environment": variables}}, indent=2)


def _describe(place: str, old: str, new: str) -> str:
    if place.endswith(RECIPE_VARIABLE):
        return f"{place}: another recipe" if new != ABSENT else f"{place}: no recipe"
    return f"{place}: {old} -> {new}"


def _flatten(value: Any, place: str = "") -> dict[str, str]:
    """The leaves of a nested value by their place. Items of a list are named by their `name`, or else numbered."""
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
    """The value of a variable, which has a name and a value; anything else as it is."""
    return part["value"] if isinstance(part, dict) and part.keys() == {"name", "value"} else part
