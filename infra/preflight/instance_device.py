"""Refuses Trainium instance types on which no image computes, because they would cost money and train nothing."""

from __future__ import annotations

from images.platforms import explain_no_image
from infra.apply.inputs import Inputs
from infra.preflight.requirement import Finding
from infra.shapes import read_shapes


def judge_device(inputs: Inputs) -> list[Finding]:
    """A finding if no image computes on the chosen instance type."""
    problem = explain_no_image(inputs.trainium_shape)
    if not problem:
        return []
    fitting = [name for name, shape in read_shapes().items() if shape.neuron_devices and not explain_no_image(name)]
    return [
        Finding(
            what=problem,
            where="variable trainium",
            got=inputs.trainium_shape,
            expected=f"one of {', '.join(fitting)}",
            command="write one of them into trainium.shape of terraform.tfvars, with a region and zone that offer it",
        )
    ]
