"""Lists the commands from an empty account to an exported model, on EKS and on Batch, in order.

`infra-up` prints the commands after it with the account's own values; the documentation has all of them with the values
of `EXAMPLE`. Names in braces are attributes of `Place`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

Target = Literal["eks", "batch"]
_COMMENT_COLUMN = 50


class Step(NamedTuple):
    """A command and a comment on it."""

    command: str
    comment: str


@dataclass(frozen=True)
class Place:
    """Names in an account that the commands contain."""

    region: str
    name: str
    registry: str
    bucket: str
    variant: str
    """The variant of the images that compute on the account's Trainium nodes."""


EXAMPLE = Place("us-west-2", "millrace", "111122223333.dkr.ecr.us-west-2.amazonaws.com", "BUCKET", "neuron")
_LOGIN = Step(
    "aws ecr get-login-password --region {region} | docker login --username AWS --password-stdin {registry}",
    "",
)

ROADS: dict[Target, tuple[Step, ...]] = {
    "eks": (
        Step(
            "cp infra/stacks/eks/terraform.tfvars.example infra/stacks/eks/terraform.tfvars",
            "region, zone, your address",
        ),
        Step("make infra-cost NODES=4 HOURS=72", "offline, before anything else"),
        Step("make infra-preflight", "checks zone, quotas, addresses, images"),
        Step("make infra-up", "cost, plan, question"),
        Step("aws eks update-kubeconfig --region {region} --name {name}", ""),
        Step("make addons", "KubeRay, Volcano, device plugins, Prometheus"),
        _LOGIN,
        Step("make images VARIANT={variant} PUSH={registry}", ""),
        Step("make cluster-up OVERLAY=eks", "the RayCluster, with no stage's nodes"),
        Step(
            "kubectl -n millrace create secret generic hugging-face --from-file=token=/dev/stdin",
            "paste the token, then Ctrl-D",
        ),
        Step("make deploy-stage STAGE=tokenizer", "Llama 2 7B: the overlay's RECIPE"),
        Step("make deploy-stage STAGE=compiler", "the first that pays for a Trainium node"),
        Step("make deploy-stage STAGE=trainer", "pays for 4 Trainium nodes"),
        Step('make stage-run STAGE=trainer COMMAND="export --output export/llama2-7b"', "for Hugging Face, in /fsx"),
        Step("make infra-down", "the data stays; then make infra-leftovers"),
    ),
    "batch": (
        Step(
            "cp infra/stacks/batch/terraform.tfvars.example infra/stacks/batch/terraform.tfvars",
            "region, zone_id",
        ),
        Step(
            "aws secretsmanager create-secret --region {region} --name hugging-face --secret-string file:///dev/stdin "
            "--query ARN",
            "paste the token, then Ctrl-D; the ARN is hugging_face_secret",
        ),
        Step("make infra-cost STACK=batch NODES=4 HOURS=24", "offline, before anything else"),
        Step("make infra-preflight STACK=batch", "checks zone, quotas, addresses, images"),
        Step("make infra-up STACK=batch", "cost, plan, question; writes deploy/batch/config.txt"),
        _LOGIN,
        Step("make images VARIANT={variant} PUSH={registry}", ""),
        Step("make deploy-stage STAGE=tokenizer TARGET=batch", "Llama 2 7B, unless RECIPE= says another"),
        Step("make deploy-stage STAGE=compiler TARGET=batch", "the first that pays for a Trainium node"),
        Step("make deploy-stage STAGE=trainer TARGET=batch", "pays for 4 Trainium nodes"),
        Step(
            'make stage-run STAGE=trainer COMMAND="export --output export/llama2-7b" TARGET=batch',
            "for Hugging Face, in /fsx",
        ),
        Step("make infra-down STACK=batch", "the data stays; then make infra-leftovers STACK=batch"),
    ),
}


def describe_road(target: Target, place: Place = EXAMPLE, after: str = "") -> list[str]:
    """Prints a line per command, with its comment, from the one that follows the command beginning with `after`."""
    steps = ROADS[target]
    begin = next(number for number, step in enumerate(steps, start=1) if step.command.startswith(after)) if after else 0
    return [_line(step, place) for step in steps[begin:]]


def describe_vocabulary(place: Place = EXAMPLE) -> list[str]:
    """Commands that give the tokenizer a vocabulary file, so that it needs no token for a gated one."""
    address = f"s3://{place.bucket}/tokenizer/tokenizer.model"
    return [
        f"aws s3 cp tokenizer.model {address}",
        f'tokenizer.model = "{address}" in a copy of the recipe, which each deployment names: RECIPE=FILE',
    ]


def _line(step: Step, place: Place) -> str:
    command = step.command.format(**asdict(place))
    width = max(_COMMENT_COLUMN, len(command) + 2)
    return f"{command:<{width}s}# {step.comment}" if step.comment else command
