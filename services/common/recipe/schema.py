"""Defines the recipe: the type of the TOML file that describes a run.

Every field states its unit and legal range. A field that decides the bytes of an artifact carries an `Identity` mark
with that artifact's kind. `identity(recipe, kind)` collects these fields, and ids are hashes of them. Fields without a
mark (worker counts, intervals, logging) may change while a run goes on.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, Field, model_validator

from services.common.recipe.agreement import require_agreement
from services.common.recipe.cluster import Cluster
from services.common.recipe.compilation import Compile
from services.common.recipe.presets import MODEL_PRESETS
from services.common.recipe.section import (
    COMPILED,
    CORPUS,
    CORPUS_UNLESS_DEFAULT,
    TRACED,
    TRAINED,
    Identity,
    Kind,
    Name,
    Positive,
    Section,
)
from services.common.recipe.training import Checkpoint, Train

Stage = Literal["tokenizer", "compiler", "trainer"]
Device = Literal["cpu", "cuda", "neuron", "xla"]
Schedule = Literal["cosine", "linear", "wsd", "constant"]
NoticeCondition = Literal["done", "failed", "diverged", "workers_lost"]
WEBHOOK_VARIABLE = "MILLRACE_WEBHOOK"
"""Environment variable with the webhook's URL, where the recipe names no other place."""
STAGES: tuple[Stage, ...] = ("tokenizer", "compiler", "trainer")


def _require_place_of_secret(place: str) -> str:
    """Check that a text says where a secret is. The message does not show it: it may be the secret."""
    if not re.fullmatch(r"env:[A-Za-z_][A-Za-z0-9_]*|file:/.+", place):
        raise ValueError(
            "expected env:NAME or file:/PATH, the place of the webhook's address. The address itself is a password, "
            "and a recipe is stored and shown"
        )
    return place


