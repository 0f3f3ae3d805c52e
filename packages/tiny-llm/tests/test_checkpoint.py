"""A checkpoint continues a run exactly, or is refused."""

import resource
from dataclasses import replace

import pytest
import torch

from tiny_llm.checkpoint import checkpoint_path, load_checkpoint
from tiny_llm.errors import ConfigError, FileError, FormatError
from tiny_llm.optimizer import build_optimizer
from tiny_llm.saving import save_checkpoint
from tiny_llm.seal import TRAILER, seal
from tiny_llm.training import train_steps
from tiny_llm.transformer import Transformer


class Stopped(Exception):
    pass


@pytest.fixture
def run(model_config, training_config):
    """A fresh model with its optimizer, and a function that saves them."""
    torch.manual_seed(0)
    model = Transformer(model_config)
    optimizer = build_optimizer(model, training_config)

    def save(path, step, saved_model=model):
        save_checkpoint(
            path,
            model=saved_model,
            optimizer=optimizer,
            training_config=training_config,
            step=step,
            tokens_checksum=7,
        )

    return model, optimizer, save


@pytest.fixture
def saved(run, tmp_path):
    path = tmp_path / "checkpoint.pt"
    run[2](path, 0)
    return path


def seal_again(path):
    """Append the trailer that belongs to the file's content, as it is now."""
    with path.open("r+b") as file:
        seal(file)


def test_resumed_run_has_bitwise_the_losses_and_weights_of_an_uninterrupted_one(
    run, training_config, random_tokens, tmp_path
):
    model, optimizer, save = run
    whole = Transformer(model.config)
    whole.load_state_dict(model.state_dict())
    expected = train_steps(whole, random_tokens, training_config, device="cpu")

    path, first_losses = tmp_path / "checkpoint.pt", []

    def save_and_stop(step, loss):
        first_losses.append(loss)
        if step == 3:
            save(path, 4)
            raise Stopped

    with pytest.raises(Stopped):
        train_steps(
            model,
            random_tokens,
            training_config,
            device="cpu",
            optimizer=optimizer,
            on_step=save_and_stop,
        )
    checkpoint = load_checkpoint(path)
    resumed = checkpoint.build_model(device="cpu")
    losses = train_steps(
        resumed,
        random_tokens,
        checkpoint.training_config,
        device="cpu",
        start_step=checkpoint.step,
        optimizer=checkpoint.build_optimizer(resumed),
    )
    assert first_losses + losses == expected
    for name, weight in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], weight), name


def test_checkpoint_returns_what_was_saved(run, training_config, saved):
    model, _, save = run
    save(saved, 5)
    checkpoint = load_checkpoint(saved.parent)
    assert checkpoint.path == saved
    assert checkpoint.model_config == model.config
    assert checkpoint.training_config == training_config
    assert (checkpoint.step, checkpoint.tokens_checksum) == (5, 7)
    rebuilt = checkpoint.build_model(device="cpu", attention="sdpa")
    assert rebuilt.config == replace(model.config, attention="sdpa")
    assert rebuilt.head.weight is rebuilt.embedding.weight
    tokens = torch.randint(257, (1, 9))
    torch.testing.assert_close(rebuilt(tokens), model(tokens))


def test_checkpoint_of_a_wrapped_model_carries_no_wrapper_prefix(run, saved):
    model, _, save = run
    save(saved, 1, saved_model=torch.compile(model, backend="eager"))
    assert load_checkpoint(saved).model_state.keys() == model.state_dict().keys()


def test_another_module_is_refused(run, tmp_path):
    with pytest.raises(ConfigError, match="must be a Transformer, got Linear"):
        run[2](tmp_path / "checkpoint.pt", 0, saved_model=torch.nn.Linear(2, 2))
    assert list(tmp_path.iterdir()) == []


def test_any_damage_is_noticed(saved):
    content = saved.read_bytes()
    for position in range(0, len(content), 997):
        damaged = bytearray(content)
        damaged[position] ^= 1
        saved.write_bytes(damaged)
        with pytest.raises(FormatError, match=r"is damaged \(wrong checksum\)|not a tiny-llm"):
            load_checkpoint(saved)
    for length in (0, 5, TRAILER.size, len(content) // 2, len(content) - 1):
        saved.write_bytes(content[:length])
        with pytest.raises(FormatError, match="is not a tiny-llm checkpoint, or it is truncated"):
            load_checkpoint(saved)


def test_missing_checkpoint_is_refused_with_the_command_that_makes_it(tmp_path):
    expected = r"checkpoint\.pt does not exist; make it with tiny-llm train"
    with pytest.raises(FileError, match=expected):
        load_checkpoint(tmp_path)
    assert checkpoint_path(tmp_path / "other.pt") == tmp_path / "other.pt"


def test_archive_that_would_run_code_is_refused(tmp_path):
    path = tmp_path / "checkpoint.pt"
    torch.save({"format": Stopped}, path)
    seal_again(path)
    with pytest.raises(FormatError, match="holds no archive of plain tensors"):
        load_checkpoint(path)


def change(path, **changes):
    """Rewrite parts of a checkpoint and make its checksum right again."""
    content = torch.load(path, weights_only=True)
    torch.save({**content, **changes}, path)
    seal_again(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "tiny-llm checkpoint 1"}, "made by another version"),
        ({"model_config": {"d_model": 0}}, "is not complete: `d_model` must be at least 1, got 0"),
        ({"training_config": {"colour": "red"}}, r"is not complete: .* 'colour'"),
    ],
)
def test_checkpoint_of_another_make_is_refused(saved, changes, message):
    change(saved, **changes)
    with pytest.raises(FormatError, match=message):
        load_checkpoint(saved)


def test_loading_is_strict_about_names_and_shapes_of_weights(saved):
    state = load_checkpoint(saved).model_state
    state["extra.weight"] = state.pop("norm.weight")
    change(saved, model=state)
    with pytest.raises(FormatError, match="does not fit its own configuration") as caught:
        load_checkpoint(saved).build_model(device="cpu")
    assert "norm.weight" in str(caught.value)
    assert "extra.weight" in str(caught.value)


def test_foreign_optimizer_state_is_refused(saved):
    change(saved, optimizer={"colour": {"step": torch.tensor(1.0)}})
    checkpoint = load_checkpoint(saved)
    with pytest.raises(FormatError, match="optimizer state that does not fit"):
        checkpoint.build_optimizer(checkpoint.build_model(device="cpu"))


def test_remains_of_a_killed_save_are_ignored_and_removed_by_the_next(run, saved):
    remains = saved.with_name(".checkpoint.pt.tmp")
    remains.write_bytes(saved.read_bytes()[:1000])
    assert load_checkpoint(saved.parent).step == 0
    run[2](saved, 1)
    assert load_checkpoint(saved.parent).step == 1
    assert list(saved.parent.iterdir()) == [saved]


def test_full_disk_keeps_the_old_checkpoint_and_leaves_no_other(run, saved):
    before = saved.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # a write beyond this size fails as it does on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        with pytest.raises(FileError, match=r"cannot write .*: File too large"):
            run[2](saved, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(saved.parent.iterdir()) == [saved]
    assert saved.read_bytes() == before
