"""The facts of a head's image. A client asks for them before it sends anything: `python -m k8s.deploy.head_facts`
prints a JSON object.

`platform` (variant, python, ray) decides which stages' images may join; `records` are the versions of a deployment's
record that its deploy Jobs read.
"""

from __future__ import annotations

import json

from k8s.objects.deployment import RECORDS_READ
from services.common.image_platform import describe_platform


def describe_head() -> dict[str, object]:
    found = describe_platform()
    return {"platform": {name: found[name] for name in ("variant", "python", "ray")}, "records": RECORDS_READ}


def main() -> int:
    print(json.dumps(describe_head()))
    return 0
