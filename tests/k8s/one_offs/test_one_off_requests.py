"""A one-off's request: its two Jobs, its image and recipe, and requests that are refused before anything is created."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
import yaml

from k8s.client import kuberay_one_off
from k8s.objects.deploy_job import render_deploy_job
from k8s.objects.names import good_images_annotation
from k8s.objects.one_off_job import cpu_group_of, render_one_off_job, render_one_off_nodes_job
from k8s.objects.recipe import render_recipe_config_map
from k8s.objects.worker_group import worker_group_of
from services.common.errors import LimitError, RecipeError
from services.common.process.subcommands import LABEL
from services.common.recipe.packed_recipe import RECIPE_VARIABLE, unpack_recipe
from services.common.recipe.schema import STAGES, Stage
from services.common.testing.recipes import recipe_text
from tests.k8s.builders import deployment_of
from tests.k8s.one_offs.cluster import IMAGE, Ask, Cluster, one_off_of, run
from tests.k8s.rendered import OVERLAYS, Thing, cluster_of
from tests.k8s.schemas import Kind, Schema, problems_of


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("stage", STAGES)
def test_both_jobs_fit_the_api(
    overlays: dict[str, list[Thing]], schemas: dict[Kind, Schema], overlay: str, stage: Stage
) -> None:
    cluster = cluster_of(overlays[overlay])
    group, cpu_group = worker_group_of(cluster, stage), cpu_group_of(cluster)
    for memory_gib in (None, 1):
        sent = render_one_off_job(group, cpu_group, one_off_of(stage, memory_gib=memory_gib))
        assert problems_of(sent, schemas) == []
    assert problems_of(render_one_off_nodes_job(cpu_group, one_off_of(stage)), schemas) == []


@pytest.mark.parametrize("stage", STAGES)
def test_a_one_off_is_a_pod_of_its_stage_on_a_cpu_node(overlays: dict[str, list[Thing]], stage: Stage) -> None:
    """tests/contract/test_one_off.py has its command, variables and mounts."""
    cluster = cluster_of(overlays["eks"])
    group, cpu_group = worker_group_of(cluster, stage), cpu_group_of(cluster)
    job = render_one_off_job(group, cpu_group, one_off_of(stage))
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == (stage, False)
    assert (pod["nodeSelector"], pod.get("tolerations", [])) == ({"millrace.dev/pool": "cpu"}, [])
    assert container["resources"] == cpu_group.container["resources"]
    assert pod["securityContext"]["runAsUser"] == 10_001
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert job["spec"]["backoffLimit"] == 0


def test_memory_brings_its_share_of_a_node(overlays: dict[str, list[Thing]]) -> None:
    cluster = cluster_of(overlays["eks"])
    group, cpu_group = worker_group_of(cluster, "trainer"), cpu_group_of(cluster)
    job = render_one_off_job(group, cpu_group, one_off_of(memory_gib=28))  # a quarter
    amounts = {"cpu": "7500m", "memory": str(28 * 2**30), "ephemeral-storage": str(25 * 2**30)}
    assert job["spec"]["template"]["spec"]["containers"][0]["resources"] == {"requests": amounts, "limits": amounts}
    for wrong in (0, 113):
        with pytest.raises(LimitError, match=f"MEMORY={wrong}: .*112 GiB"):
            render_one_off_job(group, cpu_group, one_off_of(memory_gib=wrong))


def test_what_holds_the_node_has_the_deployer_s_account_and_no_shared_file_system(
    overlays: dict[str, list[Thing]],
) -> None:
    job = render_one_off_nodes_job(cpu_group_of(cluster_of(overlays["eks"])), one_off_of())
    pod = job["spec"]["template"]["spec"]
    assert job["metadata"]["name"] == "one-off-nodes-trainer-abc123"
    assert (pod["serviceAccountName"], pod["nodeSelector"]) == ("deployer", {"millrace.dev/pool": "core"})
    assert [volume["name"] for volume in pod["volumes"]] == ["scratch"]


def test_what_cannot_be_is_refused_before_anything_is_created(api: Cluster, ask: Ask, labels: dict[str, str]) -> None:
    with pytest.raises(LimitError, match="MEMORY=500"):
        run(api, ask(memory_gib=500))
    labels[LABEL] = "evaluate"
    with pytest.raises(RecipeError, match="'summary' is no subcommand of the trainer, which has evaluate"):
        run(api, ask())
    assert api.sent == []


def test_the_image_is_that_of_the_newest_deployment_or_the_newest_good_one(
    api: Cluster, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    def image_of_the_newest(**changes: Any) -> str:
        run(api, ask(is_followed=False, **changes))
        return str(api.sent[-1]["spec"]["template"]["spec"]["containers"][0]["image"])

    assert image_of_the_newest() == IMAGE
    other = f"sha256:{'1' * 64}"
    assert image_of_the_newest(tag=other) == f"millrace/trainer@{other}"
    cluster = api.find("RayCluster", "millrace")
    assert cluster
    cluster["spec"]["workerGroupSpecs"][2]["template"]["spec"]["containers"][0]["image"] = "millrace/trainer:unset"
    api.merge("RayCluster", "millrace", {"spec": cluster["spec"]})
    good = json.dumps(["millrace/trainer@sha256:a", "millrace/trainer@sha256:b"])
    api.merge("RayCluster", "millrace", {"metadata": {"annotations": {good_images_annotation("trainer"): good}}})
    assert image_of_the_newest() == "millrace/trainer@sha256:b"
    api.merge("RayCluster", "millrace", {"metadata": {"annotations": {good_images_annotation("trainer"): None}}})
    monkeypatch.setattr(kuberay_one_off, "choose_image", lambda api, stage, *rest: f"{stage} of the working tree")
    assert image_of_the_newest() == "trainer of the working tree"


def recipe_of(job: Thing) -> str:
    variables = {each["name"]: each.get("value") for each in job["spec"]["template"]["spec"]["containers"][0]["env"]}
    return unpack_recipe(variables[RECIPE_VARIABLE]).decode() if variables.get(RECIPE_VARIABLE) else ""


def test_the_recipe_is_that_of_the_newest_deployment_with_what_it_changed(api: Cluster, ask: Ask) -> None:
    """A one-off takes the overrides of the newest deployment, so that it finds the run that these named."""
    text = recipe_text(name="deployed")
    deployment = replace(
        deployment_of(), arguments=("--optimizer.learning_rate=0.1", "--corpus=/fsx/c", "--train.seed=1")
    )
    api.create(render_recipe_config_map("trainer", text, deployment.recipe_digest))
    job = render_deploy_job(worker_group_of(api.find("RayCluster", "millrace") or {}, "trainer"), deployment)
    api.create(job)
    run(api, ask("export", "--output", "hf", "--train.seed=2", recipe=None, is_followed=False))
    sent = api.sent[-1]
    words = sent["spec"]["template"]["spec"]["containers"][0]["args"]
    overrides = ["--optimizer.learning_rate=0.1", "--train.seed=1"]
    assert words[words.index("--") + 1 :] == ["export", *overrides, "--output", "hf", "--train.seed=2"]
    assert recipe_of(sent) == text
    run(api, ask(is_followed=False))
    assert recipe_of(api.sent[-1]) == recipe_text(), "RECIPE= names another"
    api.delete("Job", "deploy-trainer")
    run(api, ask(recipe=None, is_followed=False))
    assert 'name = "llama2-7b-trn1"' in recipe_of(api.sent[-1]), "the overlay's"
    run(api, ask("artifacts", "list", ".", recipe=None, is_followed=False))
    assert recipe_of(api.sent[-1]) == ""


def test_a_dry_run_shows_it_and_creates_nothing(pooled: Cluster, ask: Ask, schemas: dict[Kind, Schema]) -> None:
    file = io.StringIO()
    assert run(pooled, ask(is_dry_run=True), file) == 0
    documents = list(yaml.safe_load_all(file.getvalue()))
    assert [problem for each in documents for problem in problems_of(each, schemas)] == []
    assert [each["metadata"]["name"].rpartition("-")[0] for each in documents] == [
        "one-off-nodes-trainer",
        "one-off-trainer",
    ]
    assert pooled.sent == []
