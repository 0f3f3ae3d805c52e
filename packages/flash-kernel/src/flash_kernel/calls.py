"""Calls met before: what was decided for their kind, and the launches prepared for it.

To check inputs, choose an implementation and prepare launches takes the host many times as long as
a small kernel takes the GPU.  All of it follows from the kind of the call, see `kind_of`: so it is
done when a call of that kind is first met, and kept here, in the one cache of decisions and
launches that there is.  A new call and a known one are carried out by the same code; the new one
merely has to decide, and to prepare, what the other finds.

A kind holds, beside the function's name:

- of each tensor its shape, strides, dtype, device, whether it wants a gradient, and whether its
  address is a multiple of 16 bytes, which decides what is compiled;
- the options, among them what ``torch.use_deterministic_algorithms`` makes of ``deterministic``;
- the state of torch that a decision depends on: grad mode, transforms of ``torch.func``, and for
  float32 whether products may be TF32.

It need not hold autocast, which has converted the tensors before; ``torch.compile``, which takes
another path; nor stream and graph capture, which are asked for at each launch.  A tensor of an
unusual kind, a subclass or one without memory, has no kind, nor has any call in forward mode: they
decide each time.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from flash_kernel._triton.config import ALIGNMENT, allows_tf32
from flash_kernel.request import Plan
from flash_kernel.variant import Variant

MAX_CALLS = 4096  # kinds of calls; when there are more, all are forgotten
MAX_LAUNCHES = 64  # of a call: a backward's depends on the layout of the gradient that comes


class Call:
    """What is known of a kind of call: the plan, and the launches prepared to carry it out."""

    __slots__ = ("_launches", "plan", "records", "variant")

    def __init__(self, plan: Plan, variant: Variant, *, records: bool = False) -> None:
        self.plan = plan
        self.variant = variant
        self.records = records  # autograd has to see it
        self._launches: dict[Hashable, Any] = {}

    def launch(self, key: Hashable, prepare: Callable[[], Any]) -> Any:
        """Return the launch kept under a key; prepare it if it is new."""
        launch = self._launches.get(key)
        if launch is None:
            if len(self._launches) >= MAX_LAUNCHES:
                self._launches.clear()
            launch = self._launches[key] = prepare()
        return launch

    def replace_plan(self, **changes: Any) -> None:
        """Let other implementations carry out this kind of call from now on."""
        self.plan = self.plan._replace(**changes)
        self._launches.clear()


_calls: dict[Hashable, Call] = {}


def known_call(kind: Hashable | None, decide: Callable[[], Call]) -> Call:
    """Return what is known of a kind of call; decide if it is new, or if it has no kind."""
    if kind is None:
        return decide()
    call = _calls.get(kind)
    if call is None:
        call = decide()
        if len(_calls) >= MAX_CALLS:
            _calls.clear()
        _calls[kind] = call
    return call


def kind_of(
    function: str, tensors: Sequence[Tensor | None], options: tuple[Any, ...]
) -> Hashable | None:
    """Return the kind of a call, see above; None if a tensor is of an unusual kind.

    The first tensor is q.  Whatever is given as a tensor or an option may still be invalid.
    """
    q = tensors[0]
    # in forward mode a tensor may have a tangent, which is refused where a call is decided
    if q is None or forward_ad._current_level >= 0:
        return None
    described: list[Hashable] = []
    try:
        for x in tensors:
            if x is None:
                described.append(None)
            elif (type(x) is Tensor or type(x) is Parameter) and not x.is_neg():
                aligned = x.data_ptr() % ALIGNMENT == 0
                described.append((x.shape, x.stride(), x.dtype, x.device, aligned, x.requires_grad))
            else:
                return None
    except RuntimeError:  # sparse or nested: it has no strides, or no address
        return None
    return (
        function,
        *described,
        # an option of the wrong type may not be hashable, and 1 == True == 1.0
        repr(options),
        torch.is_grad_enabled(),
        torch._C._are_functorch_transforms_active(),
        allows_tf32(q.dtype),
    )


def wants_gradients(tensors: Iterable[Tensor | None]) -> bool:
    """Say whether autograd has to see a call.

    A level of forward mode counts: autograd refuses tangents in words.
    """
    if forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
