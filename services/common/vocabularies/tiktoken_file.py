"""tiktoken files, which hold ranks alone: the regular expression and the special tokens here are those of Llama 3.

Their source is llama/tokenizer.py of github.com/meta-llama/llama3.
"""

from __future__ import annotations

import base64
import binascii

import tiktoken

from services.common.errors import ArtifactError

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPECIAL_TOKENS = (
    *("<|begin_of_text|>", "<|end_of_text|>"),
    *(f"<|reserved_special_token_{number}|>" for number in range(4)),
    *("<|start_header_id|>", "<|end_header_id|>", "<|reserved_special_token_4|>", "<|eot_id|>"),
    *(f"<|reserved_special_token_{number}|>" for number in range(5, 251)),
)
"""Special tokens, whose ids follow the ranks in this order."""


def load_encoding(content: bytes) -> tiktoken.Encoding:
    """Load the encoding of a tiktoken file.

    With `disallowed_special=()` it encodes the name of a special token in a text as text. Raises `ArtifactError`.
    """
    ranks = read_ranks(content)
    special_tokens = {token: len(ranks) + index for index, token in enumerate(LLAMA3_SPECIAL_TOKENS)}
    return tiktoken.Encoding("tokenizer", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special_tokens)


def read_ranks(content: bytes) -> dict[bytes, int]:
    """Return the rank of each token of a tiktoken file, whose lines are a token in base64, a space and its rank.

    Raises `ArtifactError` for another kind of file, and where a byte has no token.
    """
    ranks = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ArtifactError(
                f"Not a tiktoken file: line {number} is not a token in base64, a space and its rank."
            ) from error
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([byte]) not in ranks for byte in range(256)):
        raise ArtifactError("Not a whole tiktoken file: its ranks have gaps, or a byte is no token.")
    return ranks
