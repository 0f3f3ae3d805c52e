import json
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_bench.case import Case
from attn_bench.cli import main
from attn_bench.errors import InputError
from attn_bench.peer_step import load_peer
from attn_bench.policy import policy_of
from attn_bench.results import Results, Row, read_results, saving
from attn_bench.step_shape import StepShape
from attn_bench.train_step import Step, predicted, time_training
from flash_kernel import attention_reference
from tiny_llm import attention
from tiny_llm.attention import AttentionRequest
from tiny_llm.attention.policy import read_policy
from tiny_llm.config import PRESETS, ModelConfig
from tiny_llm.transformer import Transformer

MODEL = ModelConfig(d_model=64, num_layers=3, num_heads=2)
SHAPE = StepShape(MODEL, batch_size=1, steps=2, dtype="fp32")
SMALL = ["--d-model", "32", "--layers", "1", "--heads", "1", "--batch", "1", "--seqlen", "16"]
CASE = SHAPE.case(16)


def step(provider: str, milliseconds: float, attention_ms: float, *losses: float) -> Step:
    row = Row("train_step", provider, CASE, "ok", median_ms=milliseconds)
    return Step(row, attention_ms, losses)


def test_a_step_is_predicted_from_what_is_not_attention() -> None:
    first = step("eager", 10.0, 2.0, 5.0, 4.0)
    other = predicted(step("flash", 7.5, 1.0, 5.0, 4.0), first, SHAPE)
    assert other.row.predicted_ms == pytest.approx(10 - 3 * 2 + 3 * 1)
    assert other.row.state == "ok"
    assert predicted(first, first, SHAPE).row.predicted_ms == pytest.approx(10.0)


def test_a_backend_whose_losses_differ_is_wrong_and_has_no_time() -> None:
    first = step("eager", 10.0, 2.0, 5.0, 4.0)
    for losses in ((5.0, 4.001), (5.0, float("nan"))):
        other = predicted(step("flash", 7.0, 1.0, *losses), first, SHAPE)
        assert other.row.state == "wrong"
        assert other.row.median_ms is None
        assert "losses differ from eager's by" in other.row.detail
    half = predicted(step("flash", 7.0, 1.0, 5.0, 4.001), first, replace(SHAPE, dtype="bf16"))
    assert half.row.state == "ok"


def test_train_step_times_every_backend_and_saves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "steps.jsonl"
    run = ["--steps", "2", "--device", "cpu", "--save", str(path)]
    assert main(["train-step", *SMALL, *run]) == 0
    out = capsys.readouterr().out
    assert "predicted ms" in out
    rows = read_results(path).rows
    assert [(row.provider, row.state) for row in rows] == [
        *(("eager", "ok"), ("sdpa", "ok"), ("flash", "ok"))
    ]
    assert rows[0].predicted_ms == pytest.approx(rows[0].median_ms)


PEER = """
from torch import nn

class Peer(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab_size, 8), nn.Linear(8, vocab_size)

    def forward(self, tokens, targets):
        logits = self.head(self.embedding(tokens))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

def make_model(seq_len, vocab_size):
    return Peer(vocab_size)
"""


def test_a_peers_step_is_timed_in_the_same_run_and_predicts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, saved = tmp_path / "tinypeer.py", tmp_path / "steps.jsonl"
    file.write_text(PEER)
    run = ["--backend", "eager", "--peer", str(file), "--steps", "2", "--device", "cpu"]
    assert main(["train-step", *SMALL, *run, "--save", str(saved)]) == 0
    ours, peers = read_results(saved).rows
    assert (peers.provider, peers.state, peers.predicted_ms) == ("tinypeer", "ok", None)
    assert peers.case == ours.case
    assert peers.semantics["parameters"] == 257 * 8 + 257 * 8 + 257
    assert peers.semantics["model"] == "a peer's"
    assert "tinypeer" in capsys.readouterr().out


