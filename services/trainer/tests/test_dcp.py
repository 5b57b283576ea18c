"""Runs begin with checkpoints of torch.distributed.checkpoint: with Hugging Face's names, and with torchtitan's."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from services.common.errors import ArtifactError
from services.common.launch.launcher import WorkerEnvironment
from services.common.program.llama import parameter_shapes
from services.common.recipe.file import load_recipe
from services.common.testing.file_opens import noticing_opens
from services.trainer.conversion.dcp.checkpoint import DcpWeights, is_dcp_checkpoint
from services.trainer.conversion.dcp.metadata import METADATA, read_metadata
from services.trainer.conversion.export import export
from services.trainer.conversion.weight_import import digest_weights
from services.trainer.inspection.sample import load_model
from services.trainer.job import Job
from services.trainer.loop import train
from services.trainer.run import open_run
from services.trainer.tests.builders import write_recipe
from services.trainer.tests.dcp_files import (
    OLD_NAMES,
    change_metadata,
    name_as_torchtitan,
    save,
    save_on_two_ranks,
    torchtitan_logits,
    with_training_state,
)
from services.trainer.tests.nxd_files import Weights, are_equal, draw_weights, llama
from services.trainer.tests.runs import call_trainer
from services.trainer.tests.test_import import digest_in

MODEL = llama(2)
ALONE = WorkerEnvironment(rank=0, world_size=1)


@pytest.fixture(scope="module")
def weights() -> Weights:
    return draw_weights(MODEL)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, weights: Weights) -> dict[str, Path]:
    """The same weights, saved by two ranks under several names, alone and with a training state."""
    folder = tmp_path_factory.mktemp("saved")
    theirs = name_as_torchtitan(weights, MODEL)
    older = name_as_torchtitan(weights, MODEL, OLD_NAMES)
    states: dict[str, dict[str, Any]] = {
        "hugging-face": dict(weights),
        "hugging-face in a training state": {"model": dict(weights), "optim": {"state": dict(weights)}, "step": 3},
        "torchtitan": with_training_state(theirs),
        "torchtitan's model": dict(theirs),
        "older torchtitan": {"model": older | {"freqs_cis": torch.ones(4, 2, dtype=torch.complex64)}},
    }
    save_on_two_ranks({folder / name: state for name, state in states.items()})
    return {name: folder / name for name in states}


def read_all(folder: Path) -> Weights:
    chunks = DcpWeights(folder, MODEL)
    return {name: chunks.read(name) for name in parameter_shapes(MODEL)}


def test_weights_of_two_ranks_come_back_bit_for_bit(saved: dict[str, Path], weights: Weights) -> None:
    for name, folder in saved.items():
        assert sorted(path.name for path in folder.glob("*.distcp")) == ["__0_0.distcp", "__1_0.distcp"]
        assert are_equal(read_all(folder), weights), name


def test_chunks_are_joined_as_torch_joins_them(saved: dict[str, Path]) -> None:
    theirs = {name: torch.zeros(shape) for name, shape in parameter_shapes(MODEL).items()}
    with warnings.catch_warnings(action="ignore"):
        load(theirs, checkpoint_id=saved["hugging-face"], no_dist=True)

    assert are_equal(read_all(saved["hugging-face"]), theirs)


def test_what_lies_beside_a_model_is_ignored_and_named(saved: dict[str, Path], weights: Weights) -> None:
    described = {name: DcpWeights(folder, MODEL).description for name, folder in saved.items()}

    number = len(weights)
    assert described == {
        "hugging-face": "Hugging Face's names",
        "hugging-face in a training state": "Hugging Face's names; ignored beside the model: "
        f"optim ({number}), step (1)",
        "torchtitan": "torchtitan's names; ignored beside the model: "
        f"optimizer ({2 * number}), train_state (1), lr_scheduler (1), dataloader (1)",
        "torchtitan's model": "torchtitan's names",
        "older torchtitan": "torchtitan's names; ignored beside the model: model (1)",
    }


def test_each_pass_opens_each_chunk_of_the_model_once_and_reads_its_bytes(saved: dict[str, Path]) -> None:
    """An import has two passes: one for the digest, one for the checkpoint. The optimizer's chunks are left alone."""
    opened, read = {}, {}
    for name in ("torchtitan's model", "torchtitan"):
        tensors = [tensor for tensor in read_metadata(saved[name]).values() if tensor is not None]
        chunks = DcpWeights(saved[name], MODEL)
        before = read_bytes()
        with noticing_opens(saved[name]) as opens:
            digest_weights(parameter_shapes(MODEL), chunks.read)
            opened[name] = len(opens.paths)
        read[name] = read_bytes() - before
        if name == "torchtitan's model":
            places = Counter((chunk.file, chunk.start) for tensor in tensors for chunk in tensor.chunks)
            assert opened[name] == len(places) > len(tensors)
            length = sum(chunk.length for tensor in tensors for chunk in tensor.chunks)
            assert length <= read[name] < length + 10_000 * len(places)
    assert opened["torchtitan"] == opened["torchtitan's model"]
    assert read["torchtitan"] < 1.1 * read["torchtitan's model"]


