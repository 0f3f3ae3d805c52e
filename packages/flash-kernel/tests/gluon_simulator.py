"""Runs a warp-specialised Gluon kernel on a CPU, to check its protocol and its arithmetic.

Gluon has no interpreter.  Here the plain Python bodies of the jitted functions run with stand-ins
for Gluon's own: every partition of every CTA is a task, every copy by TMA an event, and a seeded
scheduler lets one of them go on at a time.  So a run is repeatable, and ends in a `ProtocolError`
at once where

* nothing can go on (deadlock), with what each partition waits for;
* shared memory is read while a copy into it is on its way, or written while a product or a copy
  still reads it;
* a partition waits for the same parity of an mbarrier twice in a row (wrong phase);
* a barrier gets more arrivals than it counts, or ends half full.

Nothing is said about layouts, registers, or fences between proxies; sums are in float32, and what
goes through float16 or bfloat16 is rounded.
"""

import inspect
import operator
import random
import threading
import types
from collections import defaultdict
from typing import Any

import numpy as np
from triton.experimental.gluon import language as gl
from triton.language.core import constexpr
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from flash_kernel._hopper import compat, primitives
from flash_kernel._triton.config import PACKED_ROWS

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int32": 4}


class ProtocolError(AssertionError):
    """The kernel broke a rule of the hardware."""


def rounded(x, dtype):
    """Round a float32 array to a dtype by name."""
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        return (bits & np.uint32(0xFFFF0000)).view(np.float32).reshape(np.shape(x))
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return np.asarray(x).astype(np.float16).astype(np.float32)
    return np.asarray(x)


# ------------------------------------------------------------------------------------------- values


def plain(x):
    """Return the array or number behind a value."""
    return x.array if isinstance(x, Value) else x


class Value:
    """A tensor or scalar in registers: an array, and the name of its dtype."""

    type = types.SimpleNamespace(layout=None)

    def __init__(self, array, dtype=None):
        self.array = np.asarray(array)
        self.dtype = dtype or ("int32" if self.array.dtype.kind in "iub" else "float32")
        if self.dtype == "float32":
            self.array = self.array.astype(np.float32)

    @property
    def shape(self):
        return self.array.shape

    def to(self, dtype):
        if dtype in ("int32", "int64"):
            return Value(self.array.astype(np.int64))
        return Value(rounded(self.array, dtype), dtype)

    def reshape(self, shape):
        return Value(self.array.reshape(shape), self.dtype)

    def permute(self, order):
        return Value(self.array.transpose(order), self.dtype)

    def __getitem__(self, index):
        return Value(self.array[index], self.dtype)

    def __bool__(self):
        return bool(self.array)

    def __index__(self):
        return int(self.array)

    __hash__ = None


def truncated(a, b):
    """Divide integers as the hardware does, towards zero."""
    return (np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))).astype(np.int64)


def add_operator(name, function):
    def forward(self, other):
        with np.errstate(all="ignore"):
            return Value(function(self.array, plain(other)))

    def backward(self, other):
        with np.errstate(all="ignore"):
            return Value(function(plain(other), self.array))

    setattr(Value, f"__{name}__", forward)
    setattr(Value, f"__r{name}__", backward)


for _name in ("add", "sub", "mul", "truediv", "and", "or", "xor", "lshift", "rshift"):
    _plain_name = {"and": "and_", "or": "or_"}.get(_name, _name)
    add_operator(_name, getattr(operator, _plain_name))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    add_operator(_name, getattr(operator, _name))
add_operator("floordiv", truncated)
add_operator("mod", lambda a, b: a - truncated(a, b) * b)


# ------------------------------------------------------------------------------------------- memory


class Buffer:
    """One stage of shared memory, and who reads or writes it asynchronously."""

    def __init__(self, shape, dtype):
        self.array = np.full(shape, np.nan if dtype != "int32" else -7, np.float32)
        self.dtype = dtype
        self.arriving = 0  # copies on their way into it
        self.readers = 0  # products and copies that still read it

    def check_written(self):
        if self.readers:
            raise ProtocolError("shared memory written while it is still being read")
        if self.arriving:
            raise ProtocolError("shared memory written while a copy into it is on its way")

    def check_read(self):
        if self.arriving:
            raise ProtocolError("shared memory read while a copy into it is on its way")


