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

from pydantic import AfterValidator, BaseModel, Field, field_validator, model_validator

from services.common.hardware.instance_types import read_instance_types
from services.common.recipe.agreement import require_agreement
from services.common.recipe.presets import MODEL_PRESETS
from services.common.recipe.section import (
    COMPILED,
    CORPUS,
    CORPUS_UNLESS_DEFAULT,
    TRACED,
    TRAINED,
    Identity,
    Kind,
    Section,
)

Stage = Literal["tokenizer", "compiler", "trainer"]
Device = Literal["cpu", "cuda", "neuron", "xla"]
ActivationCheckpointing = Literal["none", "selective", "full"]
Schedule = Literal["cosine", "linear", "wsd", "constant"]
NoticeCondition = Literal["done", "failed", "diverged", "workers_lost"]
WEBHOOK_VARIABLE = "MILLRACE_WEBHOOK"
"""Environment variable with the webhook's URL, where the recipe names no other place."""
STAGES: tuple[Stage, ...] = ("tokenizer", "compiler", "trainer")

MAX_NAME_LENGTH = 128
"""Longest name of a run or corpus. File systems take 255 bytes, and stages add hashes, endings and tokens to a name."""
MAX_ADDRESS_CHARACTERS = 8_000
"""Most characters of a source's or a vocabulary's address. The paths of Linux end at 4,096 bytes."""

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=MAX_NAME_LENGTH)]
Positive = Annotated[int, Field(gt=0)]

_FLAGS_OF_THE_STAGE = ("--framework", "--output", "-o", "--target")
_FLAGS_OF_THE_CACHE = ("--cache_dir", "--no_cache", "--retry_failed_compilation", "--log_level")


def _require_compiler_flag(flag: str) -> str:
    """Check that a text is one flag of neuronx-cc, passed as one argument without splitting or expansion."""
    name = flag.partition("=")[0]
    if not flag.startswith("-") or not flag.isprintable() or any(character.isspace() for character in flag):
        raise ValueError(f"{flag!r} is not a compiler flag; write name and value as one string, such as '--optlevel=2'")
    if name in _FLAGS_OF_THE_STAGE:
        raise ValueError(f"{name} is set by the compiler stage and cannot be a flag of the recipe")
    if name in _FLAGS_OF_THE_CACHE:
        raise ValueError(f"{name} is an option of libneuronxla and not of neuronx-cc; the stages manage the cache")
    return flag