class Source(Section):
    """A source of documents. Documents enter the corpus in the order of the sources."""

    uri: Annotated[str, Field(min_length=1)]
    """`pydoc://` (the documentation that ships with CPython), a local or fsspec path, folder or glob, or
    `datasets://NAME`, the rows that `datasets.load_dataset` gives of a data set on the hub, a folder, a file or a glob.
    Credentials belong into `~/.netrc`, the hub's token (`HF_TOKEN`) and AWS's credential chain."""
    format: Literal["auto", "text", "jsonl", "parquet", "arrow", "wikicorpus"] = "auto"
    """Format of the files. `auto` goes by the file name's ending, `text` makes each file one document, and `wikicorpus`
    is the format of the original `raw.en.tgz`."""
    column: str = "text"
    """The jsonl key, or the parquet or arrow column, that holds the document. `a.b` is the key `b` within `a`."""
    template: Annotated[str | None, Field(min_length=1, exclude_if=lambda value: value is None)] = None
    """Jinja2 template, with the settings of chat templates, that makes the document of a row of a `datasets://` source:
    `{{ question }} {{ answers.text[0] }}`. Its variables are the columns, and `row`, for `row["the answer"]`."""
    revision: str | None = None
    """Commit of a repository on the Hugging Face hub; `millrace pin` writes it for a branch."""
    subset: str | None = None
    """Name of the configuration of a `datasets://` source."""
    split: str = "train"
    """Name of the split of a `datasets://` source."""
    weight: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Average number of times that a document enters the training split. 0.25 takes a quarter of the documents, chosen
    by their hashes, and 2.5 takes every document twice and half of them once more. The validation split ignores it."""

    @model_validator(mode="after")
    def _keys_fit_the_uri(self) -> Self:
        is_dataset = self.uri.startswith("datasets://")
        if self.subset is not None and not is_dataset:
            raise ValueError(f"subset applies to datasets:// sources only, and this one is {self.uri}")
        if is_dataset and self.format != "auto":
            raise ValueError(
                f"format applies to files, and the data set {self.uri} decides its own. Remove it, or name the files: "
                f"a folder, or hf://datasets/OWNER/NAME/FOLDER"
            )
        if self.template is not None and not (is_dataset and self.column == "text"):
            raise ValueError(f"template is for datasets:// sources without column, and this one is {self.uri}")
        if self.revision is not None and not (is_dataset or self.uri.startswith("hf://")):
            raise ValueError(f"revision applies to hf:// and datasets:// sources only, and this one is {self.uri}")
        return self


class Corpus(Section):
    name: Name
    sources: Annotated[tuple[Source, ...], Field(min_length=1, strict=False), CORPUS]
    sequence_length: Annotated[int, Field(ge=8, le=1_048_576), CORPUS, TRACED]
    """Tokens in a row of the corpus, and in a training sequence."""
    rows_per_shard: Annotated[Positive, CORPUS] = 32_768
    """Rows of `sequence_length` tokens in a file of the corpus."""
    validation_fraction: Annotated[float, Field(ge=0, lt=1), CORPUS] = 0.01
    """Share of each source's documents, chosen by their hashes, that is kept for validation."""
    min_document_bytes: Annotated[int, Field(ge=0), CORPUS] = 0
    """Bytes of the shortest document; shorter ones are dropped and counted."""
    duplicates: Annotated[Literal["keep", "drop"], CORPUS_UNLESS_DEFAULT] = "keep"
    """Treatment of exact duplicates: `drop` keeps the first of all equal documents of all sources, and counts the
    others. Line ends and white space at both ends do not count."""
    invalid_utf8: Annotated[Literal["replace", "reject"], CORPUS] = "replace"
    """Treatment of bytes that are not UTF-8: `replace` puts U+FFFD and counts the document, `reject` makes the document
    a bad row. A file of which more than 1 % of the characters would be replaced always ends the stage."""
    bad_rows: Annotated[Literal["stop", "skip"], CORPUS_UNLESS_DEFAULT] = "stop"
    """Treatment of rows that cannot become documents: lines that are no JSON or no object, values in `column` that are
    no text, and documents above `max_document_bytes`. `stop` ends the stage with exit code 3, `skip` counts them."""
    max_bad_rows: Annotated[int, Field(ge=0)] = 1_000
    """Number of rows that `bad_rows = "skip"` may skip in all sources together; more end the stage with exit code 3."""
    control_text: Annotated[Literal["text"], CORPUS] = "text"
    """Encoding of the name of a special token, such as `</s>`, in a document: always as text, never as that token."""
    max_document_bytes: Annotated[Positive, CORPUS_UNLESS_DEFAULT] = 128 * 2**20
    """Bytes of the largest document; a longer one is a bad row. A worker takes less than 1 GB for 64 MB."""
    split_bytes: Positive = 64 * 2**20
    """Input bytes that one encode task reads. This changes the number of tasks, never the corpus."""


class VocabularyTraining(Section):
    """Training of a SentencePiece BPE model with Llama 2's settings: byte fallback, split digits, no normalisation."""

    vocab_size: Annotated[int, Field(ge=300, le=1_000_000)]
    max_bytes: Positive = 256 * 2**20
    """Bytes of text that the training sees: documents of all sources, in each source's share of the training split."""


class Tokenizer(Section):
    model: Annotated[str | None, CORPUS] = None
    """Path or address of a SentencePiece model, a `tokenizer.json` or a tiktoken file, or `hf://OWNER/NAME` or a folder
    with the files of any tokenizer that `AutoTokenizer` loads, unless `train` makes one. A file means its own ids, and
    a folder those of `AutoTokenizer`."""
    train: Annotated[VocabularyTraining | None, CORPUS] = None
    bos_token: Annotated[str | None, CORPUS] = None
    """Special token before each document, for a `tokenizer.json` other than Llama 2's and 3's. A folder's tokenizer has
    its own, or none."""
    eos_token: Annotated[str | None, CORPUS] = None
    """Special token after each document, for a `tokenizer.json` other than Llama 2's and 3's, and for a folder's
    tokenizer that has none."""
    encoder: Literal["auto", "reference"] = "auto"
    """`auto` takes the fastest encoder that gives the reference's ids; `reference` is the library that defines them."""
    num_workers: Positive = 1
    """Number of encode tasks that run at the same time."""
    keep_encoded: bool = False
    """Whether the encoded partitions, as large as the corpus, stay when it is published. The next corpus of this name
    then encodes only files that were added or have changed."""

    @model_validator(mode="after")
    def _has_one_vocabulary(self) -> Self:
        if (self.model is None) == (self.train is None):
            raise ValueError(
                "give either tokenizer.model (a file) or [tokenizer.train] (settings to make one). To leave these "
                "settings out: --tokenizer.train=null"
            )
        return self


