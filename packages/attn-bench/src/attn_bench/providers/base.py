"""What a provider is, and the reasons that several of them share.

A provider is a name, a reason why it is unavailable on a device (or None), a reason why it cannot
do a case (or None), and a factory ``build(case, device) -> fn(q, k, v) -> o`` with
q ``[batch, num_heads, seqlen_q, head_dim]``, k and v ``[batch, kv_heads, seqlen_k, head_dim]`` and
the case's mask built in.  Whatever a provider prepares per shape (a mask, a compiled function) is
made in ``build``, outside the clock.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_bench.case import Case

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def always(_: object) -> None:
    """Speak against nothing."""
    return


@dataclass(frozen=True)
class Provider:
    """One implementation; see the module's docstring.

    Attributes:
        compiles: It runs under torch.compile, for seconds at each new shape.
        has_backward: False if only the forward exists; then only that is checked and timed.
        layout: How q, k and v lie in memory as it gets them; bhnd is [batch, heads, n, d].
        keeps_scores: It stores the whole score matrix, which decides how much memory it takes.
        deterministic: Whether repeats are equal bit for bit; None if its authors do not say.
    """

    name: str
    summary: str
    build: Callable[[Case, torch.device], Attention]
    why_unavailable: Callable[[torch.device], str | None] = always
    why_unsupported: Callable[[Case], str | None] = always
    compiles: bool = False
    has_backward: bool = True
    layout: str = "bhnd"
    keeps_scores: bool = False
    deterministic: bool | None = None

    def why_not(self, case: Case, device: torch.device) -> str | None:
        """Return why this provider cannot do the case on the device, None if it may."""
        return self.why_unavailable(device) or self.why_unsupported(case)


def needs_cuda(what: str, device: torch.device) -> str | None:
    """Return a reason unless the device is a CUDA GPU."""
    return None if device.type == "cuda" else f"{what} needs a CUDA device"


def why_no_compile(device: torch.device) -> str | None:
    """Return why torch.compile cannot work for `device`, None if nothing speaks against it."""
    compilers = [os.environ.get("CXX"), "g++", "clang++", "c++"]
    if device.type == "cpu" and not any(each and shutil.which(each) for each in compilers):
        return "torch.compile needs a C++ compiler and none was found: install g++"
    return None


def takes_no_window(case: Case) -> str | None:
    """Return a reason if the case has a window."""
    return None if case.window is None else "it has no sliding window"


def takes_only_equal_heads(case: Case) -> str | None:
    """Return a reason if the case has a window, or fewer heads of k and v than of q."""
    if case.kv_heads != case.num_heads:
        return "it needs as many heads of k and v as of q"
    return takes_no_window(case)
