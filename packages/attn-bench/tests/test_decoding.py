from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from attn_bench.cli import main
from attn_bench.decoding import DecodingShape, bytes_per_step
from attn_bench.results import read_results
from tiny_llm import attention
from tiny_llm.attention.eager import scaled_dot_product_attention
from tiny_llm.config import ModelConfig
from tiny_llm.transformer import Transformer

SMALL = ["generate", "--d-model", "32", "--layers", "1", "--heads", "2", "--context", "16"]
SMALL += ["--steps", "5", "--device", "cpu"]


def test_a_step_reads_the_weights_and_the_cache_once() -> None:
    model = ModelConfig(d_model=32, num_layers=3, num_heads=4, num_kv_heads=2, d_ff=64)
    shape = DecodingShape("a model", model, "bf16", 5)
    count = Transformer(model).num_parameters()
    cache = 2 * (3 * 5 * 2 * 100 * 8)  # k and v: layers, batch, heads, context, head_dim
    assert bytes_per_step(shape, count, shape.case(5, 100)) == 2 * (count + cache)
    # an embedding of its own is looked up
    untied = replace(shape, model=replace(model, tie_embeddings=False))
    count = Transformer(untied.model).num_parameters()
    expected = 2 * (count - 257 * 32 + cache)
    assert bytes_per_step(untied, count, shape.case(5, 100)) == expected


def test_generate_checks_and_times_a_models_decoding_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "decoding.jsonl"
    arguments = ["--batch", "1", "3", "--backend", "sdpa", "eager", "--save", str(path)]
    assert main([*SMALL, *arguments]) == 0
    assert "tokens/s" in capsys.readouterr().out
    rows = read_results(path).rows
    assert [(row.provider, row.case.batch, row.state) for row in rows] == [
        ("sdpa, eager", 1, "ok"),
        ("eager, eager", 1, "ok"),
        ("sdpa, eager", 3, "ok"),
        ("eager, eager", 3, "ok"),
    ]
    for row in rows:
        assert 0 <= row.errors["logits"] <= row.bounds["logits"]
        assert row.case.seqlen_k == 16
        moved = row.gb_s and row.gb_s * 1e9 * (row.median_ms or 0) * 1e-3
        parameters = row.semantics["parameters"]
        assert moved == pytest.approx(4 * (parameters + 2 * row.case.batch * 16 * 32))


def test_a_wrong_decoding_is_not_timed_and_a_refused_one_is_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def looks_one_back(
        q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, key_lengths: Tensor | None = None
    ) -> Tensor:
        lengths = None if key_lengths is None else key_lengths - 1
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal, key_lengths=lengths)

    attention.register("looks-one-back", looks_one_back)
    path = tmp_path / "decoding.jsonl"
    try:
        backends = ["--backend", "looks-one-back", "flex", "sdpa", "--save", str(path)]
        decode = ["--decode", "eager", "graph"]
        assert main([*SMALL, *backends, *decode]) == 1
    finally:
        attention.unregister("looks-one-back")
    states = {row.provider: row for row in read_results(path).rows}
    wrong = states["looks-one-back, eager"]
    assert wrong.state == "wrong"
    assert wrong.median_ms is None
    assert "logits are off by" in wrong.detail
    assert states["flex, eager"].state == "unsupported"
    assert states["sdpa, graph"].state == "unsupported"
    assert "needs a CUDA device" in states["sdpa, graph"].detail
    assert states["sdpa, eager"].state == "ok"


@pytest.mark.gpu
def test_a_captured_step_on_a_gpu_is_right_and_timed(tmp_path: Path) -> None:
    path = tmp_path / "decoding.jsonl"
    arguments = ["--d-model", "256", "--layers", "2", "--heads", "2", "--context", "300"]
    arguments += ["--decode", "eager", "graph", "--steps", "5", "--save", str(path)]
    assert main(["generate", *arguments]) == 0
    rows = read_results(path).rows
    assert {row.provider for row in rows} == {
        *("sdpa, eager", "sdpa, graph", "flash, eager", "flash, graph")
    }
    for row in rows:
        assert row.state in ("ok", "unstable"), row.detail
        assert row.is_performance
