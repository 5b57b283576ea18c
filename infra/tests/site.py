"""A place in which infra-up and infra-down run: a small stack, an overlay, and stand-ins for kubectl and helm."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.account.session import STACK_TAG
from infra.addons.releases import MARK, MARKED, read_releases
from infra.tests.programs import Programs

if TYPE_CHECKING:
    from infra.tests.conftest import Aws

VARIABLES = """
variable "region" { default = "us-west-2" }
variable "name" { default = "millrace" }
variable "zone_id" { default = "usw2-az4" }
variable "trainium" { default = { shape = "trn1.32xlarge", max_nodes = 4 } }
variable "cpu_nodes" { default = { shape = "m7i.8xlarge", max_nodes = 2 } }
variable "fsx" { default = { gib = 1200, throughput = 250 } }
variable "keep_data" { default = true }
variable "budget" { default = {} }
"""
EKS_VARIABLES = """
variable "kubernetes_version" { default = "1.35" }
variable "kubernetes_support" { default = "STANDARD" }
variable "core_nodes" { default = { shape = "m7i.2xlarge", nodes = 2 } }
"""
MAIN = """
module "network" { source = "./network" }
module "storage" {
  source    = "./storage"
  subnet    = module.network.subnet
  zone_id   = var.zone_id
  keep_data = var.keep_data
}
module "eks" {
  source = "./eks"
  bucket = module.storage.bucket
}
output "region" { value = var.region }
output "cluster_name" { value = var.name }
output "registry" { value = "123456789012.dkr.ecr.us-west-2.amazonaws.com" }
output "bucket" { value = "millrace-123456789012" }
output "fsx_id" { value = "fs-0123456789" }
output "fsx_dns_name" { value = "fs-0123456789.fsx.us-west-2.amazonaws.com" }
output "fsx_mount_name" { value = "abcdefgh" }
output "trainium_shape" { value = var.trainium.shape }
output "trainium_node_group" { value = "trainium" }
output "trainium_max_nodes" { value = var.trainium.max_nodes }
output "cpu_shape" { value = var.cpu_nodes.shape }
output "cpu_node_group" { value = "cpu" }
output "cpu_max_nodes" { value = var.cpu_nodes.max_nodes }
output "capacity_ends_at" { value = "" }
"""
NETWORK = """
resource "terraform_data" "subnet" {}
output "subnet" { value = terraform_data.subnet.id }
"""
STORAGE = """
variable "subnet" {}
variable "zone_id" {}
variable "keep_data" {}
resource "terraform_data" "bucket" {
  input            = [var.subnet, var.keep_data]
  triggers_replace = var.zone_id
}
output "bucket" { value = terraform_data.bucket.id }
"""
EKS = """
variable "bucket" {}
resource "terraform_data" "cluster" {
  input = var.bucket
  provisioner "local-exec" {
    command = "[ ! -e \\"$SLOW\\" ] || { echo began >\\"$SLOW\\"; sleep 2; }"
  }
}
"""
SETTINGS = "# A comment that stays.\nREGION=CHANGE-ME\nFSX_ID=CHANGE-ME\nTRAINIUM_SHAPE=trn1.32xlarge\n"
EKS_STACK = {
    "variables.tf": VARIABLES + EKS_VARIABLES,
    "main.tf": MAIN,
    "network/main.tf": NETWORK,
    "storage/main.tf": STORAGE,
    "eks/main.tf": EKS,
}
BATCH_CONFIG = "REGION=us-west-2\nNAME=millrace\nECR_REPO=123456789012.dkr.ecr.us-west-2.amazonaws.com/millrace\n"
BATCH_MAIN = f"""
resource "terraform_data" "given" {{}}
module "network" {{
  source = "./network"
  count  = 1
}}
module "storage" {{
  source    = "./storage"
  subnet    = module.network[0].subnet
  zone_id   = var.zone_id
  keep_data = var.keep_data
}}
module "batch" {{
  source = "./eks"
  bucket = module.storage.bucket
}}
output "config" {{ value = {json.dumps(BATCH_CONFIG)} }}
output "bucket" {{ value = "millrace-123456789012" }}
"""
BATCH_STACK = EKS_STACK | {"variables.tf": VARIABLES, "main.tf": BATCH_MAIN}

# A file a kind of object holds what `get` answers; `kinds.txt` what the cluster knows of.
KUBECTL = """
case "$*" in
"config view"*) echo '{"clusters": [{"cluster": {"server": "SERVER"}}]}' ;;
"api-resources"*) group="${2#*=}"; grep "[.]$group$" OBJECTS/kinds.txt || true ;;
"get "*"--all-namespaces"*) if [ -e "OBJECTS/$2.json" ]; then cat "OBJECTS/$2.json"; fi ;;
"apply "*) cat >>OBJECTS/applied.txt ;;
esac"""
HELM = f"""
case "$*" in
"list"*"--selector {MARK}={MARKED}"*) cat OBJECTS/own-releases.json ;;
"list"*) cat OBJECTS/releases.json ;;
"show crds "*) echo "definitions of $3" ;;
esac
"""

ADDONS = tuple((each.name, each.namespace, f"{each.chart}-{each.version}") for each in read_releases())


class Cluster:
    """A cluster as kubectl and helm see it, from files in a folder; nobody has installed anything at first."""

    def __init__(self, folder: Path, programs: Programs) -> None:
        self.folder, self.programs = folder, programs
        (folder / "kinds.txt").touch()
        self.install()

    def put(self, kinds: str, *things: dict[str, Any]) -> None:
        """Sets the answer to `kubectl get KINDS --all-namespaces`, with KINDS as the caller spells them."""
        (self.folder / f"{kinds}.json").write_text(json.dumps({"items": things}), encoding="utf-8")

    def install(self, *releases: tuple[str, str, str], ours: tuple[tuple[str, str, str], ...] = ()) -> None:
        """The helm releases of the cluster, as name, namespace and chart: others', and those of `make addons`."""
        for file, found in (("releases.json", [*releases, *ours]), ("own-releases.json", list(ours))):
            keys = ("name", "namespace", "chart")
            listed = [dict(zip(keys, each, strict=True)) for each in found]
            (self.folder / file).write_text(json.dumps(listed), encoding="utf-8")

    def answer(self, endpoint: str = "", helm: str = "") -> None:
        """kubectl talks to the cluster at `endpoint`; `helm` is more bash."""
        self.programs.add("kubectl", KUBECTL.replace("SERVER", endpoint).replace("OBJECTS", str(self.folder)))
        self.programs.add("helm", HELM.replace("OBJECTS", str(self.folder)) + helm)


