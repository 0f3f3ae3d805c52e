"""Clocks and memory meters.

On a GPU a run is timed by CUDA events on an idle stream after writes that evict the L2 cache.  The
host enqueues the run while they go on, so that the device is measured and not the launch.  On a CPU
it is ``time.perf_counter``.

Providers are interleaved: every round runs each of them, in an order that rotates, so that a
drift of the clock frequency hits all alike.
"""

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from attn_bench.workload import Workload

ROUNDS = 5
# of all runs, this many are kept for statistics at most
SAMPLES = 40
MIB = 2**20
# about 1.5 ms on an H200, where launching attention and its backward from Python takes up to 0.5 ms
MOST_WRITES = 8
# warming up ends when a run takes as long as the one before, within this share
STILL, MOST_WARM_UPS = 0.05, 20


@dataclass(frozen=True)
class Budget:
    """How long one provider may be timed on one case, and the limits of its repetitions.

    The time is the wall's: what is prepared for each run counts.
    """

    seconds: float = 0.5
    least: int = ROUNDS
    most: int = 200


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a run: the median, and the 20th and 80th percentile.

    `drift` is the largest median of a round over the smallest: 1 if the clock held still.
    `has_launch` is true if the device had to wait for the host in most of the runs.
    """

    median_ms: float
    p20_ms: float
    p80_ms: float
    repetitions: int
    drift: float = 1.0
    samples: tuple[float, ...] = ()
    has_launch: bool = False


class Clock:
    """Times one run at a time on `device`.

    On a GPU the writes before a run are doubled when they ended before the run was enqueued, up to
    `MOST_WRITES`; with `hides_launch` off there is one, and waiting for the host counts, as it does
    in a step of a whole model.  `was_late` says whether the device waited in the last run.
    """

    def __init__(self, device: torch.device, *, hides_launch: bool = True) -> None:
        self._device = device
        self.was_late = False
        self._writes, self._most_writes = (2, MOST_WRITES) if hides_launch else (1, 1)
        self._evict: Tensor | None = None
        if device.type == "cuda":
            l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
            self._evict = torch.empty(max(8 * l2_bytes, 512 * MIB), dtype=torch.int8, device=device)

    def milliseconds(self, workload: Workload) -> float:
        """Return the time of one run, its `prepare` left out."""
        state = workload.prepare()
        if self._evict is None:
            start = time.perf_counter()
            workload.run(state)
            return (time.perf_counter() - start) * 1e3
        begin, end = timed_event(), timed_event()
        torch.cuda.synchronize(self._device)
        for _ in range(self._writes):
            self._evict.zero_()
        begin.record()
        workload.run(state)
        end.record()
        # the device began with the run before the whole of it was enqueued
        self.was_late = bool(begin.query())  # type: ignore[no-untyped-call]
        end.synchronize()
        if self.was_late:
            self._writes = min(2 * self._writes, self._most_writes)
        return float(begin.elapsed_time(end))


def timed_event() -> torch.cuda.Event:
    """Return an event that can be subtracted from another."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def wall_milliseconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the wall time of a call until the device is idle again."""
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) * 1e3


def repetitions(milliseconds: float, budget: Budget) -> int:
    """Return how many runs of this length fit `budget`, a multiple of ROUNDS."""
    fitting = int(budget.seconds * 1e3 / max(milliseconds, 1e-3))
    per_round = -(-min(max(fitting, budget.least), budget.most) // ROUNDS)
    return per_round * ROUNDS


def time_interleaved(
    workloads: dict[str, Workload],
    clock: Clock,
    budget: Budget,
    on_failure: Callable[[str, Exception], None],
    on_round: Callable[[], object] = lambda: None,
) -> dict[str, Timing]:
    """Time every workload, interleaved in rounds.

    A workload that raises is handed to `on_failure` and left out of the result.  `on_round` is
    called after each round, the one that warms up included.
    """
    running = dict(workloads)
    samples: dict[str, list[float]] = {name: [] for name in running}
    late = dict.fromkeys(running, 0)

    def sample(name: str, count: int) -> list[float]:
        times = []
        try:
            for _ in range(count):
                times.append(clock.milliseconds(running[name]))
                late[name] += clock.was_late
        except Exception as error:  # a provider is foreign code, and its failure is a result
            del running[name]
            on_failure(name, error)
        return times

    # the last run to warm up tells how many repetitions the budget holds
    counts = {
        name: repetitions(_warm_up(partial(sample, name, 1), budget), budget) // ROUNDS
        for name in list(running)
    }
    late = dict.fromkeys(running, 0)
    on_round()
    for turn in range(ROUNDS):
        names = list(running)
        shift = turn % max(len(names), 1)
        for name in itertools.chain(names[shift:], names[:shift]):
            samples[name] += sample(name, counts[name])
        on_round()
    return {
        name: replace(summarize(samples[name]), has_launch=2 * late[name] > len(samples[name]))
        for name in running
    }


def _warm_up(run_once: Callable[[], list[float]], budget: Budget) -> float:
    """Run until the time holds still, and return the wall time of the last run in ms.

    That is at least twice, and no longer than the budget or `MOST_WARM_UPS` runs; it ends with a
    run that fails and returns nothing.
    """
    begin, previous, wall_ms = time.perf_counter(), 0.0, 0.0
    for count in range(MOST_WARM_UPS):
        start = time.perf_counter()
        times = run_once()
        end = time.perf_counter()
        wall_ms = (end - start) * 1e3
        is_still = bool(times) and abs(times[0] - previous) <= STILL * times[0]
        if not times or (count > 0 and (is_still or end - begin > budget.seconds)):
            break
        previous = times[0]
    return wall_ms


def summarize(milliseconds: list[float]) -> Timing:
    """Return the median and the 20th and 80th percentile of at least two samples."""
    fifths = statistics.quantiles(milliseconds, n=5, method="inclusive")
    count = len(milliseconds)
    return Timing(
        statistics.median(milliseconds),
        fifths[0],
        fifths[-1],
        count,
        drift_of(milliseconds),
        tuple(milliseconds[:: -(-count // SAMPLES)]),
    )


def drift_of(milliseconds: list[float]) -> float:
    """Return the largest median of the `ROUNDS` consecutive parts over the smallest."""
    length = len(milliseconds) // ROUNDS
    if length == 0:
        return 1.0
    rounds = (milliseconds[i * length : (i + 1) * length] for i in range(ROUNDS))
    medians = [statistics.median(each) for each in rounds]
    return max(medians) / max(min(medians), 1e-9)


def peak_mib(workload: Workload, device: torch.device) -> float:
    """Return the most memory that one run, with its `prepare`, holds beyond its inputs, in MiB.

    Outputs and gradients count.  On a GPU torch's allocator tells.  On a CPU torch's profiler
    does, by what each operation keeps; the scratch space inside one operation is not seen.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        workload.run(workload.prepare())
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / MIB
    with torch.autograd.profiler.profile(use_kineto=False, profile_memory=True) as profile:
        workload.run(workload.prepare())
    events = sorted(profile.function_events or (), key=lambda event: event.time_range.end)
    changes = [int(event.self_cpu_memory_usage) for event in events]
    return max(itertools.accumulate(changes, initial=0)) / MIB
