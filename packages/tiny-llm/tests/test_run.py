"""A run with everything switched on: what it writes, and that it goes on exactly."""

import importlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import tiny_llm
from tiny_llm import reporter, run_summary
from tiny_llm.bpe import BPETokenizer
from tiny_llm.checkpoint import load_checkpoint
from tiny_llm.cli import main, parse
from tiny_llm.data import open_tokens
from tiny_llm.errors import FormatError
from tiny_llm.metrics import read_metrics
from tiny_llm.settings_file import model_config, read_settings, write_settings

SMALL = ["--d-model", "16", "--num-layers", "1", "--num-heads", "2", "--d-ff", "16"]
SMALL += ["--seq-len", "16", "--batch-size", "4", "--device", "cpu"]
SOURCES = os.pathsep.join(
    [str(Path(tiny_llm.__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
)


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["prepare", "--out", "tokens.bin", "--max-bytes", "50000"]) == 0
    return tmp_path


def train(*arguments):
    return main(["train", "--tokens", "tokens.bin", *SMALL, *arguments])


def test_run_writes_configuration_metrics_evaluations_samples_and_a_picture(workdir, capsys):
    arguments = ["--eval-tokens", "tokens.bin", "--eval-every", "2", "--eval-batches", "2"]
    arguments += ["--sample-every", "3", "--sample-prompt", "def ", "--steps", "5"]
    assert train("--out", "run", *arguments) == 0
    out = capsys.readouterr().out
    assert "step 2: evaluation loss 5." in out
    assert re.search(r"^step 3: sample ['\"]def ", out, flags=re.MULTILINE)
    rows = read_metrics(workdir / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(5))
    assert [row["step"] for row in rows if "eval_loss" in row] == [1, 3, 4]
    assert [row["step"] for row in rows if "sample" in row] == [2]
    assert all(row["tokens_per_second"] > 0 for row in rows)
    assert "mfu" not in rows[0], "nobody knows a CPU's peak"
    assert (workdir / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    saved = read_settings(workdir / "run" / "config.toml")
    assert saved["run"]["sample_prompt"] == "def "
    assert saved["training"]["steps"] == 5


def test_summary_of_a_run_is_made_from_its_files(workdir, capsys):
    arguments = ["--eval-tokens", "tokens.bin", "--eval-batches", "1", "--steps", "3"]
    assert train("--out", "run", *arguments) == 0
    (workdir / "run" / "sample.txt").write_text("def f():\n    pass\n")
    (workdir / "page.md").write_text("before\n<!-- run -->\nold\n<!-- /run -->\nafter\n")
    run_summary.main(["run", "--into", "page.md"])
    page = (workdir / "page.md").read_text()
    rows = read_metrics(workdir / "run" / "metrics.jsonl")
    model = load_checkpoint("run").build_model(device="cpu")
    tokens = len(open_tokens("tokens.bin"))
    assert f"| device | cpu, torch {torch.__version__} |" in page
    assert f"| {model.num_parameters() / 1e6:.1f} million parameters: 1 layers" in page
    assert f"{tokens / 1e6:.1f} million tokens, each seen {3 * 64 / tokens:.1f} times" in page
    assert f"| training loss | {rows[-1]['loss']:.2f} nats per token at the end |" in page
    assert f"| held-out text | {rows[-1]['eval_loss']:.2f} nats per token" in page
    assert "(run/loss.png)" in page
    assert "```text\ndef f():\n    pass\n```\n<!-- /run -->\nafter" in page
    assert "old" not in page
    with pytest.raises(FormatError, match="must have one pair"):
        run_summary.replaced("no markers", "text")


def write_run(folder, rates, **facts):
    folder.mkdir()
    rows = [json.dumps({"step": n, "tokens_per_second": r}) + "\n" for n, r in enumerate(rates)]
    (folder / "metrics.jsonl").write_text("".join(rows))
    (folder / "run.json").write_text(json.dumps({"device": "abacus", **facts}))
    (folder / "config.toml").write_text("[training]\nbatch_size = 8\nseq_len = 16\n")


def test_runs_are_compared_by_the_median_speed_of_their_second_half(tmp_path, capsys):
    one, two, other = folders = [tmp_path / name for name in ("one", "two", "other")]
    write_run(one, [1, 5000, 2000, 2010, 9000, 1000])
    write_run(two, [1, 1, 3015, 3015])
    write_run(other, [1, 1], device="slide rule")
    run_summary.main([str(one), str(two)])
    assert capsys.readouterr().out.splitlines() == [
        "| run | sequences a step | tokens/s | against one |",
        "| --- | --- | --- | --- |",
        "| one | 8 of 16 tokens | 2,010 | 1.00× |",
        "| two | 8 of 16 tokens | 3,015 | 1.50× |",
    ]
    page = tmp_path / "page.md"
    page.write_text("<!-- runs -->\nold\n<!-- /runs -->\n")
    run_summary.main([str(one), str(two), "--into", str(page)])
    assert page.read_text().count("| two |") == 1
    assert "old" not in page.read_text()
    with pytest.raises(FormatError, match="the two do not compare"):
        run_summary.comparison(folders)


def test_reporting_changes_no_loss(workdir):
    assert train("--out", "quiet", "--steps", "4") == 0
    loud = ["--eval-tokens", "tokens.bin", "--eval-every", "1", "--sample-every", "1"]
    assert train("--out", "loud", "--steps", "4", *loud) == 0
    losses = [
        [row["loss"] for row in read_metrics(workdir / run / "metrics.jsonl")]
        for run in ("quiet", "loud")
    ]
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_run_killed_at_any_moment_resumes_to_the_very_bits_of_an_uninterrupted_one(
    workdir, precision
):
    steps = 150
    settings = ["--steps", str(steps), "--precision", precision, "--micro-batches", "2"]
    settings += ["--schedule", "wsd", "--checkpoint-every", "1"]
    command = [sys.executable, "-m", "tiny_llm", "train", "--tokens", "tokens.bin"]
    process = subprocess.Popen(
        [*command, *SMALL, "--out", "cut", *settings],
        env={**os.environ, "PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )
    # a checkpoint after each step: the kill falls into a save more often than not
    deadline = time.monotonic() + 60
    while not (workdir / "cut" / "checkpoint.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    done = load_checkpoint("cut").step
    assert 0 < done < steps

    short = ["--steps", str(steps), "--checkpoint-every", "1000"]
    assert main(["resume", "--out", "cut", *short]) == 0
    assert train("--out", "whole", *settings, "--checkpoint-every", "1000") == 0
    whole, resumed = load_checkpoint("whole"), load_checkpoint("cut")
    assert resumed.step == whole.step == steps
    assert resumed.scaler_state == whole.scaler_state
    for name, weight in whole.model_state.items():
        assert torch.equal(resumed.model_state[name], weight), name
    for name, values in whole.optimizer_state.items():
        for key, value in values.items():
            assert torch.equal(resumed.optimizer_state[name][key], value), (name, key)
    losses = [
        [(row["step"], row["loss"]) for row in read_metrics(workdir / run / "metrics.jsonl")]
        for run in ("cut", "whole")
    ]
    assert losses[0] == losses[1]


def test_full_disk_in_the_middle_is_survived_and_at_the_end_reported(workdir, capsys, monkeypatch):
    saves = []
    real_save = reporter.save_checkpoint

    def save_on_a_disk_full_at_first(path, **settings):
        saves.append(settings["step"])
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if settings["step"] in full_at:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            real_save(path, **settings)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    monkeypatch.setattr(reporter, "save_checkpoint", save_on_a_disk_full_at_first)
    full_at = {2}
    assert train("--out", "run", "--steps", "4", "--checkpoint-every", "1") == 0
    assert saves == [1, 2, 3, 4]
    assert "going on, the checkpoint before is still there" in capsys.readouterr().out
    assert load_checkpoint("run").step == 4

    full_at = {6}
    assert main(["resume", "--out", "run", "--steps", "6"]) == 2
    assert "cannot write run/checkpoint.pt: File too large" in capsys.readouterr().err
    assert load_checkpoint("run").step == 5


def test_values_come_from_defaults_preset_file_and_command_line_in_this_order(workdir):
    (workdir / "run.toml").write_text(
        'tokens = "tokens.bin"\n[training]\nsteps = 7\nseed = 3\n[model]\nd_ff = 99\n'
        '[model.attention]\n"0" = "eager"\n"*" = "sdpa"\n'
    )
    arguments = ["--preset", "10m", "--config", "run.toml", "--out", "n", "--seed", "4"]
    options = parse("train", arguments)
    assert options.tokens == "tokens.bin"
    assert (options.training.steps, options.training.seed) == (7, 4)
    assert options.training.batch_size == 16
    model = model_config(options, vocab_size=300)
    assert (model.d_model, model.d_ff) == (320, 99)
    assert (model.vocab_size, model.max_seq_len) == (300, 128)
    assert [model.attention_at(layer) for layer in range(2)] == ["eager", "sdpa"]

    write_settings(workdir / "copy.toml", options)
    again = parse("train", ["--config", "copy.toml"])
    assert (again.model, again.training, again.run) == (
        options.model,
        options.training,
        options.run,
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[training]\ncolour = 1", "run.toml has an unknown setting 'training.colour'"),
        ("training = 3", "run.toml: 'training' cannot be 3"),
        ("a = [", "run.toml is no TOML"),
        ("[training]\nsteps = -1", "`steps` must be at least 1, got -1"),
    ],
)
def test_wrong_configuration_file_is_one_line(workdir, capsys, content, message):
    (workdir / "run.toml").write_text(content)
    assert main(["train", "--config", "run.toml"]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_tokenizer_goes_from_prepare_to_the_run_to_the_text(workdir, capsys):
    assert main(["prepare", "tokens.bin", "--out", "bpe.bin", "--vocab-size", "300"]) == 0
    tokenizer = BPETokenizer.load("bpe.tokenizer.json")
    assert open_tokens("bpe.bin").tokenizer_checksum == tokenizer.checksum
    assert main(["train", "--tokens", "bpe.bin", "--out", "run", "--steps", "2", *SMALL]) == 0
    capsys.readouterr()
    arguments = ["--checkpoint", "run", "--prompt", "né", "--max-new-tokens", "3"]
    assert main(["generate", *arguments, "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("né")
    # tokens of another tokenizer, for evaluation or in place of the run's own
    evaluation = ["eval", "--checkpoint", "run", "--device", "cpu", "--tokens"]
    assert main([*evaluation, "tokens.bin"]) == 2
    assert "tokens.bin was made with another tokenizer" in capsys.readouterr().err
    assert main([*evaluation, "bpe.bin", "--max-batches", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_tokens"] == 16 * 16
    Path("bpe.tokenizer.json").unlink()
    assert main(["train", "--tokens", "bpe.bin", "--out", "other", *SMALL]) == 2
    assert "name its file with --tokenizer" in capsys.readouterr().err


def test_shards_are_trained_on_like_a_file(workdir):
    shards = ["--max-bytes", "50000", "--shard-tokens", "9000"]
    assert main(["prepare", "--out", "shards", *shards]) == 0
    assert train("--out", "one", "--steps", "3") == 0
    assert main(["train", "--tokens", "shards", "--out", "many", "--steps", "3", *SMALL]) == 0
    one, many = load_checkpoint("one"), load_checkpoint("many")
    for name, weight in one.model_state.items():
        assert torch.equal(many.model_state[name], weight), name


def test_chat_continues_each_line_and_info_describes(workdir, capsys, monkeypatch):
    assert train("--out", "run", "--steps", "1") == 0
    capsys.readouterr()
    arguments = ["--checkpoint", "run", "--device", "cpu", "--max-new-tokens", "4"]
    monkeypatch.setattr("sys.stdin", iter(["hello\n", "again\n"]))
    monkeypatch.setattr("tiny_llm.talking._is_terminal", lambda: False)
    assert main(["chat", *arguments]) == 0
    assert len(capsys.readouterr().out) >= 2
    assert main(["info", "run", "tokens.bin"]) == 0
    out = capsys.readouterr().out
    assert "run/checkpoint.pt: step 1, " in out
    assert "batch_size = 4" in out
    assert "tokens in" in out
    assert main(["info"]) == 0
    assert f"torch {torch.__version__}" in capsys.readouterr().out


def test_attention_is_explained_as_a_table_and_as_json(capsys):
    request = ["attention", "explain", "--device", "cpu", "--dtype", "float32"]
    assert main(request) == 0
    assert "choice: auto -> sdpa" in capsys.readouterr().out
    assert main([*request, "--json", "--choice", "eager"]) == 0
    assert json.loads(capsys.readouterr().out)["chosen"] == "eager"


def test_attention_that_ran_is_recorded_and_a_silent_change_is_refused(
    workdir, capsys, monkeypatch
):
    assert train("--out", "run", "--steps", "1", "--attention", "auto") == 0
    assert load_checkpoint("run").attention == ("sdpa",)
    rules = importlib.import_module("tiny_llm.attention.resolve")
    monkeypatch.setattr(rules, "AUTO_ORDER_ELSEWHERE", ("eager",))
    resume = ["resume", "--out", "run", "--steps", "2"]
    assert main(resume) == 2
    expected = "the run had attention sdpa, here --attention auto comes to eager"
    assert expected in capsys.readouterr().err
    assert main([*resume, "--attention", "eager"]) == 0
    assert load_checkpoint("run").attention == ("eager",)