def test_a_peers_weights_are_trained(tmp_path: Path) -> None:
    file = tmp_path / "tinypeer.py"
    file.write_text(PEER)
    _, prepare = load_peer(file)
    peer = prepare(SHAPE, 16, torch.device("cpu"))
    tokens = peer.step.prepare()
    for _ in range(5):
        peer.step.run(tokens)
    assert peer.losses == sorted(peer.losses, reverse=True)
    assert peer.losses[0] == pytest.approx(5.7, abs=0.5)  # ln 257 = 5.5 is a blind guess


def test_a_peer_that_makes_no_model_is_a_row_and_the_others_go_on(tmp_path: Path) -> None:
    peer, saved = tmp_path / "broken.py", tmp_path / "steps.jsonl"
    peer.write_text("def make_model(seq_len, vocab_size):\n    raise RuntimeError('no weights')\n")
    run = ["--backend", "eager", "--peer", str(peer), "--steps", "2", "--device", "cpu"]
    assert main(["train-step", *SMALL, *run, "--save", str(saved)]) == 1
    ours, failed = read_results(saved).rows
    assert (ours.provider, ours.state) == ("eager", "ok")
    assert (failed.provider, failed.state) == ("broken", "error")
    assert failed.detail == "RuntimeError: no weights"
    assert failed.median_ms is None


def test_peers_and_backends_of_one_name_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a/gpt.py", "b/gpt.py", "b/sdpa.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(PEER)
    for names in (("a/gpt.py", "b/gpt.py"), ("b/sdpa.py",)):
        files = [str(tmp_path / name) for name in names]
        assert main(["train-step", *SMALL, "--device", "cpu", "--peer", *files]) == 2
        expected = f"--peer {files[-1]} would share the name {Path(files[-1]).stem!r}"
        assert expected in capsys.readouterr().err


def test_a_peer_imports_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside_the_peer.py").write_text(PEER)
    file, path = tmp_path / "tinypeer.py", list(sys.path)
    file.write_text("from beside_the_peer import make_model\n")
    _, prepare = load_peer(file)
    assert prepare(SHAPE, 16, torch.device("cpu")).model.get_parameter("head.bias").shape == (257,)
    assert sys.path == path


def test_a_file_that_makes_no_model_is_no_peer(tmp_path: Path) -> None:
    file = tmp_path / "empty.py"
    file.write_text("")
    with pytest.raises(InputError, match="must define make_model"):
        load_peer(file)
    with pytest.raises(InputError, match="takes a file of Python code"):
        load_peer(tmp_path / "absent.py")


