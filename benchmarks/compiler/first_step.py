"""`python -m benchmarks.compiler.first_step RECIPE CACHE`: prints the seconds to the end of a worker's first step, with
the compile cache CACHE, from the imports on, which are done as the trainer does them."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def main(recipe_path: str, cache: str) -> int:
    started = time.perf_counter()
    from services.common.launch.fork_server import import_modules  # noqa: PLC0415 - a part of what is measured
    from services.common.recipe.file import load_recipe  # noqa: PLC0415
    from services.trainer.worker_start import describe_workers  # noqa: PLC0415

    recipe = load_recipe(Path(recipe_path), {"parallel.data_parallel_size": "1"})
    import_modules(describe_workers(recipe, Path(cache)).preload, can_fork=True)

    from services.common.program.backends.choice import choose_backend  # noqa: PLC0415
    from services.common.program.mesh import make_mesh  # noqa: PLC0415
    from services.common.program.micro_batch import make_synthetic_micro_batch  # noqa: PLC0415
    from services.common.program.step import Program  # noqa: PLC0415

    backend_class = choose_backend(recipe.parallel.device)
    os.environ.update(backend_class.cache_environment(Path(cache), recipe))
    mesh, threads = make_mesh(recipe, rank=0, world_size=1), recipe.parallel.threads_per_worker
    backend = backend_class(mesh, threads, recipe.train.reduction, recipe.parallel.device)
    batches = [make_synthetic_micro_batch(recipe) for _ in range(recipe.batch.num_micro_batches)]
    backend.defer(Program(recipe, backend).train_step(0, batches)._asdict()).read()
    print(time.perf_counter() - started)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
