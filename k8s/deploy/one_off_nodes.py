"""The name by which the client lets a Job hold the node of a one-off.

Client and head may be of different versions, so this file stays where it is as long as clients name it.
"""

from __future__ import annotations

import sys

from k8s.controller.one_off_nodes import main
from services.common.entry_point import exit_code_of

if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: main(sys.argv[1])))
