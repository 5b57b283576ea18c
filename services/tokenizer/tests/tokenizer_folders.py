"""Writes folders of tokenizers of many kinds, as `save_pretrained` or their makers write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
import transformers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from services.common.vocabularies.fuzz import fuzz_documents
from services.common.vocabularies.tiktoken_file import LLAMA3_PATTERN
from services.tokenizer.encoding.byte_level import QWEN_PATTERN
from services.tokenizer.tests.builders import TEXTS

ALPHABET = pre_tokenizers.ByteLevel.alphabet()
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
FOREIGN = [
    *("Größe naïve Ǆ ﬁ Å e\u0301", "Привет, мир", "漢字かな交じり文", "مرحبا بالعالم", "नमस्ते दुनिया", "한국어 텍스트"),
    *("👍🏽👩‍👩‍👧 🏳️‍🌈", "def f(x):\n\treturn  x[0] != 'a'  # 1_000\n\n", "\x00\x01\x1f\x7f\x85\u2028"),
    *("\u200b\ufeff\u00a0\u3000\u2581"),
    *("I'll don't WE'VE 12345 3.14 1,000,000", "  leading", "trailing  ", "\r\n\r\n", "a\tb"),
    "<s> </s> [CLS] <|endoftext|>",
]  # fmt: skip
DOCUMENTS = [*FOREIGN, *TEXTS[:9], *(text.decode() for text in fuzz_documents(["the", " of", "▁in"], 120))]


def train(tokenizer: tokenizers.Tokenizer, trainer: Any, special: list[str], **settings: Any) -> tokenizers.Tokenizer:
    tokenizer.train_from_iterator(
        TEXTS + FOREIGN, trainer(special_tokens=special, show_progress=False, **{"vocab_size": 500} | settings)
    )
    return tokenizer


def save(folder: Path, tokenizer: tokenizers.Tokenizer, **settings: Any) -> None:
    made: Any = transformers.PreTrainedTokenizerFast
    made(tokenizer_object=tokenizer, **settings).save_pretrained(folder)


def around(tokenizer: tokenizers.Tokenizer, before: str | None, behind: str | None = None) -> None:
    names = [name for name in (before, behind) if name]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*([before] if before else []), "$A", *([behind] if behind else [])],
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in names],
    )


def byte_level(special: list[str], pattern: str | None = None, **settings: Any) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE(**settings))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    return train(tokenizer, trainers.BpeTrainer, special, initial_alphabet=ALPHABET)


def write_gpt2(folder: Path) -> None:
    """Without a BOS of its own, as files of GPT-2 before `tokenizer.json`."""
    byte_level(["<|endoftext|>"]).model.save(str(folder))
    write_config(folder, tokenizer_class="GPT2Tokenizer")


def write_llama3(folder: Path) -> None:
    tokenizer = byte_level(["<|begin_of_text|>", "<|end_of_text|>"], LLAMA3_PATTERN, ignore_merges=True)
    around(tokenizer, "<|begin_of_text|>")
    save(folder, tokenizer, bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>")


def write_qwen(folder: Path) -> None:
    tokenizer = byte_level(["<|endoftext|>", "<|im_end|>"], QWEN_PATTERN)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens(["<think>"])
    save(folder, tokenizer, eos_token="<|endoftext|>", chat_template="{{ messages }}")


def write_roberta(folder: Path) -> None:
    tokenizer = byte_level(["<s>", "</s>", "<mask>", "<pad>", "<unk>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0), trim_offsets=True)
    save(folder, tokenizer, bos_token="<s>", eos_token="</s>", cls_token="<s>", sep_token="</s>", mask_token="<mask>")


def write_byte_fallback(folder: Path) -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    train(
        tokenizer,
        trainers.BpeTrainer,
        ["<unk>", "<s>", "</s>", *BYTES],
        vocab_size=600,
        initial_alphabet=list("</>0123456789ABCDEFxunks"),
    )
    around(tokenizer, "<s>")
    save(folder, tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def write_char_bpe(folder: Path) -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    train(tokenizer, trainers.BpeTrainer, ["<unk>", "</s>"], end_of_word_suffix="</w>")
    save(folder, tokenizer, unk_token="<unk>", eos_token="</s>")


def write_bert(folder: Path) -> None:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    train(tokenizer, trainers.WordPieceTrainer, special)
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece, _ in vocab), encoding="utf-8")
    write_config(folder, tokenizer_class="BertTokenizer")


def write_unigram(folder: Path) -> None:
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    train(tokenizer, trainers.UnigramTrainer, ["<unk>", "</s>"], unk_token="<unk>")
    around(tokenizer, None, "</s>")
    save(folder, tokenizer, unk_token="<unk>", eos_token="</s>")


def write_word_level(folder: Path) -> None:
    tokenizer = tokenizers.Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    train(tokenizer, trainers.WordLevelTrainer, ["[UNK]", "[BOS]", "[EOS]"], vocab_size=200)
    around(tokenizer, "[BOS]", "[EOS]")
    save(folder, tokenizer, unk_token="[UNK]", bos_token="[BOS]", eos_token="[EOS]")


def write_sentencepiece(folder: Path, **settings: Any) -> None:
    (folder / "text.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "made"),
        minloglevel=2,
        hard_vocab_limit=False,
        **settings,
    )
    (folder / "text.txt").unlink()
    (folder / "made.vocab").unlink()


def write_llama2(folder: Path) -> None:
    """The SentencePiece model alone, from which transformers builds its own tokenizer."""
    write_sentencepiece(
        folder, model_type="bpe", vocab_size=400, byte_fallback=True, normalization_rule_name="identity"
    )
    (folder / "made.model").rename(folder / "tokenizer.model")
    write_config(folder, tokenizer_class="LlamaTokenizer", add_bos_token=True, add_eos_token=False)


def write_t5(folder: Path) -> None:
    write_sentencepiece(folder, model_type="unigram", vocab_size=200, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    (folder / "made.model").rename(folder / "spiece.model")
    write_config(folder, tokenizer_class="T5Tokenizer", extra_ids=10)


def write_byt5(folder: Path) -> None:
    """Written in Python: the class alone is the tokenizer."""
    write_config(folder, tokenizer_class="ByT5Tokenizer")


def write_config(folder: Path, **settings: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


KINDS: dict[str, tuple[Callable[[Path], None], bool, str]] = {
    # tokenizer: writer of its folder, whether it puts BOS before a text, and what encodes
    "BPE of bytes from vocab.json and merges.txt, as GPT-2": (write_gpt2, False, "fastokens"),
    "BPE of bytes with a regex and a template, as Llama 3": (write_llama3, True, "chunk kernel"),
    "BPE of bytes with NFC, a regex and added tokens, as Qwen": (write_qwen, False, "chunk kernel"),
    "BPE of bytes with a prefix space, as RoBERTa": (write_roberta, True, "fastokens"),
    "BPE of characters with bytes as fallback": (write_byte_fallback, True, "fastokens"),
    "BPE of characters with ends of words": (write_char_bpe, False, "transformers"),
    "WordPiece from vocab.txt, as BERT": (write_bert, True, "transformers"),
    "Unigram with NFKC and Metaspace": (write_unigram, False, "transformers"),
    "WordLevel": (write_word_level, True, "transformers"),
    "SentencePiece BPE, as Llama 2": (write_llama2, True, "transformers"),
    "SentencePiece Unigram, as T5": (write_t5, False, "transformers"),
    "Python, as ByT5": (write_byt5, False, "transformers"),
}
