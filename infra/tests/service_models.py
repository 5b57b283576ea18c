"""Reads boto3's service models once per process, because every session reads them again, EC2's in half a second."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from botocore.loaders import JSONFileLoader


def share_service_models(patch: pytest.MonkeyPatch) -> None:
    """Shares the models until the patch ends, which is safe because clients only read them."""
    read = JSONFileLoader.load_file

    @cache
    def load_file(path: str) -> Any:
        return read(JSONFileLoader(), path)

    patch.setattr(JSONFileLoader, "load_file", lambda loader, path: load_file(path))