class View:
    """A view of a buffer: what Gluon calls a shared memory descriptor."""

    def __init__(self, buffer, array):
        self.buffer, self.array = buffer, array
        self.dtype = buffer.dtype

    @property
    def shape(self):
        return self.array.shape

    def reshape(self, shape):
        return View(self.buffer, self.array.reshape(shape))

    def permute(self, order):
        return View(self.buffer, self.array.transpose(order))

    def slice(self, start, length, dim=0):
        index = [slice(None)] * self.array.ndim
        index[dim] = slice(start, start + length)
        return View(self.buffer, self.array[tuple(index)])

    def store(self, value):
        self.buffer.check_written()
        self.array[...] = rounded(np.asarray(plain(value), np.float32), self.dtype)

    def load(self, layout=None):
        self.buffer.check_read()
        array = self.array.copy()
        return Value(array.astype(np.int64) if self.dtype == "int32" else array, self.dtype)


class Stages:
    """An allocation, whose first dimension counts stages."""

    def __init__(self, shape, dtype):
        self.dtype, self.shape = dtype, tuple(shape)
        self.buffers = [Buffer(shape[1:], dtype) for _ in range(shape[0])]

    def index(self, i):
        buffer = self.buffers[int(i)]
        return View(buffer, buffer.array)


class Descriptor:
    """A tensor in global memory as the copy engine sees it."""

    layout = None

    def __init__(self, array, block_shape, dtype):
        self.array, self.block_shape, self.dtype = array, block_shape, dtype

    def box(self, where):
        """Return the part of the array that a block covers, and the part of the block it fills."""
        return self.clipped(where, self.block_shape, self.array.shape)

    def clipped(self, where, block, ends):
        inside, filled = [], []
        for start, size, end in zip(where, block, ends, strict=True):
            first, last = max(int(start), 0), min(int(start) + size, end)
            inside.append(slice(first, max(first, last)))
            filled.append(slice(first - int(start), max(first, last) - int(start)))
        return tuple(inside), tuple(filled)


class PackedDescriptor(Descriptor):
    """Packed sequences, each of which ends where the descriptor does; see `_triton.prepared`."""

    def box(self, where):
        pretended, end, head, row, col = (int(x) for x in where)
        assert pretended == PACKED_ROWS, "the coordinate that moves the base"
        _, heads, _, width = self.array.shape
        at = (0, head, end - PACKED_ROWS + row, col)
        inside, filled = self.clipped(at, self.block_shape[1:], (1, heads, end, width))
        return inside, (slice(None), *filled)


class Pointer:
    """A pointer into a flat array."""

    def __init__(self, array, offset=0):
        self.array, self.offset = array, offset

    def __add__(self, offset):
        return Pointer(self.array, self.offset + plain(offset))


# ---------------------------------------------------------------------------------------- barriers


class Mbarrier:
    def __init__(self):
        self.count = self.pending = self.bytes = self.completed = 0
        self.last_wait = {}  # parity that each task waited for last

    def arrive(self, count=1, num_bytes=0):
        self.pending -= count
        self.bytes += num_bytes
        if self.pending < 0:
            raise ProtocolError("an mbarrier got more arrivals than it counts")
        self.complete()

    def complete(self):
        if self.pending == 0 and self.bytes == 0:
            self.completed += 1
            self.pending = self.count

    def has_completed(self, parity):
        return self.completed % 2 != parity


class NamedBarrier:
    def __init__(self):
        self.threads = self.completed = 0

    def arrive(self, threads, count):
        self.threads += threads
        if self.threads > count:
            raise ProtocolError("a named barrier got more threads than it counts")
        if self.threads == count:
            self.threads, self.completed = 0, self.completed + 1


# --------------------------------------------------------------------------------------- scheduling


class Task:
    """A partition, or the code of a CTA before it is divided into partitions."""

    def __init__(self, scheduler, name, cta, warps, run):
        self.name, self.cta, self.warps = name, cta, warps
        self.ready, self.reason, self.done = (lambda: True), "start", False
        self.products = []  # in flight, oldest first
        self.stores = []  # copies to global memory that still read shared memory, oldest first
        self.wake = threading.Semaphore(0)
        self.scheduler = scheduler
        self.thread = threading.Thread(target=self._run, args=(run,), daemon=True)
        self.thread.start()

    def _run(self, run):
        self.wake.acquire()
        self.scheduler.current.task = self
        try:
            if not self.scheduler.failed:
                run()
        except BaseException as error:
            self.scheduler.failed = self.scheduler.failed or error
        self.done = True
        self.scheduler.baton.release()


