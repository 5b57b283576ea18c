"""Reads boto3's service models once per process, because every session reads them again, EC2's in half a second."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from botocore.loaders import JSONFileLoader, Loader


@pytest.fixture(scope="session", autouse=True)
def service_models() -> Iterator[None]:
    """Shares the models, and the list of services that have one. Clients only read them.

    A session lists 450 folders for each list of services, a fifth of the time that a simulated account takes to begin.
    """
    read, list_services = JSONFileLoader.load_file, Loader.list_available_services

    @cache
    def load_file(path: str) -> Any:
        return read(JSONFileLoader(), path)

    services: dict[tuple[str, ...], list[str]] = {}

    def list_available_services(loader: Any, type_name: str) -> list[str]:
        key = (type_name, *loader.search_paths)
        if key not in services:
            services[key] = list_services(loader, type_name)
        return services[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JSONFileLoader, "load_file", lambda loader, path: load_file(path))
        patch.setattr(Loader, "list_available_services", list_available_services)
        yield
