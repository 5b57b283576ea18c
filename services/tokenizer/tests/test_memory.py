"""A worker needs less than a gigabyte of memory, also for documents of 64 MB."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.tokenizer.tests.builders import REPOSITORY, make_text, write_recipe

GIGABYTE = 10**9
WITH_PEAK = """
import sys
from pathlib import Path
from services.tokenizer.command import main
code = main(sys.argv[1:])
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(code, int(peak.split()[1]) * 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_documents_of_64_megabytes_fit_into_a_gigabyte(tmp_path: Path) -> None:
    """A row group has two of them between small ones. The command encodes in its own process.

    The column has no dictionary, because a reader of Parquet holds a dictionary in memory as a whole.
    """
    large = (make_text(2**20) * 64).decode()
    texts = ["small"] * 100 + [large, large[1:]] + ["small"] * 100
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", compression="zstd", use_dictionary=False)
    recipe = write_recipe(
        tmp_path,
        tmp_path / "a.parquet",
        corpus__sequence_length=4096,
        corpus__rows_per_shard=1_024,
        tokenizer__train__max_bytes=1_000_000,
    )
    command = [sys.executable, "-c", WITH_PEAK, "--recipe", str(recipe), "--root", str(tmp_path / "fsx")]
    done = subprocess.run([*command, "--launch", "inline"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    code, peak = done.stdout.split()[-2:]
    assert code == "0", done.stderr
    assert int(peak) < GIGABYTE
