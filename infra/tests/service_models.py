"""What boto3 knows of AWS' services, read once a process: each session reads it anew, EC2's in half a second."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from botocore.loaders import JSONFileLoader


def share_service_models(patch: pytest.MonkeyPatch) -> None:
    """Until the patch ends. A client only reads its model."""
    read = JSONFileLoader.load_file

    @cache
    def load_file(path: str) -> Any:
        return read(JSONFileLoader(), path)

    patch.setattr(JSONFileLoader, "load_file", lambda loader, path: load_file(path))