class Site(Cluster):
    """A stack that is not applied yet, an overlay, the place of `config.txt`, and the programs that a person has."""

    def __init__(self, folder: Path, programs: Programs, stack: Mapping[str, str]) -> None:
        super().__init__(folder, programs)
        self.stack, self.overlay, self.config = folder / "stack", folder / "overlay", folder / "config.txt"
        for name, content in stack.items():
            (self.stack / name).parent.mkdir(parents=True, exist_ok=True)
            (self.stack / name).write_text(content, encoding="utf-8")
        self.overlay.mkdir()
        (self.overlay / "settings.env").write_text(SETTINGS, encoding="utf-8")

    @property
    def settings(self) -> dict[str, str]:
        lines = (self.overlay / "settings.env").read_text(encoding="utf-8").splitlines()
        return dict(line.split("=", 1) for line in lines if not line.startswith("#"))

    @property
    def addresses(self) -> list[str]:
        """The resources in terraform's state."""
        state = json.loads((self.stack / "terraform.tfstate").read_text(encoding="utf-8"))
        return sorted(f"{each.get('module')}.{each['type']}.{each['name']}" for each in state["resources"])


def make_cluster(site: Site, aws: Aws) -> Site:
    """An EKS cluster as the stack makes it, two nodes in each of two pools, with the add-ons of `make addons` on it."""
    subnets = aws.make_subnets("usw2-az4", tags={STACK_TAG: "millrace"})
    aws.client("ec2").create_tags(Resources=subnets, Tags=[{"Key": STACK_TAG, "Value": "millrace"}])
    aws.make_cluster(subnets)
    for pool in ("core", "trainium"):
        aws.make_node_group(pool, subnets, size=2)
    site.answer(aws.client("eks").describe_cluster(name="millrace")["cluster"]["endpoint"])
    site.install(ours=ADDONS)
    return site


def thing(kind: str, name: str, namespace: str = "", **spec: Any) -> dict[str, Any]:
    """An object as `kubectl get` prints it."""
    where = {"namespace": namespace} if namespace else {}
    return {"kind": kind, "metadata": {"name": name, **where}, "spec": spec}


def volume_for(claim: str) -> list[dict[str, Any]]:
    """The tags of a volume that the EBS driver makes on the cluster for a claim, given as namespace/name."""
    namespace, _, name = claim.partition("/")
    tags = {
        "kubernetes.io/cluster/millrace": "owned",
        "kubernetes.io/created-for/pvc/namespace": namespace,
        "kubernetes.io/created-for/pvc/name": name,
    }
    return [{"ResourceType": "volume", "Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}]
