"""A tokenizer's folder, as `save_pretrained` writes it, loaded by transformers' AutoTokenizer.

The name of a special token in a text is text (`split_special_tokens=True`), as for vocabularies of other kinds. No code
of the folder is run.
"""

from __future__ import annotations

import json
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from typing import Any

from services.common.errors import ArtifactError

CONFIG = "config.json"
"""The model's configuration, which names the tokenizer's class where `tokenizer_config.json` does not."""
_FILES = (
    *("tokenizer*.json", "tokenizer*.model", "special_tokens_map.json", "added_tokens.json", "tekken.json", CONFIG),
    *("vocab*.json", "vocab*.txt", "merges*.txt", "*.model", "*.spm", "*.tiktoken", "*.bpe", "*.codes", "*.vocab"),
    *("chat_template*", "normalizer.json"),
)
_MAIN_FILES = ("tokenizer_config.json", "tokenizer.json")


def is_tokenizer_file(name: str) -> bool:
    """Return whether a file of a model's folder belongs to its tokenizer."""
    return any(fnmatch(name, pattern) for pattern in _FILES)


def main_file(names: list[str]) -> str:
    """Return the name of the file by which the folder of these files is found."""
    return next((name for name in _MAIN_FILES if name in names), min(names))


@lru_cache(maxsize=2)
def load_folder(folder: Path) -> Any:
    """Load the tokenizer of a folder, once: a large one takes seconds.

    Raises `ArtifactError` where transformers cannot, or needs the folder's code.
    """
    import transformers  # noqa: PLC0415 - takes seconds

    try:
        return transformers.AutoTokenizer.from_pretrained(  # nosec B615 # a folder of this machine
            folder, trust_remote_code=False, local_files_only=True, split_special_tokens=True
        )
    except Exception as error:  # transformers, tokenizers and sentencepiece have no common class
        reason = str(error).strip().splitlines()
        raise ArtifactError(
            f"AutoTokenizer of transformers {transformers.__version__} cannot load the tokenizer: "
            f"{reason[0] if reason else type(error).__name__} A tokenizer that needs code of its own is not supported."
        ) from error


def read_backend(tokenizer: Any) -> bytes | None:
    """Return the tokenizer.json by which a loaded tokenizer encodes, or None for one that is written in Python.

    It has no post-processor, which puts ids around those of a text, and which fastokens may not know.
    """
    if not tokenizer.is_fast:
        return None
    return json.dumps(json.loads(tokenizer.backend_tokenizer.to_str()) | {"post_processor": None}).encode()


def encode_texts(tokenizer: Any, texts: list[str], *, add_special_tokens: bool = False) -> list[list[int]]:
    """Return the ids of each text as the tokenizer gives them. Raises `ArtifactError` where it cannot."""
    if not texts:  # of which transformers makes no list
        return []
    try:
        found: list[list[int]] = tokenizer(
            texts,
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
    except Exception as error:  # as in `load_folder`; classes for pages and entities take no text
        raise ArtifactError(f"{type(tokenizer).__name__} of transformers cannot encode a text: {error}.") from error
    return found


def find_bos_and_eos(tokenizer: Any) -> tuple[int | None, int | None]:
    """Return the ids that the tokenizer puts before and behind a text; the second is else its EOS or separator.

    Raises `ArtifactError` for a tokenizer that puts other tokens around a text than one on either side.
    """
    texts = ["a", " a", "A", *sorted(tokenizer.get_vocab())[:1_000]]
    inner = next(((text, ids) for text in texts if (ids := encode_texts(tokenizer, [text])[0])), None)
    if inner is None:
        raise ArtifactError("the tokenizer gives no ids for any text.")
    text, ids = inner
    whole = encode_texts(tokenizer, [text], add_special_tokens=True)[0]
    begin = next((at for at in range(len(whole)) if whole[at : at + len(ids)] == ids), len(whole))
    before, behind = whole[:begin], whole[begin + len(ids) :]
    if max(len(before), len(behind)) > 1:
        raise ArtifactError(
            f"the tokenizer puts {before} before a text and {behind} behind it, and a corpus stores at most one "
            f"token on either side."
        )
    last = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    return (before[0] if before else None), (behind[0] if behind else last)