CompilerFlag = Annotated[str, AfterValidator(_require_compiler_flag)]


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

    uri: Annotated[str, Field(min_length=1, max_length=MAX_ADDRESS_CHARACTERS)]
    """`pydoc://` (the documentation that ships with CPython), a local or fsspec path, folder or glob, or
    `datasets://NAME`, the rows that `datasets.load_dataset` gives of a data set on the Hugging Face hub or in a folder.

    An address with a user, a password, or a parameter that may be a secret is refused, because recipes are stored and
    shown. Credentials belong into `~/.netrc`, the hub's token (`HF_TOKEN`) and AWS's credential chain. A web address
    may have only parameters that are known to be harmless, such as `download` or `version`. An `@` in the path of an
    address with a port is written as `%40`.
    """
    format: Literal["auto", "text", "jsonl", "parquet", "arrow", "wikicorpus"] = "auto"
    """Format of the files. `auto` goes by the file name's ending, `text` makes each file one document, and `wikicorpus`
    is the format of the original `raw.en.tgz`.
    """
    column: str = "text"
    """The jsonl key, or the parquet or arrow column, that holds the document. `a.b` is the key `b` within `a`, where no
    column has that name itself.
    """
    revision: str | None = None
    """Commit of a repository on the Hugging Face hub, or a branch that `make pin` replaces by its commit."""
    subset: str | None = None
    """Name of the configuration of a `datasets://` source."""
    split: str = "train"
    """Name of the split of a `datasets://` source."""
    weight: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Average number of times that a document enters the training split. 0.25 takes a quarter of the documents, chosen
    by their hashes, and 2.5 takes every document twice and half of them once more. A document of the validation split
    is in it once, whatever the weight.
    """

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
    """Share of each source's documents, chosen by their hashes, that is kept for validation. The weights of the sources
    do not change it."""
    min_document_bytes: Annotated[int, Field(ge=0), CORPUS] = 0
    """Bytes of the shortest document; shorter ones are dropped and counted."""
    duplicates: Annotated[Literal["keep", "drop"], CORPUS_UNLESS_DEFAULT] = "keep"
    """Treatment of exact duplicates: `drop` keeps the first of all equal documents in the order of the sources, and
    counts the others. Documents are equal when their text is, apart from line ends and white space at both ends. All
    sources are compared with one another, before weights choose documents, and every document is read once more."""
    invalid_utf8: Annotated[Literal["replace", "reject"], CORPUS] = "replace"
    """Treatment of bytes that are not UTF-8: `replace` puts U+FFFD and counts the document, `reject` makes the document
    a bad row. A file of which more than 1 % of the characters would be replaced is in another encoding, and always ends
    the stage."""
    bad_rows: Annotated[Literal["stop", "skip"], CORPUS_UNLESS_DEFAULT] = "stop"
    """Treatment of rows that cannot become documents: lines that are no JSON or no object, values in `column` that are
    no text, and documents above `max_document_bytes`. `stop` ends the stage with exit code 3 at the first one, `skip`
    leaves them out and counts them by reason and by file. A damaged file always ends the stage."""
    max_bad_rows: Annotated[int, Field(ge=0)] = 1_000
    """Number of rows that `bad_rows = "skip"` may skip in all sources together. With more the stage ends with exit code
    3, and names the files that have most of them."""
    control_text: Annotated[Literal["text"], CORPUS] = "text"
    """Encoding of the name of a special token, such as `</s>`, in a document: always as text, never as that token."""
    max_document_bytes: Annotated[Positive, CORPUS_UNLESS_DEFAULT] = 128 * 2**20
    """Bytes of the largest document. A longer document or line is a bad row, of which no more than so many bytes are
    kept in memory. The longest books and source files in known corpora have some 10 MB. A worker takes less than 1 GB
    for documents of 64 MB."""
    split_bytes: Positive = 64 * 2**20
    """Input bytes that one encode task reads. This changes the number of tasks, never the corpus."""


class VocabularyTraining(Section):
    """Training of a SentencePiece BPE model with Llama 2's settings: byte fallback, split digits, no normalisation."""

    vocab_size: Annotated[int, Field(ge=300, le=1_000_000)]
    max_bytes: Positive = 256 * 2**20
    """Bytes of text that the training sees: whole documents of all sources, in each source's share of the training
    split, chosen by hashes. At most about eight times as many input bytes are read for it."""


class Tokenizer(Section):
    model: Annotated[str | None, Field(max_length=MAX_ADDRESS_CHARACTERS), CORPUS] = None
    """Path, or address without credentials, of a SentencePiece model, a `tokenizer.json` or a tiktoken file. Without
    it, `train` makes a model.
    """
    train: Annotated[VocabularyTraining | None, CORPUS] = None
    bos_token: Annotated[str | None, CORPUS] = None
    """Special token before each document, for a `tokenizer.json` other than Llama 2's and 3's."""
    eos_token: Annotated[str | None, CORPUS] = None
    """Special token after each document, for a `tokenizer.json` other than Llama 2's and 3's."""
    encoder: Literal["auto", "reference"] = "auto"
    """`auto` takes the fastest encoder that gives the reference's ids; `reference` is the library that defines them."""
    num_workers: Positive = 1
    """Number of encode tasks that run at the same time."""
    keep_encoded: bool = False
    """Whether the encoded partitions stay when the corpus is published, so that the next corpus of this name encodes
    only files that were added or have changed. They take as many bytes as the corpus, until the next one is published.
    """

    @model_validator(mode="after")
    def _has_one_vocabulary(self) -> Self:
        if (self.model is None) == (self.train is None):
            raise ValueError(
                "give exactly one of tokenizer.model (a file) and [tokenizer.train] (settings to make one)"
            )
        return self


class RopeScaling(Section):
    """Llama 3.1's frequency scaling (arXiv 2407.21783; transformers' `rope_type = "llama3"`)."""

    factor: Annotated[float, Field(ge=1)]
    low_freq_factor: Annotated[float, Field(gt=0)]
    high_freq_factor: Annotated[float, Field(gt=0)]
    original_max_position_embeddings: Positive