class RopeScaling(Section):
    """Llama 3.1's frequency scaling (arXiv 2407.21783; transformers' `rope_type = "llama3"`)."""

    factor: Annotated[float, Field(ge=1)]
    low_freq_factor: Annotated[float, Field(gt=0)]
    high_freq_factor: Annotated[float, Field(gt=0)]
    original_max_position_embeddings: Positive


def _default_head_dim(known: dict[str, Any]) -> int:
    """Return an equal share of the width, or 0 where there is no even one."""
    width, heads = known["hidden_size"], known["num_attention_heads"]
    return 0 if width % (2 * heads) else width // heads


class Model(Section):
    """A Llama or a dense Qwen3. Field names are those of a Hugging Face `config.json`, except `qk_norm`."""

    preset: str | None = None
    """A named size whose values the other keys of this section override."""
    vocab_size: Annotated[int, Field(ge=2)]
    """Number of ids of the tokenizer."""
    padded_vocab_size: Positive | None = None
    """Rows of the embedding and of the language-model head, where a published model has more than `vocab_size`, as its
    `config.json` says. Rows of padding take no probability."""
    hidden_size: Positive
    intermediate_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    head_dim: Annotated[Positive, Field(default_factory=_default_head_dim)]
    """Dimensions of a head. Default: `hidden_size` / `num_attention_heads`."""
    qk_norm: bool = False
    """Whether each head's queries and keys pass an RMSNorm before they are rotated: a Qwen3 (arXiv 2505.09388)."""
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    initializer_range: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of initial weights. The projections into the residual stream, `o_proj` and `down_proj` of each
    layer, have this divided by sqrt(2 * num_hidden_layers), as in GPT-2. Weights of norms begin at 1."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(values.get("preset"), str):
            return values
        preset = values["preset"]
        if preset not in MODEL_PRESETS:
            raise ValueError(f"unknown preset {preset!r}; known: {', '.join(MODEL_PRESETS)}")
        return {**MODEL_PRESETS[preset], **values}

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if self.head_dim == 0:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be an even multiple of num_attention_heads "
                f"{self.num_attention_heads}, unless head_dim is given"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even: rotary embedding pairs the dimensions of a head")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} must be a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        if self.num_vocab_rows < self.vocab_size:
            raise ValueError(f"padded_vocab_size {self.padded_vocab_size} is below vocab_size {self.vocab_size}")
        return self

    @property
    def query_size(self) -> int:
        """Dimensions of the queries of all heads together, which differ from `hidden_size` in most Qwen3."""
        return self.num_attention_heads * self.head_dim

    @property
    def num_vocab_rows(self) -> int:
        """Rows of the embedding and of the language-model head, padding included."""
        return self.padded_vocab_size or self.vocab_size

    @property
    def num_parameters(self) -> int:
        attention = 2 * self.hidden_size * (self.query_size + self.num_key_value_heads * self.head_dim)
        attention += 2 * self.head_dim if self.qk_norm else 0
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = self.num_vocab_rows * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_hidden_layers * layer + self.hidden_size


