"""The choice of the backend. Only the chosen backend's libraries are imported."""

from __future__ import annotations

import importlib
from typing import cast

from services.common.hardware.image_platform import require_backend
from services.common.program.backends.backend import Backend
from services.common.recipe.schema import Device


def choose_backend(device: Device) -> type[Backend]:
    """Return the backend of the recipe's device. Raises `DeviceError` where this image or node is for another."""
    entry = require_backend(device)
    module = importlib.import_module(f"services.common.program.backends.{entry.module}")
    return cast(type[Backend], getattr(module, entry.class_name))
