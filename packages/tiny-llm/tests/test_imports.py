"""The default path needs neither Triton nor flash-kernel."""

import subprocess
import sys

OPTIONAL = {"triton", "flash_kernel", "attn_bench", "einx"}

MODEL = """
import sys
import numpy as np
import tiny_llm, tiny_llm.cli, tiny_llm.commands
from tiny_llm import attention
from tiny_llm.config import ModelConfig, TrainingConfig
from tiny_llm.loss import next_token_loss
from tiny_llm.training import batch_at, train_steps
from tiny_llm.transformer import Transformer

assert {"eager", "flash", "flex", "sdpa"} <= set(attention.names())
tokens = np.arange(50)
model = Transformer(ModelConfig(d_model=8, num_layers=1, num_heads=2, max_seq_len=8))
config = TrainingConfig(batch_size=1, seq_len=8, steps=2)
"""


def output_of(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_eager_forward_and_backward_import_neither_triton_nor_flash_kernel():
    # without an optimizer: torch's own import Dynamo, and that imports Triton if it is installed
    program = f"""{MODEL}
next_token_loss(model, *batch_at(0, tokens, config)).backward()
print(sorted({OPTIONAL} & set(sys.modules)))
"""
    assert output_of(program) == "[]\n"


def test_eager_training_works_where_triton_and_flash_kernel_cannot_be_imported():
    program = f"""
import sys
sys.modules.update(dict.fromkeys({OPTIONAL}))
{MODEL}
print(len(train_steps(model, tokens, config, device="cpu")))
"""
    assert output_of(program) == "2\n"
