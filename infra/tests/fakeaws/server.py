"""moto with the shim, on loopback: an AWS for `aws_endpoint`, until it is killed.

python -m infra.tests.fakeaws.server PORT
"""

from __future__ import annotations

import os
import sys

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple

from infra.tests.fakeaws import shim


def serve(port: int) -> None:
    os.environ["MOTO_IAM_LOAD_MANAGED_POLICIES"] = "true"  # else AmazonEKSClusterPolicy is NoSuchEntity
    shim.install()
    run_simple("127.0.0.1", port, DomainDispatcherApplication(create_backend_app), threaded=True)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
