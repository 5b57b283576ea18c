"""A neuronx-cc that compiles nothing, for a run whose graphs have to be in its cache.

libneuronxla starts `neuronx-cc compile ...` by name, from PATH, for each graph that its cache does not hold. There the
shim comes first: it notes what it was asked for and fails, so that a miss takes a second and not an hour on every core.
"""

from __future__ import annotations

import atexit
import os
import re
import shlex
import shutil
from contextlib import ExitStack
from pathlib import Path

from services.common.errors import DeviceError
from services.common.private_folder import new_name, private_folder

COMPILER = "neuronx-cc"
EXIT_CODE = DeviceError.exit_code

# libneuronxla hands over a graph as `.../model.MODULE_<hash>+<hash of the flags>.hlo_module.pb`.
_MODULE = re.compile(r"MODULE_\w+\+\w+")
_REQUESTS = "requests"
_SHOWN_GRAPHS = 4

_SCRIPT = """\
#!/bin/sh
if [ "$1" != compile ]; then {otherwise}; fi
printf '%s\\n' "$*" >> {requests}
echo "millrace: compile.require_warm is set, and neuronx-cc was asked for: $*" >&2
exit {exit_code}
"""


class CompilerShim:
    """The shim in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        """Writes the shim, which hands on to the neuronx-cc that PATH has now what does not compile."""
        self._requests = folder / _REQUESTS
        real = shutil.which(COMPILER)
        otherwise = f'exec {shlex.quote(real)} "$@"' if real else "exit 127"
        script = _SCRIPT.format(otherwise=otherwise, requests=shlex.quote(str(self._requests)), exit_code=EXIT_CODE)
        shim = folder / COMPILER
        shim.write_text(script, encoding="utf-8")
        shim.chmod(0o700)

    def refusal(self) -> DeviceError | None:
        """What a run ends with once the shim was asked for a graph; nothing before that."""
        if not self._requests.exists():
            return None
        requests = self._requests.read_text(encoding="utf-8", errors="replace").splitlines()
        graphs = list(dict.fromkeys(_name_graph(request) for request in requests))
        named = ", ".join(graphs[:_SHOWN_GRAPHS]) + (" ..." if len(graphs) > _SHOWN_GRAPHS else "")
        return DeviceError(
            f"compile.require_warm is set, and the compile cache does not hold {named} ({len(graphs)} in all). It was "
            f"made for another step; run the compiler stage again, or set --compile.require_warm=false to compile here."
        )


def forbid_compiler() -> CompilerShim:
    """Put the shim first on this process's PATH, for as long as the process lives. Call it before a first graph."""
    stack = ExitStack()
    folder = stack.enter_context(private_folder(new_name("shim")))
    atexit.register(stack.close)  # of a process that is killed, the next command removes it
    shim = CompilerShim(folder)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return shim


def _name_graph(request: str) -> str:
    found = _MODULE.search(request)
    return found.group() if found else request
