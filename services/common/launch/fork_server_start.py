"""Sets up the fork server when this module is imported, which `multiprocessing` does there before the first fork.

`multiprocessing` can tell its server the names of modules to import, and nothing else.
"""

from services.common.launch.fork_server import begin_server

begin_server()
