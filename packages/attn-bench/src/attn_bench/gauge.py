"""A GPU's clock and temperature while it is measured, read from its driver (NVML).

No Python package is needed: the driver brings the library, and any user may read.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

LIBRARY = "libnvidia-ml.so.1"
SM_CLOCK, GPU_TEMPERATURE = 1, 0  # NVML_CLOCK_SM, NVML_TEMPERATURE_GPU
# NVML's reasons to slow down that are no plain power limit: hardware slowdown, thermal in software
# and in hardware, power brake
SLOWDOWNS = 0x8 | 0x20 | 0x40 | 0x80
# a GPU at its power limit moves its clock by some percent all the time
STEADY_CLOCK, STEADY_DEGREES = 1.15, 15


class Reading(NamedTuple):
    """The clock in MHz, the temperature in degrees Celsius, and whether the GPU is slowed down."""

    clock_mhz: int
    celsius: int
    is_slowed: bool


@dataclass(frozen=True)
class Weather:
    """The range of several readings: of what a row was measured under."""

    clock_mhz: tuple[int, int]
    celsius: tuple[int, int]
    is_slowed: bool

    @property
    def why_unstable(self) -> str:
        """What moved too much for the times to be trusted, "" if nothing."""
        reasons = []
        if self.clock_mhz[1] > STEADY_CLOCK * self.clock_mhz[0]:
            reasons.append(f"the clock moved from {self.clock_mhz[0]} to {self.clock_mhz[1]} MHz")
        if self.celsius[1] - self.celsius[0] > STEADY_DEGREES:
            reasons.append(f"the temperature moved from {self.celsius[0]} to {self.celsius[1]} °C")
        if self.is_slowed:
            reasons.append("the driver slowed the GPU down for its temperature or power supply")
        return ", ".join(reasons)


def weather_of(readings: Sequence[Reading]) -> Weather | None:
    """Return the range of some readings, None if there are none."""
    if not readings:
        return None
    clocks, degrees = ([each[i] for each in readings] for i in (0, 1))
    return Weather(
        (min(clocks), max(clocks)),
        (min(degrees), max(degrees)),
        any(each.is_slowed for each in readings),
    )


class Gauge:
    """Reads one GPU.

    Raises:
        OSError: There is no driver library, or it does not know the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._nvml = ctypes.CDLL(LIBRARY)
        self._call("nvmlInit_v2")
        self._handle = ctypes.c_void_p()
        # by its name and not by its number: CUDA_VISIBLE_DEVICES counts otherwise
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        self._call("nvmlDeviceGetHandleByUUID", uuid, ctypes.byref(self._handle))

    def read(self) -> Reading:
        """Return what it shows now."""
        clock, degrees = ctypes.c_uint(), ctypes.c_uint()
        slowdowns = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetClockInfo", self._handle, SM_CLOCK, ctypes.byref(clock))
        self._call("nvmlDeviceGetTemperature", self._handle, GPU_TEMPERATURE, ctypes.byref(degrees))
        self._call(
            "nvmlDeviceGetCurrentClocksThrottleReasons",
            self._handle,
            ctypes.byref(slowdowns),
        )
        return Reading(clock.value, degrees.value, bool(slowdowns.value & SLOWDOWNS))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._nvml, name)(*arguments)
        if status != 0:
            msg = f"{name} answered {status}"
            raise OSError(msg)


def open_gauge(device: torch.device) -> Callable[[], Reading] | None:
    """Return what reads a device; None of a CPU, or where the driver says nothing."""
    if device.type != "cuda":
        return None
    try:
        gauge = Gauge(device)
        gauge.read()
    except (OSError, AttributeError):  # no library, an older one, or a driver that forbids it
        return None
    return gauge.read
