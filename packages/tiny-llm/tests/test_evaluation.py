"""The evaluation is the mean over all windows, in units that compare."""

import math
from dataclasses import replace

import pytest
import torch

from tiny_llm.bpe import BPETokenizer
from tiny_llm.data import prepare_tokens
from tiny_llm.distributed import Parallel
from tiny_llm.errors import ConfigError
from tiny_llm.evaluation import Evaluation, evaluate
from tiny_llm.tokenizer import ByteTokenizer
from tiny_llm.transformer import Transformer


def test_loss_is_the_mean_over_all_whole_windows(model_config, token_file):
    model = Transformer(model_config)
    found = evaluate(model, token_file, ByteTokenizer(), seq_len=24, batch_size=5)
    windows = (len(token_file) - 1) // 24
    tokens = torch.tensor(token_file[: windows * 24 + 1].astype("int64"))
    logits = model(tokens[:-1].view(-1, 24))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[1:])
    assert found.num_tokens == windows * 24
    assert found.loss == pytest.approx(expected.item(), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    # one byte per token
    assert found.bits_per_byte == pytest.approx(found.loss / math.log(2), rel=1e-5)


def test_bits_per_byte_counts_the_bytes_of_the_tokens(model_config, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abab " * 100)
    bpe = BPETokenizer.train([b"abab " * 100], 260)
    tokens = prepare_tokens([tmp_path / "a.txt"], tmp_path / "t.bin", bpe)
    model = Transformer(replace(model_config, vocab_size=bpe.vocab_size))
    found = evaluate(model, tokens, bpe, seq_len=10, batch_size=4, max_batches=2)
    assert found.num_tokens == 80
    num_bytes = len(bpe.decode_bytes(tokens[1:81].tolist()))
    assert num_bytes > 80
    assert found.bits_per_byte == pytest.approx(found.loss * 80 / math.log(2) / num_bytes)


class _Recording(Parallel):
    """Stands for a process of several, and keeps its own share of the sums."""

    def total(self, value):
        self.__dict__["share"] = value.clone()
        return value


def test_processes_share_the_windows_without_counting_one_twice(model_config, token_file):
    model = Transformer(model_config)
    settings = {"seq_len": 24, "batch_size": 4, "max_batches": 7}
    whole = evaluate(model, token_file, ByteTokenizer(), **settings)
    shares = []
    for rank in range(3):
        place = _Recording("ddp", rank, 3)
        evaluate(model, token_file, ByteTokenizer(), **settings, parallel=place)
        shares.append(place.share)
    nats, num_bytes = sum(shares).tolist()
    assert nats == pytest.approx(whole.loss * whole.num_tokens, rel=1e-5)
    assert num_bytes == pytest.approx(whole.num_tokens, abs=whole.num_tokens // 40)


def test_result_reads_as_a_sentence():
    assert str(Evaluation(math.log(4), 2.0, 1000)) == (
        "loss 1.3863 nats per token, perplexity 4.00, 2.0000 bits per byte, over 1,000 tokens"
    )


def test_too_short_a_text_is_refused(model_config, token_file):
    model = Transformer(model_config)
    with pytest.raises(ConfigError, match="seq_len=100000 needs at least 100001 tokens"):
        evaluate(model, token_file, ByteTokenizer(), seq_len=100_000, batch_size=1)