def read_bytes() -> int:
    found = re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())
    assert found
    return int(found[1])


@pytest.fixture(scope="module")
def exported(new_shared_job: Callable[..., Job], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Hugging Face folder of a trained model, beside the root of its run."""
    job = new_shared_job(train__max_steps="3")
    train(job, ALONE)
    return export(open_run(job.root, job.run), job.root.parent / "hugging-face")


def import_from(
    capfd: pytest.CaptureFixture[str], exported: Path, source: Path, *options: str, root: str = "a"
) -> tuple[int, str]:
    recipe, place = write_recipe(exported.parent), exported.parent / root
    return call_trainer(capfd, recipe, place, f"--from={source}", *options, command="import")


@pytest.mark.parametrize("names", ["hugging-face", "torchtitan"])
def test_an_imported_model_gives_the_logits_of_the_model_that_was_saved(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], exported: Path, names: str
) -> None:
    transformers = pytest.importorskip("transformers")  # in no image, so Pants leaves this test out
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported)
    model = load_recipe(write_recipe(exported.parent)).model
    saved = dict(theirs.state_dict())
    tokens_BS = torch.randint(0, model.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
    if names == "torchtitan":
        saved = name_as_torchtitan(saved, model)
        logits = torchtitan_logits(saved, model, tokens_BS)
        torch.testing.assert_close(logits, theirs(tokens_BS).logits, rtol=1e-4, atol=1e-5)  # the same model
    source = save(tmp_path / "step-3", with_training_state(saved))

    code, printed = import_from(capfd, exported, source)
    assert code == 2, printed
    assert "only names and shapes were compared" in printed
    assert f"weights have {'torchtitan' if names == 'torchtitan' else 'Hugging Face'}'s names" in printed
    named = f"--train.initial_weights={digest_in(printed)}"
    code, printed = import_from(capfd, exported, source, named, f"--train.data_seed={len(names)}")
    assert code == 0, printed

    begin = Path(printed.splitlines()[0])
    run = open_run(exported.parent / "a", begin.parent.name)
    assert torch.equal(load_model(run).logits(tokens_BS), theirs(tokens_BS).logits)


def test_the_configuration_beside_a_checkpoint_is_compared_with_the_recipe(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], exported: Path
) -> None:
    source = save(tmp_path / "step-3", dict(safetensors.torch.load_file(exported / "model.safetensors")))
    config = json.loads((exported / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config))
    code, printed = import_from(capfd, exported, source)
    assert (code, "initial_weights" in printed, "only names" in printed) == (2, True, False), printed

    (source / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-2}))
    code, printed = import_from(capfd, exported, source)
    assert (code, "rms_norm_eps: config.json has 0.01" in printed) == (2, True), printed


def test_weights_of_several_types_become_float32(tmp_path: Path) -> None:
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    mixed = {name: weight.to(kinds[n % 3]) for n, (name, weight) in enumerate(draw_weights(MODEL).items())}

    assert are_equal(read_all(save(tmp_path / "mixed", mixed)), {name: each.float() for name, each in mixed.items()})


@pytest.mark.parametrize("names", ["hugging-face", "torchtitan"])
def test_a_tied_model_needs_no_head(tmp_path: Path, names: str) -> None:
    model = llama(2, tie_word_embeddings=True)
    weights = draw_weights(model)
    state = name_as_torchtitan(weights, model) if names == "torchtitan" else weights
    twice = {**state, "lm_head.weight": weights["model.embed_tokens.weight"]}

    for number, each in enumerate((state, twice)):
        chunks = DcpWeights(save(tmp_path / str(number), dict(each)), model)
        assert are_equal({name: chunks.read(name) for name in parameter_shapes(model)}, weights)


def test_the_safetensors_that_torchs_hugging_face_writer_joins_are_imported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], exported: Path
) -> None:
    """torchtitan's `last_save_in_hf` writes so; the configuration is not among its files."""
    weights = safetensors.torch.load_file(exported / "model.safetensors")
    expected = digest_in(import_from(capfd, exported, exported)[1])
    writer = HuggingFaceStorageWriter(str(tmp_path / "joined"), save_distributed=True, enable_consolidation=True)
    with warnings.catch_warnings(action="ignore"):
        save_dcp(dict(weights), storage_writer=writer, no_dist=True)

    code, printed = import_from(capfd, exported, tmp_path / "joined")
    assert (code, "config.json" in printed) == (3, True), printed
    shutil.copy(exported / "config.json", tmp_path / "joined")
    assert digest_in(import_from(capfd, exported, tmp_path / "joined")[1]) == expected


class Program:
    """An object that makes a folder once a pickle with it is loaded without protection."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize(
    "place",
    [
        lambda metadata, program: program,
        lambda metadata, program: dataclasses.replace(metadata, planner_data=program),
        lambda metadata, program: dataclasses.replace(metadata, version=program),
    ],
    ids=["alone", "planner data", "version"],
)
def test_metadata_that_would_run_a_program_is_refused_and_runs_none(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    exported: Path,
    place: Callable[[Any, Program], object],
) -> None:
    source, made = save(tmp_path / "step-3", dict(draw_weights(MODEL))), tmp_path / "made"
    metadata = pickle.loads((source / METADATA).read_bytes())
    content = pickle.dumps(place(metadata, Program(made)))
    (source / METADATA).write_bytes(content)

    code, printed = import_from(capfd, exported, source)

    assert (code, f"{source / METADATA}: " in printed, f"it names {os.mkdir.__module__}.mkdir" in printed) == (
        3,
        True,
        True,
    )
    assert not made.exists()
    pickle.loads(content)
    assert made.exists()


@pytest.mark.parametrize(
    "name",
    [
        "builtins.eval",
        "builtins.getattr",
        "os.system",
        "torch.load",
        "torch.serialization._legacy_load",
        "torch.distributed.checkpoint.metadata.os.system",
        "torch.distributed.checkpoint.filesystem.FileSystem",
        "torch.Size.__class__",
    ],
)
def test_metadata_that_names_anything_else_is_refused(tmp_path: Path, name: str) -> None:
    for dots in range(1, name.count(".") + 1):
        module, attribute = ".".join(name.split(".")[:dots]), ".".join(name.split(".")[dots:])
        words = (pickle.SHORT_BINUNICODE + bytes([len(word)]) + word.encode() for word in (module, attribute))
        (tmp_path / METADATA).write_bytes(
            pickle.PROTO + b"\x04" + b"".join(words) + pickle.STACK_GLOBAL + pickle.EMPTY_TUPLE + pickle.REDUCE + b"."
        )
        with pytest.raises(ArtifactError, match=f"it names {re.escape(name)}, which is no part of it"):
            read_metadata(tmp_path)


def test_metadata_cannot_change_torchs_classes(tmp_path: Path) -> None:
    """A pickle may set attributes of whatever it has loaded, classes included."""
    for module, name in ((Metadata.__module__, "Metadata"), ("torch", "Size")):
        setting = pickle.NONE + pickle.EMPTY_DICT + pickle.UNICODE + b"changed\n" + pickle.NONE + pickle.SETITEM
        (tmp_path / METADATA).write_bytes(
            pickle.PROTO
            + b"\x04"
            + pickle.GLOBAL
            + f"{module}\n{name}\n".encode()
            + setting
            + pickle.TUPLE2
            + pickle.BUILD
            + b"."
        )
        with pytest.raises(ArtifactError, match=re.escape(METADATA)):
            read_metadata(tmp_path)
    assert not any(hasattr(kind, "changed") for kind in (Metadata, torch.Size))


HEAD, NORM, FILE = "lm_head.weight", "model.norm.weight", "__0_0.distcp"
Change = Callable[[Path], object]


def metadata(change: Callable[[Any], object]) -> Change:
    return lambda folder: change_metadata(folder, change)


def place_of(name: str) -> Callable[[Any], Any]:
    return lambda metadata: next(info for index, info in metadata.storage_data.items() if index.fqn == name)


def flip_in_chunk(folder: Path) -> None:
    found: list[Any] = []
    change_metadata(folder, lambda metadata: found.append(place_of(HEAD)(metadata)))
    content = bytearray((folder / FILE).read_bytes())
    content[found[0].offset + found[0].length // 2] ^= 1
    (folder / FILE).write_bytes(content)


def halve_chunk(metadata: Any) -> None:
    chunk = metadata.state_dict_metadata[HEAD].chunks[0]
    chunk.sizes = torch.Size([chunk.sizes[0] // 2, chunk.sizes[1]])


def nest(value: object) -> object:
    """Nest a value so that few bytes of a pickle would be 2**100 values as text."""
    for _ in range(100):
        value = (value, value)
    return value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / METADATA).unlink(), "has files .distcp without .metadata"),
        (lambda folder: (folder / METADATA).write_bytes(b""), ".metadata: cannot be read as the metadata"),
        (lambda folder: (folder / METADATA).write_bytes(b"{}"), ".metadata: cannot be read as the metadata"),
        (lambda folder: (folder / METADATA).write_bytes(pickle.dumps([])), "a list in the place of a Metadata"),
        (
            lambda folder: (folder / METADATA).write_bytes((folder / METADATA).read_bytes()[:-100]),
            ".metadata: cannot be read as the metadata",
        ),
        (lambda folder: (folder / FILE).unlink(), f"{FILE}: cannot be read: No such file"),
        (lambda folder: os.truncate(folder / FILE, 10_000), f"{FILE}: has 10,000 bytes, expected at least"),
        (flip_in_chunk, f"{FILE}: {HEAD} at byte "),
        (metadata(lambda each: each.state_dict_metadata.pop(HEAD)), f"1 missing ({HEAD}), 0 unknown (none)"),
        (
            metadata(lambda each: each.state_dict_metadata.update(more=each.state_dict_metadata[HEAD])),
            "more has a chunk at [0, 0] that no file has",
        ),
        (
            metadata(lambda each: each.state_dict_metadata.update({HEAD: BytesStorageMetadata()})),
            f"1 missing ({HEAD}), 0 unknown (none)",
        ),
        (metadata(lambda each: setattr(each, "storage_data", None)), "a NoneType in the place of a dict"),
        (metadata(lambda each: each.state_dict_metadata.update({HEAD: 3})), "a int in the place of a TensorStorage"),
        (metadata(halve_chunk), f"{HEAD} has 768 values, and its chunks have 384"),
        (
            metadata(lambda each: setattr(place_of(HEAD)(each), "relative_path", "../__0_0.distcp")),
            f"{HEAD} is in '../__0_0.distcp', expected a file of the checkpoint's own folder",
        ),
        (
            metadata(lambda each: setattr(place_of(HEAD)(each), "transform_descriptors", ["zstd"])),
            f"{HEAD} is stored with extensions of DCP",
        ),
        (
            metadata(lambda each: setattr(place_of(HEAD)(each), "length", 2**62)),
            f"{FILE}: has ",
        ),
        (metadata(lambda each: setattr(place_of(HEAD)(each), "offset", -1)), "other values than numbers from 0 on"),
        (
            metadata(lambda each: setattr(place_of(HEAD)(each), "offset", nest(()))),
            "other values than numbers from 0 on",
        ),
        (metadata(lambda each: setattr(place_of(HEAD)(each), "relative_path", "a/" * 10**6)), f"{HEAD} is in 'a/"),
        (
            metadata(lambda each: setattr(place_of(HEAD)(each), "offset", place_of(NORM)(each).offset)),
            f"{FILE}: has torch.float32 [32] of {HEAD}, but .metadata names torch.float32 [24, 32]",
        ),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused(tmp_path: Path, change: Change, message: str) -> None:
    source = save(tmp_path / "step-3", dict(draw_weights(MODEL)))
    change(source)

    with pytest.raises(ArtifactError, match=re.escape(message)) as raised:
        assert not is_dcp_checkpoint(source) or read_all(source)
    assert len(str(raised.value)) < 2_000


def test_a_chunk_that_is_named_twice_leaves_values_out(tmp_path: Path, saved: dict[str, Path]) -> None:
    source = Path(shutil.copytree(saved["hugging-face"], tmp_path / "step-3"))

    def repeat(metadata: Any) -> None:
        chunks = metadata.state_dict_metadata[HEAD].chunks
        chunks[1] = chunks[0]

    change_metadata(source, repeat)
    with pytest.raises(ArtifactError, match=f"{HEAD}: 384 of 768 values are NaN or infinite"):
        read_all(source)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop(HEAD), f"1 missing ({HEAD}), 0 unknown (none)"),
        (lambda weights: weights.update(more=torch.ones(1)), "0 missing (none), 1 unknown (more)"),
        (
            lambda weights: weights.update({NORM: torch.ones(33)}),
            f"{NORM} is torch.float32 [33], expected [32] of torch.float32, torch.bfloat16",
        ),
        (lambda weights: weights.update({NORM: torch.ones(32).double()}), f"{NORM} is torch.float64 [32], expected"),
        (lambda weights: weights[HEAD][0].fill_(float("nan")), f"{HEAD}: 32 of 768 values are NaN or infinite"),
        (
            lambda weights: weights.update({"ema.model.embed_tokens.weight": torch.ones(1)}),
            "2 embeddings (model.embed_tokens.weight, ema.model.embed_tokens.weight)",
        ),
        (lambda weights: weights.pop("model.embed_tokens.weight"), "has no Llama: it has none, expected one"),
    ],
)
def test_the_checkpoint_of_another_model_is_refused(
    tmp_path: Path, change: Callable[[Weights], object], message: str
) -> None:
    weights = draw_weights(MODEL)
    change(weights)

    with pytest.raises(ArtifactError, match=re.escape(message)):
        read_all(save(tmp_path / "step-3", dict(weights)))


def test_fused_queries_keys_and_values_of_torchtitan_are_named(tmp_path: Path) -> None:
    """torchtitan saved them so for two months between two releases."""
    weights = name_as_torchtitan(draw_weights(MODEL), MODEL)
    fused = "layers.0.attention.qkv_linear.wqkv.weight"
    weights[fused] = torch.cat([weights.pop(f"layers.0.attention.qkv_linear.w{kind}.weight") for kind in "qkv"])

    with pytest.raises(ArtifactError, match=rf"3 missing .*, 1 unknown \({re.escape(fused)}\)"):
        read_all(save(tmp_path / "step-3", dict(weights)))


def test_the_folder_above_names_its_checkpoints(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], exported: Path
) -> None:
    for step in (3, 6):
        save(tmp_path / f"step-{step}", {"step": step})

    code, printed = import_from(capfd, exported, tmp_path)

    assert (code, "Name one of them: step-3, step-6" in printed) == (3, True), printed