class Scheduler:
    """Lets one task or event go on at a time, chosen at random among those that can.

    Of an odd seed copies take long: most of the time all else that can goes on first.
    """

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.haste = 0.02 if seed % 2 else 0.5
        self.tasks, self.events = [], []
        self.baton = threading.Semaphore(0)
        self.current = threading.local()
        self.failed = None

    def block(self, ready, reason):
        """Give way until ``ready()``; called by a task."""
        task = self.current.task
        task.ready, task.reason = ready, reason
        self.baton.release()
        task.wake.acquire()
        if self.failed:
            raise ProtocolError("another partition failed")

    def run(self):
        while any(not task.done for task in self.tasks):
            able = [task for task in self.tasks if not task.done and (self.failed or task.ready())]
            events = [] if self.failed else self.events
            if not able and not events:
                waits = (f"{t.name} of CTA {t.cta}: {t.reason}" for t in self.tasks if not t.done)
                self.failed = ProtocolError("deadlock; " + "; ".join(waits))
                continue
            is_event = events and (not able or self.random.random() < self.haste)
            chosen = self.random.choice(events if is_event else able)
            if isinstance(chosen, Task):
                chosen.wake.release()
                self.baton.acquire()
            else:
                self.events.remove(chosen)
                try:
                    chosen()
                except ProtocolError as error:
                    self.failed = error
        if self.failed:
            raise self.failed


# ---------------------------------------------------------------------------------------- simulator


def edited(function, old, new):
    """Return a function with other source text."""
    lines = inspect.getsource(function).splitlines()
    source = "\n".join(lines[next(i for i, x in enumerate(lines) if x.startswith("def ")) :])
    assert source.count(old) == 1, f"{function.__name__} has {source.count(old)} of: {old}"
    namespace = {}
    exec(source.replace(old, new), function.__globals__, namespace)
    return namespace[function.__name__]


