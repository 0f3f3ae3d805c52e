"""Metrics survive kills and resumes, and become a picture."""

import json
import sys

import pytest
import torch

from tiny_llm.config import ModelConfig
from tiny_llm.errors import FormatError, MissingExtraError
from tiny_llm.metrics import MetricsLog, draw_loss_curve, read_metrics
from tiny_llm.throughput import device_peak, flops_per_token, peak_flops, peak_memory
from tiny_llm.transformer import Transformer


def test_rows_are_json_lines_without_what_is_not_known(tmp_path):
    log = MetricsLog(tmp_path, start_step=0)
    log.add(0, loss=5.5, mfu=None)
    log.add(1, loss=5.0, sample="text")
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 0, "loss": 5.5},
        {"step": 1, "loss": 5.0, "sample": "text"},
    ]


def test_resumed_log_drops_what_will_be_repeated_and_a_line_cut_off_by_a_kill(tmp_path):
    log = MetricsLog(tmp_path, start_step=0)
    for step in range(4):
        log.add(step, loss=float(step))
    with log.path.open("a") as file:
        file.write('{"step": 4, "lo')
    resumed = MetricsLog(tmp_path, start_step=2)
    resumed.add(2, loss=20.0)
    assert [(row["step"], row["loss"]) for row in read_metrics(log.path)] == [
        (0, 0.0),
        (1, 1.0),
        (2, 20.0),
    ]


def test_damaged_metrics_are_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\nnothing\n')
    with pytest.raises(FormatError, match=r"metrics\.jsonl line 2 is no row of metrics"):
        MetricsLog(tmp_path, start_step=1)


def test_loss_curve_is_a_png(tmp_path):
    rows = [{"step": 0, "loss": 5.0}, {"step": 1, "loss": 4.0, "eval_loss": 4.5}]
    draw_loss_curve(rows, tmp_path / "loss.png")
    content = (tmp_path / "loss.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 5000


def test_tensorboard_gets_the_numbers(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = MetricsLog(tmp_path, start_step=0, tensorboard=True)
    log.add(3, loss=2.5, sample="text")
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(3, 2.5)]


def test_tensorboard_without_its_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"install tiny-llm\[tensorboard\]"):
        MetricsLog(tmp_path, start_step=0, tensorboard=True)


def test_flops_follow_the_convention_for_tied_and_untied_heads(model_config):
    tied = ModelConfig(d_model=32, num_layers=2, num_heads=4, d_ff=48)
    untied = ModelConfig(d_model=32, num_layers=2, num_heads=4, d_ff=48, tie_embeddings=False)
    flops = [
        flops_per_token(config, Transformer(config).num_parameters(), 64)
        for config in (tied, untied)
    ]
    # the lookup of an untied embedding costs nothing
    assert flops[0] == flops[1]
    matrices = 257 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 48)
    norms = 5 * 32
    assert flops[0] == 6 * (matrices + norms) + 12 * 2 * 32 * 64


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H200", "bf16", 9.89e14),
        ("NVIDIA H100 80GB HBM3", "bf16", 9.89e14),
        ("NVIDIA H100 PCIe", "fp16", 7.56e14),
        ("NVIDIA A100-SXM4-80GB", "bf16", 3.12e14),
        ("NVIDIA A10", "bf16", 1.25e14),
        ("NVIDIA L4", "fp32", 3.03e13),
        ("NVIDIA GeForce GTX 1080", "fp32", None),
    ],
)
def test_peak_is_that_of_the_named_device_or_unknown(name, precision, peak):
    assert peak_flops(name, precision) == peak


def test_cpu_has_neither_a_known_peak_nor_a_memory_of_its_own():
    assert device_peak(torch.device("cpu"), "fp32") is None
    assert peak_memory(torch.device("cpu")) is None
