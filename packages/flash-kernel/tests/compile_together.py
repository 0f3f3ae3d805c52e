"""Compile two kernels at once for a GPU that is not there, then ask for them again; print a line.

It says which threads compiled, and whether the kernels were found afterwards.  A script of its own,
because a process in which Triton interprets cannot compile.
"""

import json
import tempfile
import threading

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from flash_kernel._hopper.backward_launch import prepare_end, prepare_start, specify
from flash_kernel._triton import prepared
from flash_kernel.variant import Variant


class Driver:
    """What Triton asks of a driver before it launches anything."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, _):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


def main() -> None:
    """Compile, look, print."""
    driver.set_active(Driver())
    prepared.PreparedLaunch.is_new_to_gpu = lambda self, _: self.compiled is None
    in_main_thread = []

    def listener(**_):
        in_main_thread.append(threading.current_thread() is threading.main_thread())

    knobs.compilation.listener = listener
    q = torch.randn(1, 2, 64, 64, dtype=torch.bfloat16)
    floats, counters = torch.randn(4096), torch.zeros(3, dtype=torch.int32)
    spec = specify(q, q, Variant(0.125), is_deterministic=True)
    start = prepare_start(q, q, 0.125, spec, has_dlse=False)
    end = prepare_end(q, 0.125, spec)
    of_start = (q, q, floats, None, floats, floats, counters, None)
    of_end = (q, floats, floats, counters, None)
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope():
        knobs.cache.dir = folder
        prepared.compile_together((start, of_start), (end, of_end))
        at_first = len(in_main_thread)
        for launch, tensors in ((start, of_start), (end, of_end)):
            arguments = (*launch.first_arguments(tensors), *launch.constants)
            launch.kernel.warmup(*arguments, grid=launch.grid, **launch.options)
    report = {"triton": triton.__version__, "compiled_again": len(in_main_thread) - at_first}
    print(json.dumps(report | {"in_main_thread": in_main_thread}))


if __name__ == "__main__":
    main()
