"""The portable kernels alone, with choices that the public functions make themselves."""

from flash_kernel._triton.launch import prepare_forward
from flash_kernel._triton.launch_backward import prepare_backward
from flash_kernel.variant import PLAIN


def launch_forward(q, k, v, variant, modifiers=PLAIN, packing=None, **options):
    """Return o and lse of `prepare_forward`, prepared for this once."""
    num_sequences = None if packing is None else packing.num_sequences
    ends = (None, None) if packing is None else packing[:2]
    forward = prepare_forward(q, k, v, variant, modifiers, num_sequences, **options)
    return forward(q, k, v, (*modifiers, *ends))


def launch_backward(q, k, v, o, lse, do, dlse, variant, modifiers=PLAIN, **options):
    """Return the gradients of `prepare_backward`, prepared for this once."""
    backward = prepare_backward(
        q, k, v, o, do, variant, modifiers, has_dlse=dlse is not None, **options
    )
    return backward(q, k, v, o, lse, do, dlse, (*modifiers, None, None))