def test_train_step_fails_on_a_backend_that_forgets_the_mask(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def forgets(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
        return attention_reference(q, k, v, is_causal=False)[0]

    attention.register("forgets", forgets)
    try:
        run = ["--backend", "eager", "forgets", "--steps", "2", "--device", "cpu"]
        assert main(["train-step", *SMALL, *run]) == 1
    finally:
        attention.unregister("forgets")
    assert "losses differ from eager's by" in capsys.readouterr().out
    assert main(["train-step", "--backend", "forgets", "--device", "cpu"]) == 2
    assert "unknown attention 'forgets'" in capsys.readouterr().err


def test_a_backend_that_raises_is_a_row_and_the_others_go_on(tmp_path: Path) -> None:
    def raises(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
        raise RuntimeError("illegal memory access")

    path = tmp_path / "steps.jsonl"
    attention.register("raises", raises)
    try:
        run = ["--backend", "eager", "raises", "sdpa", "--steps", "2", "--device", "cpu"]
        assert main(["train-step", *SMALL, *run, "--save", str(path)]) == 1
    finally:
        attention.unregister("raises")
    rows = read_results(path).rows
    assert [row.state for row in rows] == ["ok", "error", "ok"]
    assert rows[1].detail == "RuntimeError: illegal memory access"


def test_what_a_failed_backend_held_is_free_for_the_others() -> None:
    held: list[weakref.ref[Tensor]] = []

    def raises(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
        scores = q @ k.mT
        held.append(weakref.ref(scores))
        raise torch.OutOfMemoryError("too many scores")

    def sees(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
        assert held[0]() is None
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    attention.register("raises", raises)
    attention.register("sees", sees)
    try:
        found = time_training(SHAPE, [16], ["sdpa", "raises", "sees"], torch.device("cpu"))
    finally:
        attention.unregister("raises")
        attention.unregister("sees")
    assert [each.row.state for each in found] == ["ok", "oom", "ok"]


def timed(provider: str, mode: str, n: int, milliseconds: float) -> Row:
    case = Case("bf16", 1, 16, n, n, 64, True, mode)
    return Row("flash_attention", provider, case, "ok", median_ms=milliseconds)


ROWS = (
    timed("sdpa", "fwd", 512, 1.0),
    timed("sdpa", "bwd", 512, 4.0),
    timed("flash-auto", "fwd", 512, 2.0),
    timed("flash-auto", "bwd", 512, 2.0),
    timed("sdpa", "fwd+bwd", 4096, 8.0),
    timed("flash-auto", "fwd+bwd", 4096, 9.0),
    timed("dense-eager", "fwd+bwd", 4096, 1.0),  # no backend of tiny-llm
    timed("sdpa-cudnn", "fwd+bwd", 4096, 8.5),
    timed("flex", "fwd+bwd", 128, 1.0),
)


def test_the_policy_orders_backends_by_forward_and_backward_together() -> None:
    policy = policy_of(Results({"device": "a GPU"}, ROWS))
    short, long = policy["classes"]
    assert (short["max_seqlen"], short["prefer"]) == (512, ["flash", "sdpa"])
    assert short["milliseconds"] == {"flash": 4.0, "sdpa": 5.0}
    assert (long["max_seqlen"], long["prefer"]) == (4096, ["sdpa", "sdpa-cudnn", "flash"])
    assert policy["device"] == "a GPU"


def test_policy_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, policy = tmp_path / "r.jsonl", tmp_path / "policy.json"
    with saving(path, {"device": "a GPU", "device_type": "cuda"}) as save:
        for row in ROWS:
            save(row)
    assert main(["policy", str(path), "--into", str(policy)]) == 0
    assert json.loads(policy.read_text())["kind"] == "attention-policy"
    # what tiny-llm's choice `policy:FILE` makes of it
    request = AttentionRequest(
        num_heads=16, head_dim=64, seqlen_k=600, device="cuda", dtype="bfloat16"
    )
    if not torch.cuda.is_available():
        assert read_policy(str(policy)).order(request) == ("sdpa", "sdpa-cudnn", "flash")
    assert main(["policy", str(path)]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(policy.read_text())


def test_one_backend_is_no_policy() -> None:
    with pytest.raises(InputError, match="no case has times of two backends"):
        policy_of(Results({}, ROWS[:2]))


def test_a_preset_is_trained_with_its_own_shape_and_a_number_of_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "steps.jsonl"
    arguments = ["--preset", "toy", "--tokens", "64", "--seqlen", "16", "32", "--loss-chunk", "20"]
    arguments += ["--backend", "sdpa", "--steps", "5", "--device", "cpu", "--save", str(path)]
    assert main(["train-step", *arguments]) == 0
    header = capsys.readouterr().out.splitlines()[1]
    assert header == (
        "tiny-llm toy: 4 layers, d_model 128, 4 heads, vocabulary 257; 64 tokens a step, fp32; "
        "loss in chunks of 20 tokens, 5 timed steps"
    )
    short, long = read_results(path).rows
    assert (short.case.batch, long.case.batch) == (4, 2)
    assert short.semantics["parameters"] == Transformer(PRESETS["toy"]).num_parameters()
    assert short.semantics["loss_chunk"] == 20
    assert short.first_call_ms is not None


def test_tokens_per_second_are_those_of_the_whole_batch() -> None:
    row = replace(step("sdpa", 8.0, 1.0).row, case=replace(CASE, batch=3, seqlen_q=16))
    assert Step(row, 1.0, ()).tokens_per_second == pytest.approx(3 * 16 / 8e-3)
    assert Step(row.failed("oom", "x"), 1.0, ()).tokens_per_second is None
