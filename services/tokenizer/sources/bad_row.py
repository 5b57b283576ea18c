"""The error of a row, a line or a file of text that is no document, while the rest of its source can be read."""

from __future__ import annotations

from services.common.errors import ArtifactError


class BadRow(ArtifactError):
    """One document of a source cannot be taken: no JSON, no text, no UTF-8, or too long. The message has its place.

    Damage of a file, after which nothing of it can be read, is another `ArtifactError`.
    """