class Model(Section):
    """A Llama. Field names are those of a Hugging Face `config.json`."""

    preset: str | None = None
    """A named size whose values the other keys of this section override."""
    vocab_size: Annotated[int, Field(ge=2)]
    """Number of ids of the tokenizer. Where workers share a model and this number does not divide by them, their parts
    have rows of padding, which no checkpoint has."""
    padded_vocab_size: Positive | None = None
    """Rows of the embedding and of the language-model head, where they are more than `vocab_size`: the `vocab_size` in
    the `config.json` of a published model that is padded. Rows of padding take no probability."""
    hidden_size: Positive
    intermediate_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
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
    def _heads_divide(self) -> Self:
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} must be an even multiple of num_attention_heads "
                f"{self.num_attention_heads}: rotary embedding pairs the dimensions of a head"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} must be a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        return self

    @model_validator(mode="after")
    def _pads_upwards(self) -> Self:
        if self.num_vocab_rows < self.vocab_size:
            raise ValueError(
                f"padded_vocab_size {self.padded_vocab_size} must not be below vocab_size {self.vocab_size}: each id "
                f"has a row"
            )
        return self

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def num_vocab_rows(self) -> int:
        """Rows of the embedding and of the language-model head, padding included."""
        return self.padded_vocab_size or self.vocab_size

    @property
    def num_parameters(self) -> int:
        attention = 2 * self.hidden_size * self.hidden_size
        attention += 2 * self.hidden_size * self.num_key_value_heads * self.head_dim
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = self.num_vocab_rows * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_hidden_layers * layer + self.hidden_size


