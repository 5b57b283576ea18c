"""Checks whether the stages' images compute on the Trainium nodes, and accept the Neuron driver of their machine image.

Terraform itself checks that the table lists the machine image and that the region has it.
"""

from __future__ import annotations

from images.platforms import explain_no_image, find_variant, read_neuron_nodes
from infra.apply.inputs import Inputs
from infra.aws_releases import read_machine_images
from infra.shapes import read_shapes

TABLE = "infra/aws_releases.json"
CheckResult = tuple[str, list[str]]  # what was seen, in one line, and the requirements that are not met


def check_machine_image(inputs: Inputs) -> CheckResult:
    """Checks the instance type and the machine image before a node is paid for that trains nothing."""
    shape, tables = inputs.trainium.shape, read_machine_images()
    variant = find_variant(shape)
    if not variant:
        fitting = [name for name, facts in read_shapes().items() if facts.neuron_devices and find_variant(name)]
        command = f"Write one of {', '.join(fitting)} into trainium.shape, with a region and zone that offer it"
        return f"no image computes on {shape}", [f"{explain_no_image(shape)}. {command}"]
    if inputs.has_cluster and not inputs.kubernetes_version:
        return f"images compute on {shape}; the stack chooses its machine image itself", []
    images = tables.get(inputs.kubernetes_version)
    if images is None:
        known = ", ".join(filter(None, tables))
        seen = f"no release for Kubernetes {inputs.kubernetes_version} is in {TABLE}"
        return seen, [f"{seen}: kubernetes_version is one of {known}; or add its releases to the table"]
    node = read_neuron_nodes()[variant]
    fitting = [release for release, driver in images.drivers.items() if node.takes_driver(driver)]
    release = inputs.ami_id or inputs.ami_release or images.default
    # AWS alone knows the name behind an ami_id, so that is refused only if no listed release fits.
    if release in fitting or (inputs.ami_id and fitting):
        return f"images compute on {shape}, and accept the Neuron driver of {release}", []
    variable, got = "ami_release" if inputs.has_cluster else "ami_id", images.drivers.get(release, "unknown")
    return f"the images for {shape} do not accept the Neuron driver of {release}", [
        f"the images for {shape} do not accept the Neuron driver of {release}: got {got}, expected "
        f"{node.describe_drivers()} (images/platforms.toml). {TABLE} lists {', '.join(fitting) or 'none'} for "
        f"{variable}; look up the aws-neuronx-dkms of others in {images.look_up}, and add one to the table"
    ]
