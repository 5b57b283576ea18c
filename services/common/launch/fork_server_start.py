"""Acts when it is imported, which `multiprocessing` does in its fork server before the first fork.

Names of modules to import are all that `multiprocessing` passes to its server.
"""

from services.common.launch.fork_server import begin_server

begin_server()
