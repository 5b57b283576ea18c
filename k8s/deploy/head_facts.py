"""The name by which clients ask a head's image what it can do.

Client and head may be of different versions, so this file stays where it is as long as clients name it.
"""

from __future__ import annotations

import sys

from k8s.controller.head_facts import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
