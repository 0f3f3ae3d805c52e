"""Replays of a captured CUDA graph: what a short kernel takes without the host's launch."""

import torch

from attn_bench.timing import timed_event
from attn_bench.workload import Workload

# where launching may be most of the time
SHORT_MS = 0.1
REPLAYS = 50


def replay_milliseconds(workload: Workload, device: torch.device) -> float:
    """Return the mean time of a replay; the L2 cache is warm, since replays follow each other."""
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        # what is made on a first call must not be captured
        for _ in range(3):
            workload.run(workload.prepare())
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        workload.run(workload.prepare())
    graph.replay()
    begin, end = timed_event(), timed_event()
    torch.cuda.synchronize(device)
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / REPLAYS
