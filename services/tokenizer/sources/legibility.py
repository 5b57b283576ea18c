"""Repairs text that is not UTF-8, and tells a few broken characters from a file in another encoding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from services.common.input.text_encoding import guess_encoding
from services.tokenizer.text_batch import TextBatch

MAX_REPAIRED = 0.01
"""Share of a file's characters that may be repaired. Text in Latin-1 has 2 % of accents, and other encodings more."""
MAX_CONTROLS = 0.01
"""Share of the characters of a text file with NULs that may be control characters, as NULs and the high bytes of UTF-16
are."""
FEW_CHARACTERS = 10
"""Fewer wrong characters than these are a mishap in a file of any size."""
_SAMPLE_BYTES = 2**16
_IS_CONTROL = np.zeros(256, np.bool_)
_IS_CONTROL[[code for code in range(32) if chr(code) not in "\t\n\v\f\r\x1b"]] = True


@dataclass
class Legibility:
    """Counts the characters of documents, and those of them that are none."""

    characters: int = 0
    repaired: int = 0
    controls: int = 0
    sample: bytes = b""
    """Some documents that are not legible."""

    def add(self, batch: TextBatch) -> None:
        """Count the characters of documents in UTF-8."""
        if not len(batch):
            return
        text = batch.text[batch.begins[0] : batch.ends[-1]]
        characters = int(np.count_nonzero(text.view(np.int8) > -65))  # bytes that do not continue a character
        self.characters += characters
        if not text.all():  # no UTF-16 is without NULs
            controls = int(np.count_nonzero(_IS_CONTROL[text]))
            self.controls += controls
            if controls > MAX_CONTROLS * characters and not self.sample:
                self._keep(text[:_SAMPLE_BYTES].tobytes())

    def repair(self, batch: TextBatch) -> TextBatch:
        """Return the documents in UTF-8, with U+FFFD for what is not, and count their characters."""
        broken = batch.documents()
        repaired = [document.decode("utf-8", "replace").encode() for document in broken]
        changed = 0
        for before, after in zip(broken, repaired, strict=True):
            if before != after:
                changed += 1
                # Readers write 0xFF for half of a surrogate pair in JSON or UTF-16, which tells no other encoding.
                self.repaired += after.count(b"\xef\xbf\xbd") - before.count(b"\xef\xbf\xbd") - before.count(b"\xff")
                self._keep(before)
        result = TextBatch.of(repaired, changed)
        self.add(result)
        return result

    def is_bad(self, file_format: str, least: int = 1) -> bool:
        """Return whether these are documents in another encoding, by at least so many wrong characters.

        Only a file of text may be UTF-16 without a mark.
        """
        is_wide = file_format == "text" and self.controls > max(least - 1, MAX_CONTROLS * self.characters)
        return is_wide or self.repaired > max(least - 1, MAX_REPAIRED * self.characters)

    def explain(self) -> str:
        wrong = max(self.repaired, self.controls)
        return (
            f"{wrong:,} of {self.characters:,} characters are not UTF-8 text, expected at most {MAX_REPAIRED:.0%}. "
            f"It looks like {guess_encoding(self.sample)}. Convert it to UTF-8 (as `iconv -f ENCODING -t UTF-8` does), "
            f"or leave it out of corpus.sources."
        )

    def _keep(self, document: bytes) -> None:
        if len(self.sample) < _SAMPLE_BYTES:
            self.sample += document[: _SAMPLE_BYTES - len(self.sample)]


def is_utf8(batch: TextBatch) -> bool:
    """Return whether all documents are UTF-8. Arrow checks 15 GB a second."""
    offsets = np.append(batch.begins, batch.ends[-1:])
    if not np.array_equal(offsets[1:], batch.ends):
        raise ValueError("the documents of a batch must be adjacent in its text")
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(batch.text)]
    try:
        pa.Array.from_buffers(pa.large_binary(), len(batch), buffers).cast(pa.large_string())
    except pa.ArrowInvalid:
        return False
    return True