class Parallel(Section):
    data_parallel_size: Positive = 1
    """Number of copies of the model, which share the global batch; `tensor_parallel_size` workers hold a copy."""
    tensor_parallel_size: Annotated[Positive, COMPILED] = 1
    """Workers that share a copy of the model. Each has a part of every matrix, and of the sequence between layers."""
    reduce_dtype: Annotated[Literal["float32", "bfloat16"], TRACED] = "float32"
    """Type in which the workers of a model sum activations and their gradients; the result has the activations' type.
    `bfloat16` needs train.dtype `bfloat16` and halves the bytes that are sent, but rounds at each addition. Sums of the
    gradients of weights are always float32."""
    zero_stage: Literal[0, 1] = 0
    """ZeRO stage; with 1, data-parallel workers share the optimizer's state, and update it with the same bits."""
    threads_per_worker: Annotated[Positive, COMPILED] = 1
    """CPU threads of a worker. Compiled loops depend on this number, so it is declared and never detected."""
    device: Annotated[Device, COMPILED] = "cpu"
    """Kind of device that a worker computes on; every worker has a device of its own. `xla` is a NeuronCore of trn1 by
    torch_xla, `neuron` a NeuronCore of trn2 and trn3 by TorchNeuron, and `cuda` an NVIDIA GPU. `cuda` and `neuron` are
    written by their documentation and have not run on their devices."""

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
    reach at `decay_steps`; AWS's tutorials of neuronx-distributed have `linear`. `wsd` (warm-up, stable, decay;
    MiniCPM, arXiv 2404.06395) is constant, and in the last `cooldown_steps` before `decay_steps` falls as 1 - sqrt,
    which gave lower losses than a linear fall (arXiv 2405.18392). `constant` never falls."""
    learning_rate: Annotated[float, Field(gt=0), TRAINED]
    """Largest rate, which the warm-up reaches."""
    min_learning_rate: Annotated[float, Field(ge=0), TRAINED] = 0.0
    """Rate from `decay_steps` on."""
    warmup_steps: Annotated[int, Field(ge=0), TRAINED]
    """Steps in which the rate rises linearly from 0."""
    warmup_begin_step: Annotated[int, Field(ge=0), TRAINED] = 0
    """Step at which the warm-up begins. Only a branch, which begins at a later step, can have another one than 0: at
    `train.branch.step` its rate rises once more, for continued pre-training (arXiv 2403.08763)."""
    decay_steps: Annotated[Positive | None, TRAINED] = None
    """Step at which the rate reaches its minimum; every schedule except `constant` has one. It is independent of
    train.max_steps, so a run can be made longer."""
    cooldown_steps: Annotated[Positive | None, TRAINED] = None
    """Steps before `decay_steps` in which the rate of `wsd` falls; only `wsd` has them."""
    beta1: Annotated[float, Field(ge=0, lt=1), TRACED] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1), TRACED] = 0.95
    epsilon: Annotated[float, Field(gt=0), TRACED] = 1e-8
    weight_decay: Annotated[float, Field(ge=0), TRACED] = 0.1
    """Decay of matrices; norm weights have none."""
    max_grad_norm: Annotated[float, Field(gt=0), TRACED] = 1.0

    @model_validator(mode="after")
    def _has_what_its_schedule_needs(self) -> Self:
        taken = {"decay_steps": self.schedule != "constant", "cooldown_steps": self.schedule == "wsd"}
        for name, is_taken in taken.items():
            value = getattr(self, name)
            if is_taken and value is None:
                raise ValueError(f"schedule {self.schedule!r} needs {name}")
            if value is not None and not is_taken:
                raise ValueError(f"schedule {self.schedule!r} has no {name}, got {value}: leave it out")
        if self.schedule == "constant" and self.min_learning_rate:
            raise ValueError(
                f"schedule 'constant' has no min_learning_rate, got {self.min_learning_rate}: leave it out"
            )
        return self

    @model_validator(mode="after")
    def _rates_and_steps_rise(self) -> Self:
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(f"min_learning_rate {self.min_learning_rate} exceeds learning_rate {self.learning_rate}")
        if self.decay_steps is None:
            return self
        begin = f"warmup_begin_step {self.warmup_begin_step} + " if self.warmup_begin_step else ""
        warm = self.warmup_begin_step + self.warmup_steps
        if warm >= self.decay_steps:
            raise ValueError(f"{begin}warmup_steps {self.warmup_steps} must be below decay_steps {self.decay_steps}")
        if self.cooldown_steps is not None and warm > self.decay_steps - self.cooldown_steps:
            raise ValueError(
                f"{begin}warmup_steps {self.warmup_steps} and cooldown_steps {self.cooldown_steps} overlap before "
                f"decay_steps {self.decay_steps}"
            )
        return self


class Compile(Section):
    enabled: Annotated[bool, TRAINED] = True
    require_warm: bool = False
    """End the trainer with exit code 4 as soon as a graph is not in the cache, instead of compiling the graph."""
    trace_on: Literal["device", "cpu"] = "device"
    """Machine on which Neuron graphs are traced: a node with the device, or any CPU, if both give the same graphs."""
    flags: Annotated[tuple[CompilerFlag, ...], Field(strict=False), COMPILED] = ()
    """Flags of neuronx-cc in their order, such as "--model-type=transformer"; the stage sets its target."""
    num_workers: Positive = 7
    """Number of Neuron graphs that are compiled at the same time, one a task. The default is the number of graphs of a
    run, because all nodes are paid for until the last graph is compiled."""
    task_cpus: Annotated[int, Field(ge=1, le=1024)] = 8
    """CPUs that Ray reserves for a compile task."""
    task_memory_gib: Annotated[float, Field(gt=0, le=16_384)] = 32.0
    """GiB of memory that Ray reserves for a compile task. A task that was killed for memory gets twice as much."""
    task_timeout_seconds: Annotated[float, Field(gt=0)] = 7_200.0
    """Seconds after which a compile task is ended and its graph has failed. Large graphs were seen to take an hour."""
    task_attempts: Annotated[int, Field(ge=1, le=20)] = 3
    """Most tasks for one graph. A task that was killed, was lost or ended with 70 is followed by another."""


class Branch(Section):
    """A checkpoint of another run below the same root, with which a run begins: weights, moments, the number of steps,
    and the position in the data. All other settings may differ from the parent's, except the model's shapes and the
    vocabulary.
    """

    run: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*-[0-9a-f]{8}$", max_length=MAX_NAME_LENGTH + 9)]
    """Name of the parent run, as `python -m services.trainer runs` lists it."""
    step: Annotated[int, Field(ge=0)]
    """Step after which the parent has a checkpoint. The branch counts its steps from there on."""
    data: Literal["continue", "restart"] = "continue"
    """First sample of the branch. `continue` goes on after the last sample that the nearest ancestor with this
    corpus took, or begins a corpus that none of them has seen. `restart` begins the corpus again, so that its samples
    are seen twice."""


class Train(Section):
    max_steps: Positive
    seed: Annotated[int, Field(ge=0, lt=2**63), TRAINED] = 0
    """Seed of the initial weights, and of the order of the samples unless `data_seed` is given."""
    data_seed: Annotated[int, Field(ge=0, lt=2**63, default_factory=lambda known: known["seed"]), TRAINED]
    """Seed of the order of the samples. Default: the value of `seed`."""
    initial_weights: Annotated[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None, TRAINED] = None
    """Digest of the imported weights that the run begins with, as `import` prints it; without it, they are random."""
    branch: Annotated[Branch | None, TRAINED] = None
    """Checkpoint of another run with which the run begins."""
    dtype: Annotated[Literal["float32", "bfloat16"], TRACED] = "float32"
    """Type of matrix products. Master weights, moments and reductions are always float32."""
    param_dtype: Annotated[Literal["float32", "bfloat16"], TRACED] = "float32"
    """Type of all weights in the model, of a micro-batch's gradients, and of activations between layers. `bfloat16`
    needs dtype `bfloat16`. The optimizer then holds float32 master weights, and each update rounds the model's weights
    from them."""
    attention_mask: Annotated[Literal["causal", "block_causal"], TRACED] = "causal"
    """Tokens that a token attends to: with `causal` all before it in its row, with `block_causal` only those of its
    document, whose positions begin at 0. In both modes a document's last token predicts the next document's first."""
    z_loss: Annotated[float, Field(ge=0), TRACED] = 0.0
    """Coefficient of the mean of log(Z)^2 over tokens, which the gradient includes (PaLM, arXiv 2204.02311, has 1e-4).
    The reported losses of training and evaluation are cross-entropy alone. 0 switches it off."""
    activation_checkpointing: Annotated[ActivationCheckpointing, COMPILED] = "none"
    """Part of a layer's forward pass that the backward pass computes again instead of keeping it: nothing (`none`), all
    but matrix products and attention (`selective`), or all (`full`). The bits are the same, except on `xla`, whose
    compiler then fuses and rounds differently."""
    reduction: Annotated[Literal["exact", "fast"], TRAINED] = "exact"
    """`exact` sums micro-batches in one fixed binary tree, so that any number of workers gives the same bits. `fast`
    sums those of a worker one after the other, and leaves the sum over workers to the library. For m micro-batches, a
    worker holds log2(m) sums of the gradient with `exact`, and one with `fast`."""
    evaluation_interval_steps: Positive = 100
    """Steps between two evaluations."""
    evaluation_tokens: Annotated[Annotated[int, Field(ge=0, lt=2**63)] | None, TRAINED] = None
    """Targets of the validation split in an evaluation, rounded up to whole rows; without it, all of them. One fixed
    permutation of the rows chooses the same ones in each evaluation of each run. 0 switches evaluation off. A target
    costs a third of a trained token."""
    health_interval_steps: Annotated[int, Field(ge=0)] = 100
    """Steps between two measurements of the run's health: norms of layer groups, the largest logit and the size of
    activations. 0 switches them off. A measurement takes a third of a step, as long as a forward pass."""
    time_limit_seconds: Annotated[float, Field(gt=0)] | None = None
    """Seconds after which a training command stops with a committed checkpoint and exit code 75."""
    max_consecutive_skipped_steps: Annotated[int, Field(ge=0)] = 10
    """Most steps in a row whose gradient is not finite, and which update nothing. One more ends the run with exit 2."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """Most times that a command starts lost workers again without a new checkpoint in between."""
    watchdog_factor: Annotated[float, Field(ge=0)] = 10.0
    """Median step times after which a worker's step counts as hung. The worker writes the stacks of its threads and
    ends, and all workers start again. 0 switches the watchdog off."""
    watchdog_min_seconds: Annotated[float, Field(gt=0, le=86_400)] = 120.0
    """Seconds that a step always has before the watchdog ends it. Collectives end a minute after twice the limit."""
    loss_spike_sigma: Annotated[float, Field(ge=0)] = 0.0
    """Standard deviations above the trend of the last losses or gradient norms beyond which a step deviates. 0 switches
    the detection of loss spikes off, and 6 is usual. The settings of loss spikes may change while a run goes on; each
    change is recorded."""
    loss_spike_window: Annotated[int, Field(ge=16, le=1_000)] = 128
    """Number of last losses that the next one is compared with. Before a quarter of them exist, no step deviates."""
    loss_spike_patience_steps: Annotated[int, Field(ge=1, le=1_000)] = 16
    """Number of losses in a row that must deviate before a spike is confirmed. Fewer heal by themselves."""
    loss_spike_rollback_steps: Annotated[int, Field(ge=1, le=100_000)] = 100
    """Steps before the first one of a confirmed spike to which the run goes back. It leaves out all batches from there
    to the last one of the spike. The checkpoints that this needs are kept beside those of `checkpoint.keep_latest`."""
    loss_spike_max_rollbacks: Annotated[int, Field(ge=0)] = 20
    """Number of times that a run may go back because of loss spikes. It goes on with a warning after the next spike."""

    @model_validator(mode="after")
    def _weights_are_as_wide_as_products(self) -> Self:
        if self.param_dtype == "bfloat16" and self.dtype != "bfloat16":
            raise ValueError(
                f"train.param_dtype 'bfloat16' needs train.dtype 'bfloat16', got {self.dtype!r}: float32 products of "
                f"rounded weights gain no precision"
            )
        return self

    @model_validator(mode="after")
    def _begins_once(self) -> Self:
        if self.branch and self.initial_weights:
            raise ValueError(
                f"train.branch {self.branch.run} and train.initial_weights {self.initial_weights[:12]} both name the "
                f"weights that the run begins with: leave one out"
            )
        if self.branch and self.branch.step >= self.max_steps:
            raise ValueError(f"train.branch.step {self.branch.step} must be below train.max_steps {self.max_steps}")
        return self

    @property
    def first_step(self) -> int:
        """Steps that were done when the run began: those of its parent, or 0."""
        return self.branch.step if self.branch else 0


class Checkpoint(Section):
    interval_steps: Positive = 100
    """Steps between two checkpoints."""
    keep_latest: Annotated[int, Field(ge=2)] = 2
    """Number of newest checkpoints that are kept; at least 2, because the newest may be damaged."""
    keep_interval_steps: Positive | None = None
    """Checkpoints whose step is a multiple of this number are kept for good."""


class Cluster(Section):
    """Nodes of the stages on a cluster, where a node is a pod and a node of Ray. One machine ignores this section."""

    tokenizer_nodes: Positive = 1
    """Number of nodes that share the tokenizer's tasks."""
    compiler_nodes: Positive = 1
    """Number of nodes of the compiler stage. Default: one, or as many as `compile.num_workers` Neuron tasks need."""
    trainer_workers_per_node: Positive = 1
    """Workers that share a node. The trainer's nodes are data_parallel_size x tensor_parallel_size over this number."""
    trainer_instance_type: str | None = None
    """EC2 type of the trainer's nodes, with NeuronCores or GPUs. `plan` needs it for memory, peak FLOP/s and price."""
    min_nodes: Positive | None = None
    """Fewest nodes with which the trainer goes on when lost nodes are not replaced. Without it, it waits for all."""

    @field_validator("trainer_instance_type")
    @classmethod
    def _is_a_known_instance_type(cls, value: str | None) -> str | None:
        if value is not None and value not in read_instance_types():
            raise ValueError(f"unknown instance type {value!r}; known: {', '.join(read_instance_types())}")
        return value

    @property
    def has_compiler_nodes(self) -> bool:
        """Tell whether the recipe sets `compiler_nodes`."""
        return "compiler_nodes" in self.model_fields_set

    def fewer_nodes(self, num_workers: int, tensor_parallel_size: int, num_micro_batches: int) -> tuple[int, ...]:
        """Return the numbers of nodes with which the trainer may go on after a loss, largest first.

        There are none without `min_nodes`. Each number gives whole models with equal numbers of micro-batches. With
        `train.reduction = "exact"` the bits stay the same.
        """
        if self.min_nodes is None:
            return ()

        def shares_evenly(nodes: int) -> bool:
            models, rest = divmod(nodes * self.trainer_workers_per_node, tensor_parallel_size)
            return models > 0 and rest == 0 and num_micro_batches % models == 0

        candidates = range(self.nodes_of("trainer", num_workers) - 1, self.min_nodes - 1, -1)
        return tuple(filter(shares_evenly, candidates))

    def nodes_of(self, stage: Stage, num_workers: int) -> int:
        """Return the number of nodes of a stage; `num_workers` counts the trainer's workers."""
        return {
            "tokenizer": self.tokenizer_nodes,
            "compiler": self.compiler_nodes,
            "trainer": num_workers // self.trainer_workers_per_node,
        }[stage]


class Notify(Section):
    """Notices to a webhook. Nothing of this section is part of an identity."""

    webhook: Annotated[str, AfterValidator(_require_place_of_secret)] | None = None
    """Place of the webhook's URL: `env:NAME`, an environment variable, or `file:/PATH`, a file. The URL itself is a
    password, and a recipe is stored and shown. Default: `env:MILLRACE_WEBHOOK`, where that variable is set."""
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
            if value == field.default and all(mark.is_default_left_out for mark in marks):
                continue
            if isinstance(value, Model):
                del plain[name]["preset"]  # another way of writing the other fields
                if value.num_vocab_rows == value.vocab_size:
                    del plain[name]["padded_vocab_size"]
            yield prefix + name, plain[name]
        elif isinstance(value, BaseModel):
            yield from _identity_fields(value, kind, f"{prefix}{name}.")
