"""The instance type that a recipe is written for, and that of the nodes which a stage gets."""

from __future__ import annotations

from deploy.client.outline import Outline
from images.platforms import explain_no_image
from services.common.hardware.instance_types import family_of, read_instance_types

IN_THE_RECIPE = "cluster.trainer_instance_type"


def check_instance_type(stage: str, outline: Outline, present: str, how_to_change: str) -> str:
    """What of the recipe the stage's nodes, of type `present`, are not made for; empty where it fits.

    The trainer's nodes are to be of that very type: its plan goes by their memory, peak and price, and the placement of
    its workers by their cores. A compiler on Trainium nodes traces for its family. `how_to_change` says where the type
    of the nodes is set.
    """
    wanted, found = outline.cluster.trainer_instance_type, read_instance_types().get(present)
    if stage != "tokenizer" and (problem := _explain_no_image(wanted or present)):
        return problem
    if found is None:  # without accelerators
        return ""
    if wanted and (wanted != present if stage == "trainer" else family_of(wanted) != family_of(present)):
        return (
            f"{IN_THE_RECIPE} is {wanted}, and the {stage}'s nodes are {present}. Another recipe, or "
            f"ARGS=--{IN_THE_RECIPE}={present} where this one is right for it too (make deploy-stage DRY_RUN=1 tells "
            f"what follows), or nodes of {wanted}: {how_to_change}"
        )
    per_node = outline.cluster.trainer_workers_per_node
    most = found.divided_for(per_node).workers
    if stage != "trainer" or per_node <= most:
        return ""
    return (
        f"cluster.trainer_workers_per_node is {per_node}, and a {present} has {most} {found.accelerators}, one for "
        f"each worker: ARGS=--cluster.trainer_workers_per_node={most}, or nodes of another type: {how_to_change}"
    )


def _explain_no_image(instance_type: str) -> str:
    """Why no image computes there; empty for a type without NeuronCores."""
    found = read_instance_types().get(instance_type)
    return explain_no_image(instance_type) if found and found.accelerators == "NeuronCores" else ""
