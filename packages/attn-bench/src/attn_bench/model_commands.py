"""The commands that time whole models: ``train-step`` and ``generate``."""

from argparse import Namespace
from dataclasses import asdict
from itertools import product

import torch

from attn_bench.decoding import DecodingShape, time_decoding
from attn_bench.environment import describe_environment, one_thread, pick_device, summarize
from attn_bench.errors import InputError
from attn_bench.model_tables import decoding_table, step_table
from attn_bench.peer_step import load_peers
from attn_bench.results import exit_status, saving
from attn_bench.roofline import describe_ceilings, measure_ceilings
from attn_bench.step_shape import StepShape
from attn_bench.tables import terminal_width
from attn_bench.train_step import time_training
from tiny_llm.config import ModelConfig, preset
from tiny_llm.errors import TinyLLMError

DEFAULT_BATCH = 2


def run_train_step(arguments: Namespace) -> int:
    """Time training steps by attention backend; 1 if the losses differ."""
    device = pick_device(arguments.device)
    try:
        peers = load_peers(arguments.peer, arguments.backend)
        model, name = model_of(arguments)
        batch = arguments.batch or (None if arguments.tokens else DEFAULT_BATCH)
        shape = StepShape(
            model,
            batch,
            arguments.steps,
            dtype_of(arguments, device),
            tokens=arguments.tokens or 0,
            is_compiled=arguments.compile,
            loss_chunk=arguments.loss_chunk,
            name=name,
        )
        with one_thread(device):
            environment = describe_environment(device)
            print(f"train-step on {summarize(environment)}\n{shape}\n", flush=True)
            with saving(arguments.save, environment) as save:
                found = time_training(shape, arguments.seqlen, arguments.backend, device, peers)
                for each in found:
                    save(each.row)
    except TinyLLMError as error:  # an unknown backend, or a width that has no heads
        raise InputError(str(error)) from error
    print(step_table(found, terminal_width()))
    return exit_status([each.row for each in found])


def run_generation(arguments: Namespace) -> int:
    """Time decoding steps by attention backend and way of decoding; 1 if their logits differ."""
    device = pick_device(arguments.device)
    dtype = dtype_of(arguments, device)
    modes = arguments.decode or (["graph"] if device.type == "cuda" else ["eager"])
    try:
        model, name = model_of(arguments)
        shape = DecodingShape(name, model, dtype, arguments.steps)
        with one_thread(device):
            environment = describe_environment(device)
            print(f"generate on {summarize(environment)}\n{name}, {dtype}", flush=True)
            ceilings = measure_ceilings(device, [dtype])
            print(f"ceilings: {describe_ceilings(ceilings)}\n", flush=True)
            environment["ceilings"] = asdict(ceilings)
            with saving(arguments.save, environment) as save:
                found = time_decoding(
                    shape,
                    arguments.batch or [1],
                    arguments.context,
                    list(product(arguments.backend, modes)),
                    device,
                    ceilings.copy_gb_s,
                )
                for each in found:
                    save(each.row)
    except TinyLLMError as error:
        raise InputError(str(error)) from error
    print(decoding_table(found, terminal_width()))
    return exit_status([each.row for each in found])


def dtype_of(arguments: Namespace, device: torch.device) -> str:
    """Return the dtype asked for, by default bf16 on a GPU and fp32 elsewhere."""
    return arguments.dtype or ("bf16" if device.type == "cuda" else "fp32")


def model_of(arguments: Namespace) -> tuple[ModelConfig, str]:
    """Return the model of the command line, and what to call it."""
    if arguments.preset is not None:
        return preset(arguments.preset), f"tiny-llm {arguments.preset}"
    model = ModelConfig(
        d_model=arguments.d_model,
        num_layers=arguments.layers,
        num_heads=arguments.heads,
        d_ff=3 * arguments.d_model,
    )
    return model, f"tiny-llm of {arguments.layers} layers"
