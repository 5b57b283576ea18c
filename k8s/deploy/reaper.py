"""The name by which the CronJob `reaper` starts the reaper. An overlay may be applied with an older head's image
(HEAD_TAG=), so this file stays where it is as long as CronJobs name it.
"""

from __future__ import annotations

import sys

from k8s.controller.reaper import main
from services.common.entry_point import exit_code_of

if __name__ == "__main__":
    sys.exit(exit_code_of(main))
