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


# notes what is asked for, and refuses it, as where it is not installed
REFUSED = f"""
import sys
import torch  # which itself looks for Triton

class Refuse:
    asked = []

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL}:
            self.asked.append(name)
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refuse())
"""


def test_eager_needs_neither_triton_nor_flash_kernel_and_asks_for_none():
    program = f"""{REFUSED}{MODEL}
# without an optimizer: torch's own imports Dynamo, and that asks for Triton
next_token_loss(model, *batch_at(0, tokens, config)).backward()
print(Refuse.asked)
print(len(train_steps(model, tokens, config, device="cpu")))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n2\n"
