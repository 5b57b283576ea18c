"""The imports between modules, and of libraries, as import-linter reads them: from the source, without importing it."""

from __future__ import annotations

from functools import cache

import grimp

# Modules that another imports by name at run time, because not every image has their libraries.
CHOSEN_AT_RUN_TIME = (
    ("services.common.launch.launcher", "services.common.launch.inline"),
    ("services.common.launch.launcher", "services.common.launch.ray_launcher"),
    ("services.common.program.backends.choice", "services.common.program.backends.torch_native"),
)


@cache
def read_imports() -> grimp.ImportGraph:
    graph = grimp.build_graph(
        *("services", "deploy", "k8s"),
        include_external_packages=True,
        exclude_type_checking_imports=True,
        cache_dir=None,
    )
    for importer, imported in CHOSEN_AT_RUN_TIME:
        graph.add_import(importer=importer, imported=imported)
    return graph


def closure_of(*start: str) -> set[str]:
    """Return `start` and what it imports, directly or through others: modules of ours, and libraries by their names."""
    return set(start).union(*map(read_imports().find_upstream_modules, start))
