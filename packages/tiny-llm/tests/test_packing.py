"""Documents in one sequence do not see each other, whatever the backend."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tiny_llm import attention
from tiny_llm.batches import positions_in_documents
from tiny_llm.cache import KVCache
from tiny_llm.data import prepare_shards, prepare_tokens
from tiny_llm.errors import AttentionUnavailable, ConfigError
from tiny_llm.evaluation import evaluate
from tiny_llm.loss import next_token_loss
from tiny_llm.packing import Packing
from tiny_llm.tokenizer import ByteTokenizer
from tiny_llm.training import Stepper, batch_at, build_scaler, positions_at, train_steps
from tiny_llm.transformer import Transformer

# ids 0 to 4, 5 to 6, 7 to 15 and 16 to 46 with the ends of the documents
DOCUMENTS = (b"abcd", b"e", b"fghijklm", b"The quick brown fox jumps over")


@pytest.fixture
def tokens(tmp_path):
    for index, text in enumerate(DOCUMENTS):
        (tmp_path / f"{index}.txt").write_bytes(text)
    return prepare_tokens(sorted(tmp_path.glob("*.txt")), tmp_path / "t.bin", ByteTokenizer())


def test_positions_restart_with_each_document(tokens):
    found = positions_in_documents(tokens, [0, 3, 5, 20], seq_len=8)
    assert found.tolist() == [
        [0, 1, 2, 3, 4, 0, 1, 0],
        [0, 1, 0, 1, 0, 1, 2, 3],
        [0, 1, 0, 1, 2, 3, 4, 5],
        [0, 1, 2, 3, 4, 5, 6, 7],
    ]


def test_positions_in_shards_are_those_in_one_file(tokens, tmp_path):
    files = sorted(tmp_path.glob("*.txt"))
    shards = prepare_shards(files, tmp_path / "shards", ByteTokenizer(), shard_tokens=6)
    starts = list(range(len(tokens) - 9))
    one, many = (positions_in_documents(each, starts, seq_len=9) for each in (tokens, shards))
    assert torch.equal(one, many)


def test_documents_begin_at_every_zero_and_with_every_row():
    packing = Packing.from_positions(torch.tensor([[0, 1, 0, 1], [0, 1, 2, 0]]))
    assert packing.document_ids.tolist() == [[1, 1, 2, 2], [1, 1, 1, 2]]
    assert packing.cu_seqlens.tolist() == [0, 2, 4, 7, 8]
    assert packing.cu_seqlens.dtype == torch.int32


@pytest.mark.parametrize("name", ["eager", "sdpa", "flash"])
def test_packed_documents_have_the_logits_of_each_alone(name, model_config):
    if attention.backend(name).reasons(
        attention.AttentionRequest(num_heads=4, head_dim=8, device="cpu", packed=True)
    ):
        pytest.skip(f"{name} cannot do this here")
    model = Transformer(replace(model_config, attention=name, sliding_window=5)).double()
    lengths = ((5, 3, 1), (2, 7))
    rows = torch.randint(257, (2, 9))
    positions = torch.tensor([[i for n in row for i in range(n)] for row in lengths])
    packed = model(rows, packing=Packing.from_positions(positions))
    for row, logits, parts in zip(rows, packed, lengths, strict=True):
        pieces = zip(row.split(parts), logits.split(parts), strict=True)
        for document, expected in pieces:
            torch.testing.assert_close(model(document[None])[0], expected)


def test_loss_within_documents_is_that_of_the_documents_apart(
    tokens, model_config, training_config
):
    config = replace(training_config, within_documents=True, seq_len=20, batch_size=3)
    model = Transformer(model_config)
    inputs, targets = batch_at(0, tokens, config)
    positions = positions_at(0, tokens, config)
    losses = []
    for row in range(3):
        starts = (positions[row] == 0).nonzero().flatten().tolist()
        for start, end in zip(starts, [*starts[1:], 20], strict=True):
            part = slice(start, end)
            loss = next_token_loss(model, inputs[None, row, part], targets[None, row, part])
            losses += [loss.item()] * (end - start)
    for parts in (1, 2):
        config = replace(config, micro_batches=parts)
        optimizer = torch.optim.SGD(model.parameters())
        stepper = Stepper(model, optimizer, build_scaler(config, "cpu"), config)
        found = stepper.backward(inputs, targets, positions)
        assert found == pytest.approx(sum(losses) / 60, rel=1e-5)
    (first, *_) = train_steps(model, tokens, config, device="cpu")
    assert first == pytest.approx(sum(losses) / 60, rel=1e-5)
    assert first != pytest.approx(
        next_token_loss(Transformer(model_config), inputs, targets).item()
    )


def test_evaluation_within_documents_sees_nothing_before_them(tokens, model_config):
    model = Transformer(model_config)
    common = {"seq_len": 15, "batch_size": 2}
    result = evaluate(model, tokens, ByteTokenizer(), **common, within_documents=True)
    total = 0.0
    for window in (0, 15, 30):
        row = torch.from_numpy(tokens[window : window + 16].astype(np.int64))[None]
        positions = positions_in_documents(tokens, [window], 15)
        logits = model(row[:, :-1], packing=Packing.from_positions(positions))
        total += torch.nn.functional.cross_entropy(logits[0], row[0, 1:], reduction="sum").item()
    assert result.loss == pytest.approx(total / 45, rel=1e-5)
    assert evaluate(model, tokens, ByteTokenizer(), **common).loss != pytest.approx(result.loss)


def test_what_knows_no_documents_is_refused(model_config, training_config, random_tokens):
    config = replace(training_config, within_documents=True)
    with pytest.raises(ConfigError, match="`within_documents` needs a token file or shards"):
        train_steps(Transformer(model_config), random_tokens, config, device="cpu")


def test_a_backend_without_documents_is_refused_and_a_cache_is_too(model_config):
    def takes_no_packing(q, k, v, *, is_causal):
        return q

    attention.register("bare", takes_no_packing)
    try:
        bare = Transformer(replace(model_config, attention="bare"))
        with pytest.raises(AttentionUnavailable, match="its function takes no `packing`"):
            bare.resolve_attention(device="cpu", dtype=torch.float32, packed=True)
    finally:
        attention.unregister("bare")
    model = Transformer(model_config)
    packing = Packing.from_positions(torch.tensor([[0, 1, 0]]))
    with pytest.raises(ConfigError, match="pass one of `cache` and `packing`"):
        model(torch.zeros(1, 3, dtype=torch.int64), cache=KVCache(model_config, 1), packing=packing)
