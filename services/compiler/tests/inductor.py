"""Environment of a compiler stage whose test needs no whole compilation."""

from __future__ import annotations

SOONER = {"TORCHINDUCTOR_VEC_ISA_OK": "1", "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
"""Environment that skips what Inductor compiles outside of the cache before its first kernel: 20 s of CPU."""
