"""Which backend runs the program here. Its libraries are imported when it is chosen, and those of no other."""

from __future__ import annotations

import importlib
from typing import cast

from services.common.image_platform import image_variant, require_backend
from services.common.program.backends.protocol import Backend


def choose_backend() -> type[Backend]:
    """The backend of the device that this image's variant is for. Raises `DeviceError` where there is none."""
    entry = require_backend(image_variant())
    module = importlib.import_module(f"services.common.program.backends.{entry.module}")
    return cast(type[Backend], getattr(module, entry.class_name))
