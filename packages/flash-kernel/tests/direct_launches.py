"""The kernels alone, with choices that the public functions make themselves."""

from flash_kernel._triton.launch import prepare_forward
from flash_kernel._triton.launch_backward import prepare_backward
from flash_kernel.variant import PLAIN


def launch_forward(q, k, v, variant, modifiers=PLAIN, packing=None, **options):
    """Return o and lse of the portable kernel, prepared for this once."""
    num_sequences, ends = split(packing)
    forward = prepare_forward(q, k, v, variant, modifiers, num_sequences, **options)
    return forward(q, k, v, (*modifiers, *ends))


def launch_backward(q, k, v, o, lse, do, dlse, variant, modifiers=PLAIN, **options):
    """Return the gradients of the portable kernels, prepared for this once."""
    backward = prepare_backward(
        q, k, v, o, do, variant, modifiers, has_dlse=dlse is not None, **options
    )
    return backward(q, k, v, o, lse, do, dlse, (*modifiers, None, None))


def launch_hopper_forward(q, k, v, variant, packing=None, **options):
    """Return o and lse of the Hopper kernel, prepared for this once."""
    from flash_kernel._hopper.launch import prepare_forward

    num_sequences, ends = split(packing)
    return prepare_forward(q, k, v, variant, num_sequences, **options)(q, k, v, (*PLAIN, *ends))


def launch_hopper_backward(q, k, v, o, lse, do, dlse, variant, **options):
    """Return the gradients of the Hopper kernels, prepared for this once."""
    from flash_kernel._hopper.backward_launch import prepare_backward

    has_dlse = dlse is not None
    backward = prepare_backward(q, k, v, o, do, variant, has_dlse=has_dlse, **options)
    return backward(q, k, v, o, lse, do, dlse)


def split(packing):
    """Return the number of sequences and the two cu_seqlens of a packing, or of none."""
    return (None, (None, None)) if packing is None else (packing.num_sequences, packing[:2])
