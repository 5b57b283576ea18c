"""Imports what every worker needs, once, in the fork server from which workers start.

The fork server of `multiprocessing` can only import modules, so this work happens at import. No garbage is collected
meanwhile, a quarter of the time. What was imported is frozen: a collection writes to every object that it looks at, and
forks would then not share its memory.
"""

from __future__ import annotations

import gc

gc.disable()
try:
    import services.common.program.backends.torch_native
    import services.trainer.supervision.supervise  # noqa: F401
finally:
    gc.freeze()
    gc.enable()
