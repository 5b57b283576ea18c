"""The folder that all rows read: text in Parquet, a vocabulary in the formats of all libraries, and a recipe."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.package_text import Text
from services.common.vocabularies.sentencepiece_model import load_model

SEQUENCE_LENGTH = 4096


@dataclass(frozen=True)
class BenchmarkFolder:
    """Paths of the text, the vocabulary and the output of a benchmark."""

    folder: Path

    @property
    def parquet(self) -> Path:
        return self.folder / "text.parquet"

    @property
    def model(self) -> Path:
        return self.folder / "tokenizer.model"

    @property
    def hugging_face(self) -> Path:
        """A folder for `AutoTokenizer`, whose tokenizer.json gives the ids of `model`."""
        return self.folder / "hugging-face"

    @property
    def output(self) -> Path:
        return self.folder / f"output-{os.getpid()}"

    def documents(self) -> list[bytes]:
        column = pq.read_table(self.parquet, columns=["text"])["text"]
        return [document.encode() for document in column.to_pylist()]

    def fill(self, text: Text, model: bytes) -> None:
        """Write the text and the vocabulary."""
        self.hugging_face.mkdir(parents=True)
        self.model.write_bytes(model)
        (self.hugging_face / "tokenizer.model").write_bytes(model)
        (self.hugging_face / "tokenizer.json").write_text(json.dumps(_tokenizer_json(model)), encoding="utf-8")
        settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        (self.hugging_face / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
        column = pa.array([document.decode() for document in text.documents], pa.string())
        pq.write_table(pa.table({"text": column}), self.parquet, compression="zstd", row_group_size=100)

    def write_recipe(self, num_workers: int) -> Path:
        """Write a recipe for the tokenizer. Its tables for the trainer are not used."""
        path = self.folder / f"recipe-{os.getpid()}.toml"
        path.write_text(
            f"""
name = "benchmark"
[corpus]
name = "benchmark"
sequence_length = {SEQUENCE_LENGTH}
validation_fraction = 0.0
rows_per_shard = 1024
split_bytes = 4194304
sources = [{{ uri = {json.dumps(str(self.parquet))} }}]
[tokenizer]
model = {json.dumps(str(self.model))}
num_workers = {num_workers}
[model]
preset = "llama2-7b"
[batch]
micro_batch_size = 1
global_batch_size = 1
[optimizer]
learning_rate = 1e-4
min_learning_rate = 1e-5
warmup_steps = 1
decay_steps = 2
[train]
max_steps = 2
""",
            encoding="utf-8",
        )
        return path


def _tokenizer_json(model: bytes) -> dict[str, object]:
    """Make a tokenizer.json that gives SentencePiece's ids, with merges in the order of scores."""
    processor = load_model(model)
    pieces = [str(processor.id_to_piece(index)) for index in range(processor.vocab_size())]
    id_of_piece = {piece: index for index, piece in enumerate(pieces)}
    merges = [
        (-processor.get_score(index), len(piece[:cut]), piece[:cut], piece[cut:])
        for index, piece in enumerate(pieces)
        if not (processor.is_control(index) or processor.is_unknown(index) or processor.is_byte(index))
        for cut in range(1, len(piece))
        if piece[:cut] in id_of_piece and piece[cut:] in id_of_piece
    ]
    special = [(index, piece) for index, piece in enumerate(pieces) if index < 3]
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": index, "content": piece, "special": True, "normalized": False}
            | {"single_word": False, "lstrip": False, "rstrip": False}
            for index, piece in special
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "\u2581"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": id_of_piece,
            "merges": [[left, right] for _, _, left, right in sorted(merges)],
        },
    }
