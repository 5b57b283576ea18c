"""The roles of people who deploy grant what the client's calls need, and no more."""

from __future__ import annotations

import pytest

from k8s.client.rights import IN_THE_CLUSTER, IN_THE_NAMESPACE, TO_ASK, TO_LOOK_INSIDE, Right
from tests.k8s.rendered import OVERLAYS, Thing, of_kind


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
