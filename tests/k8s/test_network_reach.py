"""The network policies let each pod reach what the page on security says, and nothing more."""

from __future__ import annotations

import re
from collections.abc import Iterable

from images.platforms import REPOSITORY
from k8s.objects.names import COMPONENT_LABEL, STAGE_LABEL
from tests.k8s.rendered import Thing, labels_of, of_kind

PAGE = REPOSITORY / "docs/security.md"
ALL_OF_RAY = ("ray.io/is-ray-node", "yes")


def list_pods(things: list[Thing]) -> dict[str, dict[str, str]]:
    """Labels of the pods of each kind, by the kind's name in the page's table."""
    component, stage = COMPONENT_LABEL, STAGE_LABEL
    return {
        **labels_of(things),
        "deploy Job": {component: "deploy"},
        "reaper": {component: "reaper"},
        "preflight": {component: "preflight", stage: "trainer"},
        "one-off, tokenizer": {component: "one-off", stage: "tokenizer"},
        "one-off, others": {component: "one-off", stage: "trainer"},
        "one-off-nodes": {component: "one-off-nodes", stage: "trainer"},
    }


def selects(selector: Thing, labels: dict[str, str]) -> bool:
    among = {each["key"]: each["values"] for each in selector.get("matchExpressions", [])}  # all say In
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(key) in values for key, values in among.items()
    )


def describe_peer(peer: Thing, pods: Iterable[dict[str, str]]) -> str:
    """Its address or label. A selector that matches no pod, or one too many, is accepted without a word."""
    if block := peer.get("ipBlock"):
        return {"169.254.170.23/32": "pod-identity", "fd00:ec2::23/128": "pod-identity"}[block["cidr"]]
    selector = peer.get("podSelector") or peer["namespaceSelector"]
    assert "namespaceSelector" in peer or any(selects(selector, pod) for pod in pods), selector
    [label] = selector["matchLabels"].items()
    return "ray" if label == ALL_OF_RAY else str(label[1])


def list_reach(things: list[Thing], pod: str, direction: str) -> set[str]:
    """PEER:PORT of each rule for `direction`, egress or ingress; `any` is every address, and `*` every port."""
    pods, found = list_pods(things), set()
    for policy in of_kind(things, "NetworkPolicy").values():
        if not selects(policy["spec"]["podSelector"], pods[pod]):
            continue
        assert direction.capitalize() in policy["spec"]["policyTypes"] or direction not in policy["spec"]
        for rule in policy["spec"].get(direction, []):
            listed = rule.get("to" if direction == "egress" else "from", [])
            peers = [describe_peer(peer, pods.values()) for peer in listed] or ["any"]
            ports = [str(each["port"]) for each in rule.get("ports", [])] or ["*"]
            found |= {f"{peer}:{port}" for peer in peers for port in ports}
    return found


def read_table() -> dict[str, tuple[set[str], set[str]]]:
    """Return for each pod the peers that it may reach and the peers that may reach it, by the table of the page."""
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index("| pod | it reaches | reached by |") :].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {pod: (tokens(reaches), tokens(reached)) for pod, reaches, reached in rows}


def tokens(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


def test_every_pod_reaches_what_the_page_says_and_nothing_more(overlays: dict[str, list[Thing]]) -> None:
    things = overlays["eks"]
    assert {
        pod: (list_reach(things, pod, "egress"), list_reach(things, pod, "ingress")) for pod in list_pods(things)
    } == read_table()