class Simulator:
    """Stand-ins for Gluon, and the kernel's functions bound to them.

    ``edits`` maps jitted functions to ``(old, new)``, text of their source: to break a kernel on
    purpose.
    """

    def __init__(self, seed=0, edits=None):
        self.edits = {getattr(x, "fn", x): edit for x, edit in (edits or {}).items()}
        self.scheduler = Scheduler(seed)
        self.grid = 1
        self.named = defaultdict(NamedBarrier)  # by (CTA, number)
        self.mbarriers = []
        self.namespaces = {}
        fake_gl = self._language()
        self.stand_ins = {
            id(gl): fake_gl,
            id(compat.mbarrier): self._mbarrier_module(),
            id(compat.tma_load): self.tma_load,
            id(compat.tma_store): self.tma_store,
            id(compat.tma_store_wait): self.tma_store_wait,
            id(compat.warpgroup_mma): self.warpgroup_mma,
            id(compat.warpgroup_mma_wait): self.warpgroup_mma_wait,
            id(compat.fence_async_shared): lambda *_: None,
            id(primitives.barrier_sync): self.barrier_sync,
            id(primitives.barrier_arrive): self.barrier_arrive,
            id(primitives.computed_here): lambda x: x,
            id(primitives.hidden): lambda x: x,
            id(primitives.stay_here): lambda *_: None,
        }

    def watch(self, function, see):
        """Call ``see`` with the arguments of each call of a jitted function, before it."""
        bound = self.resolve(function)

        def watched(*arguments):
            see(*arguments)
            return bound(*arguments)

        self.stand_ins[id(function)] = watched
        for namespace in self.namespaces.values():
            for name, x in namespace.items():
                if x is bound:
                    namespace[name] = watched

    def launch(self, kernel, grid, arguments):
        """Run all CTAs of a launch, side by side."""
        self.grid = grid
        body = self.resolve(kernel)
        for cta in range(grid):
            self._add_task("main", cta, 4, lambda: body(*arguments))
        self.scheduler.run()
        for (cta, number), barrier in self.named.items():
            if barrier.threads:
                msg = f"named barrier {number} of CTA {cta} ends half full"
                raise ProtocolError(msg)
        if self.scheduler.events:
            raise ProtocolError("a copy outlives the kernel")

    def resolve(self, x):
        """Return what stands for a global of the kernel's modules."""
        if id(x) in self.stand_ins:
            return self.stand_ins[id(x)]
        if isinstance(x, constexpr):
            return x.value
        if isinstance(x, JITFunction | InterpretedFunction):
            function = edited(x.fn, *self.edits[x.fn]) if x.fn in self.edits else x.fn
            namespace = self._namespace(function.__globals__)
            if id(x) in self.stand_ins:  # its module has been bound just now, and it with that
                return self.stand_ins[id(x)]
            bound = types.FunctionType(
                function.__code__, namespace, function.__name__, function.__defaults__
            )
            self.stand_ins[id(x)] = bound
            return bound
        return x

    def _namespace(self, module_globals):
        key = module_globals["__name__"]
        if key not in self.namespaces:
            namespace = self.namespaces[key] = dict(module_globals)
            for name, x in module_globals.items():
                namespace[name] = self.resolve(x)
        return self.namespaces[key]

    def _add_task(self, name, cta, warps, run):
        task = Task(self.scheduler, name, cta, warps, run)
        self.scheduler.tasks.append(task)
        return task

    @property
    def task(self):
        return self.scheduler.current.task

    # ------------------------------------------------------------------------------- partitions

    def warp_specialize(self, parts, worker_warps, registers):
        total = 128 * -(-(4 + sum(worker_warps)) // 4)
        assert registers[-1] % 8 == 0
        assert total <= 512
        cta = self.task.cta
        tasks = []
        for i, ((function, arguments), warps) in enumerate(
            zip(parts, [4, *worker_warps], strict=True)
        ):
            run = types.MethodType(lambda arguments, function: function(*arguments), arguments)
            name = f"{function.__name__} {i}"
            tasks.append(
                self._add_task(name, cta, warps, lambda run=run, function=function: run(function))
            )
        self.scheduler.block(lambda: all(task.done for task in tasks), "its partitions")

    # ---------------------------------------------------------------------------- named barriers

    def barrier_sync(self, number, count):
        barrier = self.named[self.task.cta, int(number)]
        generation = barrier.completed
        barrier.arrive(32 * self.task.warps, count)
        self.scheduler.block(lambda: barrier.completed > generation, f"named barrier {int(number)}")

    def barrier_arrive(self, number, count):
        self.named[self.task.cta, int(number)].arrive(32 * self.task.warps, count)
        self.scheduler.block(lambda: True, "")

    # --------------------------------------------------------------------------------- mbarriers

    def _mbarrier_module(self):
        def init(view, count):
            view.count = view.pending = count

        def expect(view, num_bytes, pred=True):
            if pred:
                view.arrive(1, int(num_bytes))

        def arrive(view, count=1, pred=True):
            if pred:
                view.arrive(count)

        def wait(view, phase, pred=True, deps=()):
            if not pred:
                return
            parity, task = int(phase), self.task
            if view.last_wait.get(task) == parity:
                raise ProtocolError("a partition waits for one parity of an mbarrier twice")
            view.last_wait[task] = parity
            self.scheduler.block(lambda: view.has_completed(parity), f"mbarrier, parity {parity}")

        layout = lambda *_: None  # noqa: E731
        return types.SimpleNamespace(
            init=init, expect=expect, arrive=arrive, wait=wait, MBarrierLayout=layout
        )

    # ------------------------------------------------------------------------------------ copies

    def tma_load(self, descriptor, where, barrier, view, pred=True):
        where = [int(x) for x in where]
        view.buffer.check_written()
        view.buffer.arriving += 1
        view.array[...] = np.nan

        def land():
            inside, filled = descriptor.box(where)
            tile = np.zeros(descriptor.block_shape, np.float32)
            tile[filled] = descriptor.array[inside]
            view.array[...] = tile.reshape(view.array.shape)
            view.buffer.arriving -= 1
            barrier.bytes -= tile.size * ITEM_BYTES[descriptor.dtype]
            barrier.complete()

        self.scheduler.events.append(land)

    def tma_store(self, descriptor, where, view):
        where, task = [int(x) for x in where], self.task
        view.buffer.check_read()
        view.buffer.readers += 1

        def leave():
            inside, filled = descriptor.box(where)
            descriptor.array[inside] = view.array.reshape(descriptor.block_shape)[filled]
            view.buffer.readers -= 1
            task.stores.remove(leave)

        task.stores.append(leave)

        self.scheduler.events.append(leave)

    def tma_store_wait(self, pendings):
        stores = self.task.stores
        awaited = stores[: max(len(stores) - pendings, 0)]
        self.scheduler.block(lambda: not any(x in stores for x in awaited), "its stores")

    # ---------------------------------------------------------------------------------- products

    def warpgroup_mma(self, a, b, acc, *, use_acc=True, is_async=False):
        buffers = [x.buffer for x in (a, b) if isinstance(x, View)]
        for buffer in buffers:
            buffer.check_read()
            buffer.readers += 1
        if isinstance(acc, types.SimpleNamespace):  # a product follows another in its accumulator
            acc = acc.value
        with np.errstate(all="ignore"):
            result = plain(a.array) @ plain(b.array)
            result = result + acc.array if use_acc else result
        token = types.SimpleNamespace(value=Value(result), buffers=buffers, done=False)
        self.task.products.append(token)
        if is_async:
            return token
        return self.warpgroup_mma_wait(0, deps=[token])

    def warpgroup_mma_wait(self, num_outstanding=0, deps=()):
        self.scheduler.block(lambda: True, "")
        products = self.task.products
        while len(products) > num_outstanding:
            token = products.pop(0)
            token.done = True
            for buffer in token.buffers:
                buffer.readers -= 1
        results = []
        for x in deps:
            if isinstance(x, types.SimpleNamespace):
                if not x.done:
                    raise ProtocolError("a product is used before it was waited for")
                x = x.value
            results.append(x)
        return results[0] if len(results) == 1 else tuple(results)

    # ------------------------------------------------------------------------------ the language

    def _language(self) -> Any:
        def reduction(function):
            def reduce(x, axis):
                with np.errstate(all="ignore"):
                    return Value(function(plain(x), axis=axis))

            return reduce

        def elementwise(function):
            def apply(*operands):
                with np.errstate(all="ignore"):
                    return Value(function(*map(plain, operands)))

            return apply

        def allocate(dtype, shape, layout):
            if dtype == "int64":
                barriers = [Mbarrier() for _ in range(shape[0])]
                self.mbarriers += barriers
                return types.SimpleNamespace(index=lambda i: barriers[int(i)])
            return Stages(shape, dtype)

        def store(pointer, value, mask=None):
            index = np.asarray(pointer.offset).astype(np.int64)
            keep = np.broadcast_to(True if mask is None else plain(mask), index.shape)
            values = np.broadcast_to(plain(value), index.shape)
            pointer.array[index[keep]] = values[keep]

        def load(pointer, mask=None, other=0):
            index = np.asarray(pointer.offset).astype(np.int64)
            keep = np.broadcast_to(True if mask is None else plain(mask), index.shape)
            return Value(np.where(keep, pointer.array[np.where(keep, index, 0)], other))

        def atomic_add(pointer, value, sem=None):
            old = pointer.array[int(pointer.offset)].copy()
            pointer.array[int(pointer.offset)] += plain(value)
            return Value(old)

        nothing = lambda *_, **__: None  # noqa: E731
        names = ("bfloat16", "float16", "float32", "int32", "int64")
        return types.SimpleNamespace(
            **{name: name for name in names},
            constexpr=constexpr,
            to_tensor=Value,
            static_range=range,
            static_assert=nothing,
            minimum=elementwise(np.minimum),
            maximum=elementwise(np.maximum),
            where=elementwise(np.where),
            exp2=elementwise(np.exp2),
            log=elementwise(np.log),
            abs=elementwise(np.abs),
            max=reduction(np.max),
            sum=reduction(np.sum),
            arange=lambda start, end, layout=None: Value(np.arange(start, end)),
            zeros=lambda shape, dtype, layout=None: Value(np.zeros(shape), dtype),
            full=lambda shape, value, dtype, layout=None: Value(np.full(shape, plain(value))),
            convert_layout=lambda x, layout: x,
            program_id=lambda axis: Value(self.task.cta),
            num_programs=lambda axis: Value(self.grid),
            allocate_shared_memory=allocate,
            load=load,
            store=store,
            atomic_add=atomic_add,
            warp_specialize=self.warp_specialize,
            NVMMADistributedLayout=nothing,
            DotOperandLayout=nothing,
            SliceLayout=nothing,
            BlockedLayout=nothing,
            SwizzledSharedLayout=nothing,
        )
