"""Which backend runs the program here. Its libraries are imported when it is chosen, and those of no other."""

from __future__ import annotations

import importlib
from typing import cast

from services.common.image_platform import require_backend
from services.common.program.backends.protocol import Backend
from services.common.recipe import Device


def choose_backend(device: Device) -> type[Backend]:
    """The backend of the recipe's device. Raises `DeviceError` where this image or this node is for another."""
    entry = require_backend(device)
    module = importlib.import_module(f"services.common.program.backends.{entry.module}")
    return cast(type[Backend], getattr(module, entry.class_name))
