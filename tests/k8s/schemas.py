"""The schemas that the API servers of the test cluster have, read offline from the modules it is compiled from.

Strict where an API server is not: a field that the schema does not name is a problem here; there it is dropped. What
is left out needs a server: defaults, CEL rules of a type, admission, and the operator's own checks.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from images.platforms import REPOSITORY
from tests.k8s.rendered import Thing, name_of

Schema = dict[str, Any]
Kind = tuple[str, str]  # apiVersion and kind

GO_MOD = REPOSITORY / "tests/cluster/kit/go.mod"
KUBERNETES = "k8s.io/kubernetes"
TYPES_OF = {  # module -> the definitions of its types that the manifests use
    "github.com/ray-project/kuberay/ray-operator": [
        f"config/crd/bases/ray.io_{name}.yaml" for name in ("rayclusters", "rayjobs")
    ],
    "volcano.sh/volcano": [
        f"installer/helm/chart/volcano/crd/bases/scheduling.volcano.sh_{name}.yaml" for name in ("podgroups", "queues")
    ],
}
WITHOUT_SCHEMA = {"PodMonitor"}  # the Prometheus operator is no part of the test cluster

METADATA = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
NUMBER = r"([0-9]+(\.[0-9]*)?|\.[0-9]+)"
QUANTITY = {"type": ["integer", "string"], "pattern": rf"^[+-]?{NUMBER}([KMGTPE]i|[numkMGTPE]|[eE][+-]?{NUMBER})?$"}
# Their Go types accept more than the schema's `string` says.
WRITTEN_IN_TWO_WAYS = {
    "io.k8s.apimachinery.pkg.api.resource.Quantity": QUANTITY,
    "io.k8s.apimachinery.pkg.util.intstr.IntOrString": {"type": ["integer", "string"]},
}


class NoSchemas(Exception):
    """The schemas of the API cannot be read on this machine; the message says what to install."""


def read_schemas() -> dict[Kind, Schema]:
    """The strict schema of every kind of Kubernetes, KubeRay and Volcano."""
    folders = _download([KUBERNETES, *TYPES_OF])
    swagger = json.loads((folders[KUBERNETES] / "api/openapi-spec/swagger.json").read_text(encoding="utf-8"))
    shared = {name: closed(schema) for name, schema in swagger["definitions"].items()} | WRITTEN_IN_TWO_WAYS
    schemas = _kinds_of_kubernetes(swagger["definitions"])
    for module, names in TYPES_OF.items():
        for name in names:
            text = (folders[module] / name).read_text(encoding="utf-8")
            schemas |= _kinds_of_type(yaml.load(text, yaml.CSafeLoader))
    return {kind: schema | {"definitions": shared} for kind, schema in schemas.items()}


def problems_of(thing: Thing, schemas: dict[Kind, Schema]) -> list[str]:
    """List the fields of an object that an API server would refuse or drop."""
    schema = schemas.get((thing["apiVersion"], thing["kind"]))
    if schema is None:
        return [f"{name_of(thing)}: {thing['apiVersion']} has no such kind"]
    errors = jsonschema.Draft4Validator(schema).iter_errors(thing)
    return sorted(f"{name_of(thing)} {error.json_path}: {error.message[-200:]}" for error in errors)


def closed(schema: Schema) -> Schema:
    """The same schema, in which every field that is not named is wrong."""
    result = dict(schema)
    for keyword in ("items", "additionalProperties"):
        if isinstance(result.get(keyword), dict):
            result[keyword] = closed(result[keyword])
    if "properties" in result:
        result["properties"] = {name: closed(each) for name, each in result["properties"].items()}
        if not result.get("x-kubernetes-preserve-unknown-fields"):
            result.setdefault("additionalProperties", False)
    return result


def _kinds_of_kubernetes(definitions: dict[str, Schema]) -> dict[Kind, Schema]:
    return {
        ("/".join(filter(None, (each["group"], each["version"]))), each["kind"]): {"$ref": f"#/definitions/{name}"}
        for name, definition in definitions.items()
        for each in definition.get("x-kubernetes-group-version-kind", [])
    }


def _kinds_of_type(type_: Thing) -> dict[Kind, Schema]:
    """A CustomResourceDefinition's versions. It leaves an object's metadata to Kubernetes."""
    spec, result = type_["spec"], {}
    for version in spec["versions"]:
        schema = closed(version["schema"]["openAPIV3Schema"])
        schema["properties"]["metadata"] = {"$ref": f"#/definitions/{METADATA}"}
        result[f"{spec['group']}/{version['name']}", spec["names"]["kind"]] = schema
    return result


def _download(modules: list[str]) -> dict[str, Path]:
    """The folder of each module at the version that the test cluster has; from Go's cache where it was downloaded."""
    if shutil.which("go") is None:
        raise NoSchemas("no `go` on PATH, which downloads the schemas: install Go from https://go.dev/dl")
    pins = dict(re.findall(r"^\t(\S+) (v\S+)$", GO_MOD.read_text(encoding="utf-8"), flags=re.MULTILINE))
    command = ["go", "mod", "download", "-json", *(f"{module}@{pins[module]}" for module in modules)]
    # Outside of any module: inside of one `go` would write to its go.sum.
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stdout + done.stderr)[-500:]
        raise NoSchemas(f"`{' '.join(command)}` failed; it needs a Go module proxy the first time: {said}")
    found = json.loads("[" + done.stdout.replace("}\n{", "},{") + "]")
    return {each["Path"]: Path(each["Dir"]) for each in found}
