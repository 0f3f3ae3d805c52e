"""Checkpoints whose tensors lie in shards, here of a process group of one; see test_distributed."""

import errno
import resource
import shutil

import pytest
import torch
from torch import distributed as dist

from tiny_llm import sharded
from tiny_llm.checkpoint import load_checkpoint
from tiny_llm.distributed import SINGLE, Parallel
from tiny_llm.errors import FileError, FormatError
from tiny_llm.optimizer import build_optimizer
from tiny_llm.saving import save_checkpoint
from tiny_llm.seal import seal
from tiny_llm.training import train_steps
from tiny_llm.transformer import Transformer

ALONE = Parallel("fsdp", 0, 1)


@pytest.fixture(autouse=True)
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def run(model_config, training_config, random_tokens):
    """A model trained for a few steps, and a function that saves it."""
    torch.manual_seed(0)
    model = Transformer(model_config)
    ALONE.shard(model)
    optimizer = build_optimizer(model, training_config)
    train_steps(model, random_tokens, training_config, device="cpu", optimizer=optimizer)

    def save(path, step, parallel=ALONE):
        save_checkpoint(
            path,
            model=model,
            optimizer=optimizer,
            training_config=training_config,
            step=step,
            tokens_checksum=7,
            parallel=parallel,
        )

    return model, optimizer, save


@pytest.fixture
def saved(run, tmp_path):
    path = tmp_path / "checkpoint.pt"
    run[2](path, 8)
    return path


def folders(path):
    return sorted(each.name for each in path.parent.iterdir() if each.is_dir())


def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


@pytest.mark.parametrize("parallel", [SINGLE, ALONE], ids=["whole", "sharded"])
def test_shards_give_back_the_very_weights_and_optimizer_state(run, saved, parallel):
    model, optimizer, _ = run
    checkpoint = load_checkpoint(saved, parallel)
    assert checkpoint.model_state == {}, "the file holds no tensor of the model"
    again = checkpoint.build_model(device="cpu", parallel=parallel)
    assert again.head.weight is again.embedding.weight
    expected, found = dict(model.named_parameters()), dict(again.named_parameters())
    assert expected.keys() == found.keys()
    restored = checkpoint.build_optimizer(again)
    for name, weight in expected.items():
        assert torch.equal(whole(found[name]), whole(weight)), name
        before, after = optimizer.state[weight], restored.state[found[name]]
        assert before.keys() == after.keys() == {"step", "exp_avg", "exp_avg_sq"}
        for key, value in before.items():
            assert torch.equal(whole(after[key]), whole(value)), (name, key)


def test_newer_save_removes_the_shards_before_it_and_those_of_a_killed_one(run, saved):
    (saved.parent / "checkpoint.pt.shards-9").mkdir()  # a save that was killed
    run[2](saved, 9)
    assert folders(saved) == ["checkpoint.pt.shards-9.1"]
    assert load_checkpoint(saved).step == 9
    run[2](saved, 9)
    assert folders(saved) == ["checkpoint.pt.shards-9"]
    assert load_checkpoint(saved).build_model(device="cpu").num_parameters() > 0


def test_full_disk_keeps_the_shards_before(run, saved):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(FileError, match=r"cannot write .*shards-9: File too large"):
            run[2](saved, 9)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert folders(saved) == ["checkpoint.pt.shards-8"]
    assert load_checkpoint(saved).step == 8
    load_checkpoint(saved).build_model(device="cpu")


def test_shards_whose_checkpoint_cannot_be_written_are_removed(run, saved):
    temporary = saved.with_name(".checkpoint.pt.tmp")
    temporary.mkdir()  # no file can be opened under this name
    with pytest.raises(FileError, match=r"cannot write .*checkpoint\.pt: Is a directory"):
        run[2](saved, 9)
    temporary.rmdir()
    assert folders(saved) == ["checkpoint.pt.shards-8"]
    assert load_checkpoint(saved).step == 8


def shard_of(path):
    (file,) = path.with_name("checkpoint.pt.shards-8").glob("*.safetensors")
    return file


def test_damaged_shard_is_refused(saved):
    content = bytearray(shard_of(saved).read_bytes())
    content[-3] ^= 1
    shard_of(saved).write_bytes(content)
    with pytest.raises(FormatError, match=r"checkpoint shard .*safetensors is damaged"):
        load_checkpoint(saved)


def test_truncated_shard_is_refused(saved):
    shard_of(saved).write_bytes(shard_of(saved).read_bytes()[:-100])
    with pytest.raises(FormatError, match=r"checkpoint shard .*safetensors is damaged"):
        load_checkpoint(saved)


def test_missing_shards_are_refused(saved):
    shutil.rmtree(shard_of(saved).parent)
    with pytest.raises(FormatError, match=r"checkpoint shard .*safetensors is missing"):
        load_checkpoint(saved)


def test_shard_that_one_process_cannot_read_is_refused_in_all(saved):
    """The other process, which reads no shard here, hears of it and does not wait for ever."""
    file = shard_of(saved)
    file.unlink()
    file.mkdir()  # cannot be read
    with pytest.raises(FileError, match=r"cannot read .*shards-8: Is a directory"):
        load_checkpoint(saved)
    heard = []

    class Rank(Parallel):
        def gathered(self, value):
            heard.append(value)
            return [heard[0], value]

    for rank in range(2):
        with pytest.raises(FileError, match=r"cannot read .*shards-8: Is a directory"):
            load_checkpoint(saved, Rank("fsdp", rank, 2))
    assert heard[1] == {}


def test_shards_that_cannot_be_read_back_are_removed(run, saved, monkeypatch):
    def fails(file, length):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sharded, "crc32_of", fails)
    with pytest.raises(FileError, match=r"cannot read .*shards-9: Input/output error"):
        run[2](saved, 9)
    monkeypatch.undo()
    assert folders(saved) == ["checkpoint.pt.shards-8"]
    assert load_checkpoint(saved).step == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shards": "elsewhere/shards"}, "is not complete: Invalid name 'elsewhere/shards'"),
        ({"shard_checksums": None}, "is not complete: 'NoneType' object is not iterable"),
        ({"shard_checksums": ...}, "is not complete: 'shard_checksums'"),
    ],
)
def test_checkpoint_that_does_not_say_where_its_shards_are_is_refused(saved, changes, message):
    content = torch.load(saved, weights_only=True) | changes
    kept = {name: value for name, value in content.items() if value is not ...}
    torch.save(kept, saved)
    with saved.open("r+b") as file:
        seal(file)
    with pytest.raises(FormatError, match=message):
        load_checkpoint(saved)


def test_shards_of_another_model_are_refused(saved):
    checkpoint = load_checkpoint(saved)
    larger = Transformer(checkpoint.model_config.__class__(d_model=64, num_layers=3))
    with pytest.raises(FormatError, match="does not fit"):
        checkpoint.build_optimizer(larger)