class Parallel(Section):
    data_parallel_size: Positive = 1
    """Number of copies of the model, which share the global batch; `tensor_parallel_size` workers hold a copy."""
    tensor_parallel_size: Annotated[Positive, COMPILED] = 1
    """Workers that share a copy of the model. Each has a part of every matrix, and of the sequence between layers."""
    reduce_dtype: Annotated[Literal["float32", "bfloat16"], TRACED] = "float32"
    """Type in which the workers of a model sum activations and their gradients. `bfloat16` needs train.dtype `bfloat16`
    and halves the bytes that are sent, but rounds at each addition. Gradients of weights are always summed in float32.
    """
    zero_stage: Annotated[Literal[0, 1, 2, 3], Identity(("compile_cache",), True, like_default=(1, 2))] = 0
    """ZeRO stage (arXiv 1910.02054), with the same bits of exact sums. From 1 on data-parallel workers share the
    optimizer's state. With 2 they also share the sums of gradients: each micro-batch's gradient is sent to the workers
    that update it, so a worker holds a share of each partial sum, and sends as many times more as it has micro-batches.
    With 3 they also share the weights: each micro-batch gathers those of a layer at a time, forward and backward, and
    compiles one graph for all layers, so a compiled run may differ from stages 0 to 2 in the last bits. For `cpu` and
    `cuda`.
    """
    threads_per_worker: Annotated[Positive, COMPILED] = 1
    """CPU threads of a worker. Compiled loops depend on this number, so it is declared and never detected."""
    device: Annotated[Device, COMPILED] = "cpu"
    """Kind of device that a worker computes on; every worker has a device of its own. `xla` is a NeuronCore of trn1 by
    torch_xla, `neuron` a NeuronCore of trn2 and trn3 by TorchNeuron, and `cuda` an NVIDIA GPU. `cuda` has run
    on one H100; `neuron` follows its documentation and has not run on a device."""

    @property
    def num_workers(self) -> int:
        return self.data_parallel_size * self.tensor_parallel_size


class Batch(Section):
    micro_batch_size: Annotated[Positive, TRACED]
    """Sequences in one forward and backward pass."""
    global_batch_size: Annotated[Positive, TRAINED]
    """Sequences in one optimizer step, over all workers."""
    loss_chunk_tokens: Annotated[Positive, TRACED] = 256
    """Tokens whose float32 logits exist at the same time; all logits together are a small model's largest tensor."""

    @model_validator(mode="after")
    def _has_whole_micro_batches(self) -> Self:
        if self.global_batch_size % self.micro_batch_size:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} must be a multiple of micro_batch_size "
                f"{self.micro_batch_size}"
            )
        return self

    @property
    def num_micro_batches(self) -> int:
        return self.global_batch_size // self.micro_batch_size


class Optimizer(Section):
    """AdamW (arXiv 1711.05101) and a learning rate that is a function of the step alone."""

    schedule: Annotated[Schedule, TRAINED] = "cosine"
    """Course of the learning rate after a linear warm-up. `cosine` and `linear` fall to `min_learning_rate`, which they
    reach at `decay_steps`. `wsd` (warm-up, stable, decay; MiniCPM, arXiv 2404.06395) is constant, and in the last
    `cooldown_steps` before `decay_steps` falls as 1 - sqrt (arXiv 2405.18392). `constant` never falls."""
    learning_rate: Annotated[float, Field(gt=0), TRAINED]
    """Largest rate, which the warm-up reaches."""
    min_learning_rate: Annotated[float, Field(ge=0), TRAINED] = 0.0
    """Rate from `decay_steps` on."""
    warmup_steps: Annotated[int, Field(ge=0), TRAINED]
    """Steps in which the rate rises linearly from 0."""
    warmup_begin_step: Annotated[int, Field(ge=0), TRAINED] = 0
    """Step at which the warm-up begins. Only a branch can have another one than 0: its rate then rises once more, for
    continued pre-training (arXiv 2403.08763)."""
    decay_steps: Annotated[Positive | None, TRAINED] = None
    """Step at which the rate reaches its minimum, except for `constant`. It is independent of train.max_steps, so a run
    can be made longer."""
    cooldown_steps: Annotated[Positive | None, TRAINED] = None
    """Steps before `decay_steps` in which the rate of `wsd` falls; only `wsd` has them."""
    beta1: Annotated[float, Field(ge=0, lt=1), TRAINED] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1), TRAINED] = 0.95
    epsilon: Annotated[float, Field(gt=0), TRAINED] = 1e-8
    weight_decay: Annotated[float, Field(ge=0), TRAINED] = 0.1
    """Decay of matrices; norm weights have none."""
    max_grad_norm: Annotated[float, Field(gt=0), TRAINED] = 1.0

    @model_validator(mode="after")
    def _has_what_its_schedule_needs(self) -> Self:
        decays = self.schedule != "constant"
        taken = {"decay_steps": decays, "cooldown_steps": self.schedule == "wsd", "min_learning_rate": decays}
        for name, is_taken in taken.items():
            if is_taken and getattr(self, name) is None:
                raise ValueError(f"schedule {self.schedule!r} needs {name}: --optimizer.{name}=VALUE")
        if surplus := [name for name, is_taken in taken.items() if getattr(self, name) and not is_taken]:
            found = " and no ".join(f"{name}, got {getattr(self, name)}" for name in surplus)
            options = " ".join(f"--optimizer.{name}=null" for name in surplus)
            raise ValueError(f"schedule {self.schedule!r} has no {found}: leave out by {options}")
        return self

    @model_validator(mode="after")
    def _rates_and_steps_rise(self) -> Self:
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(f"min_learning_rate {self.min_learning_rate} exceeds learning_rate {self.learning_rate}")
        if self.decay_steps is None:
            return self
        begin = f"warmup_begin_step {self.warmup_begin_step} + " if self.warmup_begin_step else ""
        rise, warm = f"{begin}warmup_steps {self.warmup_steps}", self.warmup_begin_step + self.warmup_steps
        if warm >= self.decay_steps:
            raise ValueError(f"{rise} must be below decay_steps {self.decay_steps}")
        if warm > self.decay_steps - (self.cooldown_steps or 0):
            overlap = f"{rise} and cooldown_steps {self.cooldown_steps} overlap"
            raise ValueError(f"{overlap} before decay_steps {self.decay_steps}")
        return self


