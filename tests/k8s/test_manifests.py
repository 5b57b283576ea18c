"""Both overlays are what the API servers take, what Ray reads, and what the pages promise.

Nothing is started: kubectl renders, and the schemas come from the modules that the test cluster is compiled from.
"""

from __future__ import annotations

import pytest

from tests.k8s import rules
from tests.k8s.rendered import OVERLAYS, Thing, groups_of, pods_of
from tests.k8s.rules import Rule
from tests.k8s.schemas import WITHOUT_SCHEMA, Kind, Schema, problems_of

ALL_RULES: list[Rule] = [*rules.EVERYWHERE, *rules.IN_PRODUCTION]
RULES_OF: dict[str, list[Rule]] = {"local": rules.EVERYWHERE, "eks": ALL_RULES}


def word_for(part: object) -> str | None:
    return part.rpartition("/")[2] if isinstance(part, str) else getattr(part, "__name__", None)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_api_servers_know_every_field(
    overlays: dict[str, list[Thing]], schemas: dict[Kind, Schema], overlay: str
) -> None:
    known = [thing for thing in overlays[overlay] if thing["kind"] not in WITHOUT_SCHEMA]

    assert [problem for thing in known for problem in problems_of(thing, schemas)] == []


@pytest.mark.parametrize(
    ("overlay", "rule"), [(overlay, rule) for overlay in OVERLAYS for rule in RULES_OF[overlay]], ids=word_for
)
def test_the_manifests_keep_the_rules(overlays: dict[str, list[Thing]], overlay: str, rule: Rule) -> None:
    assert rule(overlays[overlay]) == []


@pytest.mark.parametrize("rule", ALL_RULES, ids=word_for)
def test_a_compiler_on_cpu_nodes_keeps_the_rules(compiler_on_cpus: list[Thing], rule: Rule) -> None:
    assert rule(compiler_on_cpus) == []


def test_a_compile_on_cpu_nodes_takes_no_neuron_device(compiler_on_cpus: list[Thing]) -> None:
    """The compiler's pods select no Trainium node, so no such node idles while graphs are compiled."""
    pod = pods_of(compiler_on_cpus)["compiler"]["spec"]
    [container] = pod["containers"]

    assert container["resources"]["limits"].keys() == {"cpu", "memory", "ephemeral-storage"}
    assert "tolerations" not in pod
    assert pod["nodeSelector"] == {"millrace.dev/pool": "cpu"}
    assert "neuron_cores" not in groups_of(compiler_on_cpus)["compiler"]["resources"]
