"""Device functions that the Hopper kernels are composed of: barriers, rings, sums.

**Named barriers.**  The hardware has 16 for each CTA.  Triton takes 0, 1, and one for each
partition beyond the first (2, 3, 4), so a kernel of ours has 5 to 15 to give out.  A thread may
*arrive* at a named barrier and go on, which an mbarrier allows too; but for an mbarrier Triton 3.6
emits a barrier of the whole warpgroup before the arrival, and the named one costs nothing of the
kind.  The count is of threads: of those that arrive and of those that wait.

The assembly is volatile throughout: the order of these instructions is what they are for.
"""

from flash_kernel._hopper.compat import gl, gluon

LN_2: gl.constexpr = gl.constexpr(0.6931471805599453)


@gluon.constexpr_function
def accumulator_layout(columns):
    """Return the layout of a ``[64, columns]`` product of one warpgroup."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
    )


@gluon.constexpr_function
def barrier_assembly(operation, count):
    return f"bar.{operation} $1, {count}; mov.u32 $0, 0;"


@gluon.jit
def barrier_sync(barrier, COUNT: gl.constexpr):
    """Wait, with every thread of this partition, until COUNT threads are at the barrier."""
    gl.inline_asm_elementwise(
        barrier_assembly("sync", COUNT), "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def barrier_arrive(barrier, COUNT: gl.constexpr):
    """Count every thread of this partition at the barrier, and go on."""
    gl.inline_asm_elementwise(
        barrier_assembly("arrive", COUNT), "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def following(stage, STAGES: gl.constexpr):
    """Return the stage of a ring after this one."""
    return gl.where(stage == STAGES - 1, 0, stage + 1)


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """Return the stage of a ring after this one, and the parity of its mbarrier."""
    following = stage + 1
    wraps = following == STAGES
    return gl.where(wraps, 0, following), phase ^ wraps.to(gl.int32)


@gluon.jit
def number_at(i: gl.constexpr, index, numbers):
    """Return one of some numbers that each thread holds all of."""
    return gl.sum(gl.where(index == i, numbers, 0), 0)


@gluon.jit
def sums_by_thread(x, COLUMNS: gl.constexpr):
    """Sum the columns of ``x [64, COLUMNS]`` that a thread holds: ``[64, 4]``, one for each lane.

    An accumulator of wgmma has eight columns at a time spread over four neighbouring lanes, two for
    each.  Leaving out the sum over the lanes saves the shuffles of every step; it is made once, at
    the end.
    """
    by_lane = x.reshape([64, COLUMNS // 8, 4, 2])
    return gl.sum(gl.sum(by_lane, 1), 2)


@gluon.jit
def computed_here(x):
    """Return float32 ``x``, computed before the next branch.

    LLVM and ptxas move pure arithmetic past a spin loop to where it is used; there it would no
    longer overlap the products in flight.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def hidden(constant):
    """Return an integer that the compiler does not know.

    Of addresses that never change, those of k and v in the backward, ptxas would make some 20 wgmma
    descriptors before the loop, find no registers for them, and load them from the stack in every
    step.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [gl.to_tensor(constant)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def sign_test(count):
    """Return assembly, and its constraints, that reads ``count`` registers and changes nothing."""
    first, *rest = (f"${count // 4 + i}" for i in range(count))
    lines = [".reg .b32 signs;", ".reg .pred negative;", f"mov.b32 signs, {first};"]
    for x, y in zip(rest[::2], rest[1::2], strict=False):
        lines.append(f"lop3.b32 signs, signs, {x}, {y}, 0xFE;")
    lines.append(f"or.b32 signs, signs, {rest[-1]};")
    lines += ["setp.lt.s32 negative, signs, 0;", "@negative nanosleep.u32 0;"]
    lines += [f"mov.b32 ${i}, 0;" for i in range(count // 4)]
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def sign_constraints(count):
    return ",".join(["=r"] * (count // 4) + ["f"] * count)


@gluon.jit
def stay_here(p, COUNT: gl.constexpr):
    """Have ``p``, COUNT numbers >= 0 in each thread, computed before this point.

    ptxas sinks arithmetic past a spin loop to where it is used, and there the exponentials would no
    longer lie under a product.  It cannot sink them past an instruction that might have an effect
    and depends on them all: a sleep, were one of them negative.
    """
    gl.inline_asm_elementwise(
        sign_test(COUNT), sign_constraints(COUNT), [p], dtype=gl.int8, is_pure=False, pack=COUNT
    )
