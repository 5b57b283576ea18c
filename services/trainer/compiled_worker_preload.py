"""Does as `worker_preload` does for workers whose steps Inductor compiles."""

from __future__ import annotations

import gc

import services.trainer.worker_preload

gc.disable()
try:
    import services.common.program.backends.inductor  # noqa: F401
    from services.trainer.inductor_start import begin_inductor

    begin_inductor()
finally:
    gc.freeze()
    gc.enable()
