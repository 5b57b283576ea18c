"""A call that keeps Python's lock, so that no thread and no signal handler of Python runs, is still ended in time."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, time
from services.common.process.hard_deadline import ending_after

with ending_after(1.0, "too early", 3):
    pass
time.sleep(1.5)
with ending_after(0.2, "100% frozen", 75):
    ctypes.PyDLL(None).sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such timers")
def test_a_process_ends_with_its_message_and_code_where_a_call_keeps_the_lock() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], check=False, capture_output=True, text=True)

    assert ended.returncode == 75
    assert ended.stderr == "millrace: 100% frozen\n"
