"""The first call of a provider in a new process whose compiler caches are empty.

python -m attn_bench.cold_start '{"provider": ..., "backward": ..., "case": ..., "device": ...}'
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

from attn_bench.case import Case
from attn_bench.providers import Provider

TIMEOUT_SECONDS = 300
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")


def cold_call_milliseconds(provider: Provider, case: Case, device: torch.device) -> float | str:
    """Return the wall time in ms of the first forward and backward, or in one line why not.

    Importing torch and making the inputs are not counted, nor is a backward that does not exist.
    """
    request = {
        "provider": provider.name,
        "backward": provider.has_backward,
        "case": asdict(case),
        "device": str(device),
    }
    with tempfile.TemporaryDirectory(prefix="attn-bench-") as folder:
        empty = {name: str(Path(folder, name)) for name in CACHES}
        try:
            done = subprocess.run(
                [sys.executable, "-m", __name__, json.dumps(request)],
                env={**os.environ, **empty},
                capture_output=True,
                text=True,
                timeout=TIMEOUT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"no first call within {TIMEOUT_SECONDS} s"
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return f"no first call in a new process: {lines[-1]}"
    return float(done.stdout.splitlines()[-1])


def _child(text: str) -> None:
    from attn_bench.environment import pick_device
    from attn_bench.runner import first_call, first_forward
    from attn_bench.suites import DECODE
    from attn_bench.workload import make_inputs

    request = json.loads(text)
    device = pick_device(request["device"])
    case = Case(**request["case"])
    # its table is the largest
    provider = DECODE.providers[request["provider"]]
    inputs = make_inputs(case, device)
    call = first_call if request["backward"] else first_forward
    print(call(provider.build(case, device), inputs)[1])


if __name__ == "__main__":
    _child(sys.argv[1])
