"""The name by which deploy Jobs start the controller.

A client writes this name into a Job and the head's image runs it, and each may be older than the other. So this file
stays where it is as long as Jobs name it.
"""

from __future__ import annotations

import sys

from k8s.controller.job import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
