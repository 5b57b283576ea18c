"""The roles of people who deploy grant what the client's calls need, and no more."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from k8s.client.rights import IN_THE_CLUSTER, IN_THE_NAMESPACE, TO_ASK, TO_LOOK_INSIDE, Right
from k8s.objects.api import API_VERSIONS
from tests.architecture.imports import closure_of, modules_of
from tests.k8s.rendered import OVERLAYS, Thing, of_kind

REPOSITORY = OVERLAYS["eks"].parents[2]
COMMANDS = {
    "k8s.client.commands",
    "k8s.client.kuberay_one_off",
    "k8s.client.status",
}  # all but the cluster's own, which are an administrator's
VERBS = {
    "find": "get",
    "find_all": "list",
    "create": "create",
    "merge": "patch",
    "replace": "update",
    "delete": "delete",
}
# Calls whose object another function makes, by the expression that makes it.
KINDS = {
    "render_recipe_config_map": ["ConfigMap"],
    "render_deploy_job": ["Job"],
    "_job": ["Job"],
    "resolved.job": ["Job"],
    "resolved.nodes_job": ["Job"],
    "review": ["SelfSubjectAccessReview", "SubjectAccessReview"],
}


def granted(things: list[Thing], kind: str, name: str) -> set[Right]:
    return {
        Right(verb, group, resource, object_name)
        for rule in of_kind(things, kind)[name]["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for object_name in rule.get("resourceNames", [""])
    }


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_roles_grant_what_preflight_asks_for(overlays: dict[str, list[Thing]], overlay: str) -> None:
    things = overlays[overlay]
    assert granted(things, "Role", "people") == {*IN_THE_NAMESPACE, *TO_LOOK_INSIDE}
    assert granted(things, "ClusterRole", "millrace-people") == {*IN_THE_CLUSTER, *TO_ASK}
    for kind in ("RoleBinding", "ClusterRoleBinding"):
        bindings = [each for each in of_kind(things, kind).values() if each["roleRef"]["name"].endswith("people")]
        assert [subject["name"] for each in bindings for subject in each["subjects"]] == ["millrace-deployers"]


def test_the_client_s_calls_need_just_these() -> None:
    modules = modules_of(REPOSITORY, "k8s", "deploy", "images", "services/common")
    reached = [module for module in sorted(closure_of(modules, COMMANDS)) if module.startswith("k8s.")]
    calls = {(verb, kind) for module in reached for verb, kind in calls_of(modules[module])}
    named = {(right.verb, right.resource) for right in (*IN_THE_NAMESPACE, *IN_THE_CLUSTER, *TO_ASK)}
    needed = {(verb, resource_of(kind)) for verb, kind in calls}
    assert needed - named == set()
    # Whoever may look at one may list them, for kubectl's sake.
    assert {each for each in named - needed if each[0] not in ("get", "list")} == set()


def calls_of(path: Path) -> Iterator[tuple[str, str]]:
    """Verb and kind of each call of the Kubernetes API in a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if ast.unparse(node.func.value) not in ("api", "self._api"):
            continue
        if node.func.attr == "log":
            yield "get", "Pod/log"
        elif node.func.attr in VERBS:
            yield from ((VERBS[node.func.attr], kind) for kind in kinds_of(node.args[0], path))


def kinds_of(argument: ast.expr, path: Path) -> list[str]:
    if isinstance(argument, ast.Constant):
        return [str(argument.value)]
    if isinstance(argument, ast.Dict):
        said = dict(zip(map(_text, argument.keys), argument.values, strict=True))
        return [_text(said["kind"])]
    text = ast.unparse(argument)
    found = [kinds for maker, kinds in KINDS.items() if text == maker or text.startswith((f"{maker}(", f"{maker} "))]
    if text == "self._job":
        found = [KINDS["_job"]]
    assert found, f"{path}: which kind is {text}?"
    return found[0]


def _text(expression: ast.expr | None) -> str:
    return str(expression.value) if isinstance(expression, ast.Constant) else ""


def resource_of(kind: str) -> str:
    name, slash, part = kind.partition("/")
    assert name in API_VERSIONS, kind
    plural = {"PriorityClass": "priorityclasses"}.get(name, f"{name.lower()}s")
    return f"{plural}{slash}{part}"
