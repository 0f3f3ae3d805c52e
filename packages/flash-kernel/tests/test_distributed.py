"""Sharded over processes: parameters by FSDP2, and heads by DTensors."""

import pytest
import torch

if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("needs torch's gloo", allow_module_level=True)

from sharded_attention import NUM_PROCESSES, run_process


@pytest.mark.slow
def test_shards_of_parameters_and_of_heads_equal_one_process(tmp_path):
    torch.multiprocessing.spawn(run_process, (tmp_path / "store",), nprocs=NUM_PROCESSES)
