"""A shim of neuronx-cc that compiles nothing, for a run whose graphs all have to be in its cache.

libneuronxla starts `neuronx-cc compile ...` from PATH for each graph that its cache does not hold. The shim comes first
on PATH, records the request and fails, so that a miss takes a second instead of an hour on every core.
"""

from __future__ import annotations

import atexit
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.common.errors import DeviceError
from services.common.program.backends.warm_cache import missing_graphs

COMPILER = "neuronx-cc"

# libneuronxla hands over a graph as `.../model.MODULE_<hash>+<hash of the flags>.hlo_module.pb`.
_MODULE = re.compile(r"MODULE_\w+\+\w+")
_REQUESTS = "requests"

_SCRIPT = """\
#!/bin/sh
if [ "$1" != compile ]; then {otherwise}; fi
printf '%s\\n' "$*" >> {requests}
echo "millrace: compile.require_warm is set, and neuronx-cc was asked to compile: $*" >&2
exit {exit_code}
"""


class CompilerShim:
    """The executable shim in a folder of its own, and the requests that it recorded."""

    def __init__(self, folder: Path) -> None:
        """Write the shim. It passes commands other than `compile` on to the neuronx-cc that PATH has now."""
        self._requests = folder / _REQUESTS
        self.path = f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        """PATH of this process with the shim first."""
        real = shutil.which(COMPILER)
        otherwise = f'exec {shlex.quote(real)} "$@"' if real else "exit 127"
        script = _SCRIPT.format(
            otherwise=otherwise, requests=shlex.quote(str(self._requests)), exit_code=DeviceError.exit_code
        )
        shim = folder / COMPILER
        shim.write_text(script, encoding="utf-8")
        shim.chmod(0o700)

    @contextmanager
    def first_on_path(self) -> Iterator[None]:
        """Let the shim come first on this process's PATH during the block."""
        before, os.environ["PATH"] = os.environ.get("PATH", os.defpath), self.path
        try:
            yield
        finally:
            os.environ["PATH"] = before

    def refusal(self) -> DeviceError | None:
        """Return the error that names the requested graphs; None where no graph was requested."""
        if not self._requests.exists():
            return None
        requests = self._requests.read_text(encoding="utf-8", errors="replace").splitlines()
        found = ((_MODULE.search(request), request) for request in requests)
        return missing_graphs(list(dict.fromkeys(module.group() if module else request for module, request in found)))


def make_shim() -> CompilerShim:
    """Make a shim that is removed when this process ends."""
    folder = tempfile.mkdtemp(prefix="millrace-shim-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return CompilerShim(Path(folder))


def forbid_compiler() -> CompilerShim:
    """Put a shim first on this process's PATH, until the process ends. Call it before the first graph is made."""
    shim = make_shim()
    os.environ["PATH"] = shim.path
    return shim