class Notify(Section):
    """Notices to a webhook. Nothing of this section is part of an identity."""

    webhook: Annotated[str, AfterValidator(_require_place_of_secret)] | None = None
    """Place of the webhook's URL, which is a password: `env:NAME`, an environment variable, or `file:/PATH`, a file.
    Default: `env:MILLRACE_WEBHOOK`, where that variable is set."""
    conditions: Annotated[tuple[NoticeCondition, ...], Field(strict=False)] = get_args(NoticeCondition)
    """Conditions of which notices are sent; all of them by default."""


class Recipe(Section):
    name: Name
    corpus: Corpus
    tokenizer: Tokenizer
    model: Annotated[Model, TRACED]
    parallel: Parallel = Parallel()
    batch: Batch
    optimizer: Optimizer
    compile: Compile = Compile()
    train: Train
    checkpoint: Checkpoint = Checkpoint()
    cluster: Cluster = Cluster()
    notify: Notify = Notify()

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        require_agreement(self)
        return self


def stage_nodes(recipe: Recipe, stage: Stage) -> int:
    """Return the number of nodes of a stage on a cluster."""
    return recipe.cluster.nodes_of(stage, recipe.parallel.num_workers)


def key_value_copies(recipe: Recipe) -> int:
    """Return how many workers of a model hold the same key-value head: 1 unless there are more workers than heads."""
    return max(1, recipe.parallel.tensor_parallel_size // recipe.model.num_key_value_heads)


def identity(recipe: Recipe, kind: Kind) -> dict[str, Any]:
    """Return the recipe's fields that decide the bytes of an artifact of this kind, by dotted name."""
    return dict(_identity_fields(recipe, kind, prefix=""))


def fingerprint(value: Any) -> str:
    """Return the SHA-256, in hexadecimal, of a JSON value in canonical form (sorted keys, no spaces)."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _identity_fields(section: BaseModel, kind: str, prefix: str) -> Iterator[tuple[str, Any]]:
    plain = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        marks = [mark for mark in field.metadata if isinstance(mark, Identity) and kind in mark.kinds]
        if marks:
            if all(mark.is_default_left_out and value in (field.default, *mark.like_default) for mark in marks):
                continue
            if isinstance(value, Model):
                del plain[name]["preset"]  # another way of writing the other fields
                if value.num_vocab_rows == value.vocab_size:
                    del plain[name]["padded_vocab_size"]
                if value.query_size == value.hidden_size:
                    del plain[name]["head_dim"]
                if not value.qk_norm:
                    del plain[name]["qk_norm"]
            yield prefix + name, plain[name]
        elif isinstance(value, BaseModel):
            yield from _identity_fields(value, kind, f"{prefix}{name}.")
