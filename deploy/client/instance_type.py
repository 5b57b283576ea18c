"""Compares the instance type that a recipe is written for with that of the nodes that a stage gets."""

from __future__ import annotations

from deploy.client.outline import Outline
from images.platforms import explain_no_image
from services.common.hardware.instance_types import family_of, read_instance_types

RECIPE_KEY = "cluster.trainer_instance_type"


def check_instance_type(stage: str, outline: Outline, present: str, how_to_change: str) -> str:
    """The reason why the recipe does not suit the stage's nodes, which have type `present`; empty where it does.

    The trainer's nodes must have exactly the recipe's type: its plan uses their memory, peak and price, and its workers
    are placed by their cores. A compiler on Trainium nodes traces for a family. `how_to_change` says where the type of
    the nodes is set.
    """
    types, wanted = read_instance_types(), outline.cluster.trainer_instance_type
    found, asked = types.get(present), types.get(wanted or present)
    is_neuron = stage != "tokenizer" and asked and asked.accelerators == "NeuronCores"
    if is_neuron and (problem := explain_no_image(wanted or present)):
        return problem
    if found is None:  # without accelerators
        return ""
    if wanted and (wanted != present if stage == "trainer" else family_of(wanted) != family_of(present)):
        return (
            f"{RECIPE_KEY} is {wanted}, but the {stage}'s nodes are {present}. Use another recipe; or "
            f"ARGS=--{RECIPE_KEY}={present} if this recipe suits that type too (make deploy-stage DRY_RUN=1 shows the "
            f"plan); or nodes of {wanted}: {how_to_change}"
        )
    per_node = outline.cluster.trainer_workers_per_node
    most = found.divided_for(per_node).workers
    if stage != "trainer" or per_node <= most:
        return ""
    return (
        f"cluster.trainer_workers_per_node is {per_node}, but a {present} has {most} {found.accelerators}, one for "
        f"each worker: use ARGS=--cluster.trainer_workers_per_node={most}, or nodes of another type: {how_to_change}"
    )
