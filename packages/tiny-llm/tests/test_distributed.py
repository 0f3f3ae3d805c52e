"""Two processes do what one does, under DDP and FSDP2, with gloo on the CPU."""

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tiny_llm
from tiny_llm.checkpoint import load_checkpoint
from tiny_llm.config import TrainingConfig
from tiny_llm.distributed import SINGLE, Parallel, local_device, process_group
from tiny_llm.errors import ConfigError
from tiny_llm.loss import LanguageModelLoss, count_targets
from tiny_llm.training import check_rows

WORKER = Path(__file__).with_name("distributed_worker.py")
SOURCES = os.pathsep.join(
    [str(Path(tiny_llm.__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
)
KINDS = ("ddp", "fsdp")
# gloo's first connection between two processes of one machine is now and then refused, before
# anything of ours runs; the worker notes when it is past that, and then nothing is tried again
CONNECTION_ATTEMPTS = 6


def load_worker():
    spec = importlib.util.spec_from_file_location("distributed_worker", WORKER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


worker = load_worker()


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """What one process does, and the folder it saved its checkpoint in."""
    folder = tmp_path_factory.mktemp("distributed")
    worker.train_half_and_save(SINGLE, folder / "none.pt")
    return {"trained": worker.trained(SINGLE), "clipped": worker.clipped_step(SINGLE)}, folder


def run_together(command, log):
    """Run a command and end what it started; return its status, None if it hung, and its errors."""
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout=90)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status = None
            process.wait()
    return status, log.read_text()


needs_two = pytest.mark.slow  # two processes, each with a torch of its own


def processes(number, folder, part):
    """Start `number` workers with torchrun and return what they found."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(number), str(WORKER), str(folder), part]
    for _ in range(CONNECTION_ATTEMPTS):
        status, errors = run_together(command, folder / "stderr.txt")
        if status == 0 or len(list(folder.glob("connected-*"))) == number:
            break
    assert status == 0, errors[-3000:]
    for each in folder.glob("connected-*"):
        each.unlink()
    return torch.load(folder / f"{part}.pt", weights_only=True)


@pytest.fixture(scope="module")
def two(one):
    """What two processes do, by kind; one start of torchrun serves all tests."""
    return processes(2, one[1], "run")


@pytest.fixture(scope="module")
def three(one, two):
    """What three processes make of the checkpoints of two, by kind."""
    return processes(3, one[1], "resume")


@needs_two
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_have_the_losses_and_weights_of_one(kind, one, two):
    found, expected = two[kind]["trained"], one[0]["trained"]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=1e-3, atol=1e-4)


@needs_two
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_is_clipped_after_the_all_reduce(kind, one, two):
    moved, expected = two[kind]["clipped"], one[0]["clipped"]
    norm = torch.stack([value.double().norm() for value in moved.values()]).norm()
    # the tied head is listed twice among the weights
    tied = moved["head.weight"].double().norm()
    assert (norm**2 - tied**2).sqrt().item() == pytest.approx(0.01, rel=1e-3)
    # clipping each process's own gradient first would turn the direction
    for name, step in expected.items():
        torch.testing.assert_close(moved[name], step, rtol=1e-3, atol=1e-6)


def test_clipping_before_the_all_reduce_would_be_noticed():
    """Two processes that clip first do not move as one: what the test above would then see."""
    model = worker.new_model(SINGLE)
    batch = worker.batch_at(0, worker.TOKENS, worker.CONFIG)
    share = 2 / count_targets(batch[1])
    moved = {}
    for rows in zip(*(each.tensor_split(2) for each in batch), strict=True):
        model.zero_grad()
        (LanguageModelLoss(model)(*rows) * share).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        for name, parameter in model.named_parameters():
            moved[name] = moved.get(name, 0) + parameter.grad / 2
    expected = worker.clipped_step(SINGLE)
    assert not all(
        torch.allclose(step, expected[name], rtol=1e-3, atol=1e-6) for name, step in moved.items()
    )


@needs_two
@pytest.mark.parametrize("kind", KINDS)
def test_resumed_processes_go_on_exactly(kind, two):
    result = two[kind]
    assert result["first_half"] + result["resumed"]["losses"] == result["trained"]["losses"]
    for name, weight in result["trained"]["weights"].items():
        assert torch.equal(result["resumed"]["weights"][name], weight), name


@needs_two
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_of_two_processes_goes_on_in_one(kind, one, two):
    checkpoint = load_checkpoint(one[1] / f"{kind}.pt")
    assert checkpoint.step == worker.HALF
    resumed = worker.resume(SINGLE, one[1] / f"{kind}.pt")
    expected = one[0]["trained"]["losses"]
    assert resumed["losses"] == pytest.approx(expected[worker.HALF :], rel=1e-5)


@needs_two
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_of_two_processes_goes_on_in_three(kind, one, three):
    expected = one[0]["trained"]["losses"]
    assert three[kind]["losses"] == pytest.approx(expected[worker.HALF :], rel=1e-5)


@needs_two
def test_each_process_saves_its_own_shard(one, two):
    folder = one[1] / f"fsdp.pt.shards-{worker.HALF}"
    sizes = [shard.stat().st_size for shard in folder.glob("*.safetensors")]
    assert len(sizes) == 2
    assert max(sizes) < 1.1 * min(sizes)
    assert (one[1] / "fsdp.pt").stat().st_size < min(sizes)


@needs_two
def test_full_disk_of_one_process_is_heard_by_all_and_keeps_the_checkpoint_before(one, two):
    assert "File too large" in two["fsdp"]["full_disk"]
    assert load_checkpoint(one[1] / "fsdp.pt").step == worker.HALF
    assert len(list(one[1].glob("fsdp.pt.shards-*"))) == 1


@needs_two
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_of_one_process_goes_on_in_two(kind, one, two):
    expected = one[0]["trained"]["losses"]
    assert two[kind]["from_one"]["losses"] == pytest.approx(expected[worker.HALF :], rel=1e-5)


@needs_two
@pytest.mark.parametrize("kind", KINDS)
def test_processes_agree_only_if_all_are_fine(kind, two):
    assert two[kind]["agreed"] == [True, False]


def test_parallelism_without_torchrun_is_refused(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with (
        pytest.raises(ConfigError, match="--parallel fsdp needs torchrun"),
        process_group("fsdp", torch.device("cpu")),
    ):
        pass
    with process_group("auto", torch.device("cpu")) as parallel:
        assert parallel == SINGLE


def test_one_process_of_many_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with (
        pytest.raises(ConfigError, match="--parallel none is for one process, torchrun started 2"),
        process_group("none", torch.device("cpu")),
    ):
        pass


def test_each_process_takes_its_own_gpu(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert local_device("cuda") == "cuda:3"
    assert local_device("cpu") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert local_device("auto") == "cuda:3"


def test_batch_too_small_for_the_processes_is_refused():
    config = TrainingConfig(batch_size=7, micro_batches=4)
    with pytest.raises(ConfigError, match=r"at least processes \* micro_batches = 2 \* 4, got 7"):
        check_rows(config, Parallel("ddp", 0, 2))
    with pytest.raises(ConfigError, match="precision 'fp16' is not for fsdp"):
        check_rows(TrainingConfig(precision="fp16"), Parallel("fsdp", 0, 2))
