"""The Hopper forward on a machine without a GPU: its schedule run in numpy, and its compilation for sm_90.

The kernel's own source is executed with stand-ins for Gluon: one thread per warp-specialized partition, barriers that
count arrivals and bytes, copies that fill out-of-range rows with zeros, products that read shared memory only when they
are waited for (as late as the hardware may). Masks, tile order, phases and coordinates are the kernel's; a deadlock, a
buffer freed too early, an access out of bounds or an unwritten output fails. Layouts are not modelled.
"""

import math
import re
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import compile
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

import sagekernels
from sagekernels import hopper_forward
from sagekernels.reference import document_bounds, twin_forward

SOURCE = Path(sagekernels.__file__).with_name("hopper_forward.py")
DEADLOCK_SECONDS = 60


class Value:
    """A Gluon tensor or scalar: a numpy array with Gluon's conversions."""

    def __init__(self, data):
        self.data = np.asarray(data)
        self.shape = self.data.shape

    def to(self, dtype, bitcast=False):
        if bitcast:  # numpy has widened what came of a Python integer
            return Value((self.data.astype(np.int32) if self.data.dtype == np.int64 else self.data).view(dtype))
        return Value(self.data.astype(dtype))

    def __getitem__(self, key):
        return Value(self.data[key])

    def __bool__(self):
        return bool(self.data)

    def __index__(self):
        return int(self.data)


def raw(x):
    return x.data if isinstance(x, Value) else x


def operator(name):
    def method(self, other):
        with np.errstate(all="ignore"):
            return Value(getattr(np, name)(*(np.asarray(raw(x)) for x in (self, other))))

    return method


for symbol, ufunc in {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide", "floordiv": "floor_divide",
    "mod": "remainder", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
}.items():  # fmt: skip
    forward = operator(ufunc)
    setattr(Value, f"__{symbol}__", forward)
    setattr(Value, f"__r{symbol}__", lambda self, other, f=forward: f(Value(other), self))
for symbol, ufunc in {"lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal", "eq": "equal"}.items():
    setattr(Value, f"__{symbol}__", operator(ufunc))
Value.__neg__ = lambda self: Value(-self.data)


class Pointer:
    """Elements of a flat array, with bounds."""

    def __init__(self, array, offset=0):
        self.array, self.offset = array, raw(offset)
        self.dtype = types.SimpleNamespace(element_ty=array.dtype)

    def __add__(self, offset):
        return Pointer(self.array, self.offset + raw(offset))


def load(pointer, mask=True, other=0.0):
    index, mask = np.broadcast_arrays(pointer.offset, raw(mask))
    assert ((index >= 0) & (index < len(pointer.array)))[mask].all(), "load out of bounds"
    return Value(np.where(mask, pointer.array[np.where(mask, index, 0)], np.asarray(other, pointer.array.dtype)))


def store(pointer, value, mask=True):
    index, mask, value = np.broadcast_arrays(pointer.offset, raw(mask), raw(value))
    assert ((index >= 0) & (index < len(pointer.array)))[mask].all(), "store out of bounds"
    pointer.array[index[mask]] = value[mask]


class Shared:
    """Shared memory, poisoned."""

    def __init__(self, array):
        self.array, self.dtype = array, array.dtype

    def index(self, i):
        return Shared(self.array[int(raw(i))])

    def permute(self, order):
        return Shared(self.array.transpose(order))

    def reshape(self, shape):
        return Shared(self.array.reshape(shape))

    def load(self, layout):
        return Value(self.array.copy())


class Barrier:
    """An mbarrier: a phase ends when the expected arrivals and bytes are there."""

    changed = threading.Condition()

    def init(self, count):
        self.count, self.pending, self.bytes, self.phase = count, count, 0, 0

    def add(self, arrivals, size):
        with Barrier.changed:
            self.pending -= arrivals
            self.bytes += size
            assert self.pending >= 0 and (self.pending > 0 or self.bytes >= 0)
            if self.pending == 0 and self.bytes == 0:
                self.pending, self.phase = self.count, self.phase ^ 1
                Barrier.changed.notify_all()

    def wait(self, phase):
        with Barrier.changed:
            if not Barrier.changed.wait_for(lambda: self.phase != int(raw(phase)), DEADLOCK_SECONDS):
                raise TimeoutError("deadlock: a barrier's phase never ended")


class Barriers:
    def __init__(self, number):
        self.barriers = [Barrier() for _ in range(number)]

    def index(self, i):
        return self.barriers[int(raw(i))]


class Descriptor:
    """A TMA descriptor: copies of one block, zeros outside."""

    layout = None

    def __init__(self, array, block):
        self.array, self.block, self.dtype = array, block, array.dtype

    def copy(self, at, barrier, memory):
        at = [int(raw(x)) for x in at]
        assert all(x >= 0 for x in at)
        block = np.zeros(self.block, self.dtype)
        part = self.array[tuple(slice(x, x + size) for x, size in zip(at, self.block, strict=True))]
        block[tuple(slice(0, size) for size in part.shape)] = part
        memory.array[...] = block
        barrier.add(0, -block.nbytes)


class Pending:
    """A product in flight: it reads its operands when it is waited for."""

    def __init__(self, a, b, acc, use_acc):
        self.operands = a, b, acc, use_acc

    def result(self):
        a, b, acc, use_acc = self.operands
        kind = np.int32 if raw(acc).dtype == np.int32 else np.float32
        a = a.array if isinstance(a, Shared) else raw(a)
        product = (a.astype(np.float64) @ b.array.astype(np.float64)).astype(kind)
        return Value(product + raw(acc) if use_acc else product)


def product_wait(outstanding, deps):
    done = [x.result() if isinstance(x, Pending) else x for x in deps]
    return done[0] if len(done) == 1 else tuple(done)


def exp2(asm, constraints, args, dtype, is_pure, pack):
    assert asm.startswith("ex2.approx.ftz.f32")
    with np.errstate(all="ignore"):
        return Value(np.exp2(raw(args[0]).astype(np.float32)))


class Machine:
    """Stand-in for `gl`, for the program with index `pid` of `programs`."""

    int8, int32, int64, float16, bfloat16, float32 = np.int8, np.int32, np.int64, np.float16, "bf16", np.float32
    load, store, static_range = staticmethod(load), staticmethod(store), range
    inline_asm_elementwise = staticmethod(exp2)
    NVMMADistributedLayout = SliceLayout = DotOperandLayout = DistributedLinearLayout = staticmethod(lambda *_: None)

    @staticmethod
    def constexpr(x):
        return x

    def program_id(self, axis):
        return Value(np.int64(self.pid))

    def num_programs(self, axis):
        return Value(np.int64(self.programs))

    def allocate_shared_memory(self, dtype, shape, layout):
        if layout == "barrier":
            return Barriers(shape[0])
        return Shared(np.full(shape, 77 if dtype == np.int8 else np.nan, dtype))

    def warp_specialize(self, partitions, warps, registers):
        failures = []

        def run(function, arguments):
            try:
                function(*arguments)
            except (AssertionError, IndexError, TimeoutError, TypeError, ValueError) as error:
                failures.append(error)

        threads = [threading.Thread(target=run, args=partition, daemon=True) for partition in partitions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * DEADLOCK_SECONDS)
        if failures:
            raise failures[0]

    minimum = staticmethod(lambda a, b: Value(np.fmin(raw(a), raw(b))))
    maximum = staticmethod(lambda a, b: Value(np.fmax(raw(a), raw(b))))
    cdiv = staticmethod(lambda a, b: -(-a // b))
    arange = staticmethod(lambda start, end, layout: Value(np.arange(start, end, dtype=np.int64)))
    zeros = staticmethod(lambda shape, dtype, layout: Value(np.zeros(shape, dtype)))
    full = staticmethod(lambda shape, value, dtype, layout: Value(np.full(shape, value, dtype)))
    where = staticmethod(lambda c, a, b: Value(np.where(raw(c), raw(a), raw(b))))
    sum = staticmethod(lambda x, axis: Value(raw(x).sum(axis, dtype=np.float32)))
    max = staticmethod(lambda x, axis: Value(np.fmax.reduce(raw(x), axis)))
    log2 = staticmethod(lambda x: Value(np.log2(raw(x))))
    reshape = staticmethod(lambda x, shape: Value(raw(x).reshape(shape)))
    permute = staticmethod(lambda x, order: Value(raw(x).transpose(order)))
    split = staticmethod(lambda x: (Value(raw(x)[..., 0]), Value(raw(x)[..., 1])))
    convert_layout = staticmethod(lambda x, layout: x)


MBARRIER = types.SimpleNamespace(
    MBarrierLayout=lambda: "barrier",
    init=lambda barrier, count: barrier.init(count),
    expect=lambda barrier, size: barrier.add(1, size),
    arrive=lambda barrier, count: barrier.add(count, 0),
    wait=lambda barrier, phase, pred=True: barrier.wait(phase) if pred else None,
)


def kernel_on(machine):
    """The device functions of hopper_forward.py, on this machine."""
    text = SOURCE.read_text()
    device = text[text.index("_SIZES = ") : text.index("@triton.jit")]
    device = re.sub(r"@gluon\.jit(\(.*\))?", "", device)
    names = {
        "gl": machine,
        "mbarrier": MBARRIER,
        "tma": types.SimpleNamespace(
            async_copy_global_to_shared=lambda d, at, barrier, memory: d.copy(at, barrier, memory)
        ),
        "warpgroup_mma": lambda a, b, acc, use_acc=True, is_async=True: Pending(a, b, acc, use_acc),
        "warpgroup_mma_wait": product_wait,
    }
    exec(device, names)
    return names["_forward_kernel"], names["CONSUMERS"]


def emulated_forward(q, k, v, causal, scale, programs, heads_per_group, stages, cu_seqlens=None):
    """o [B, N_q, H, D] and lse [B, H, N_q] of the kernel on the twin's codes."""
    batch, n_q, heads, head_dim = q.shape
    n_k, kv_heads = k.shape[1:3]
    options = {
        "causal": causal,
        "scale": scale,
        "smooth_k": True,
        "smooth_q": False,
        "cu_seqlens": cu_seqlens,
        "recipe": "fine",
    }
    o, saved = twin_forward(q, k, v, **options)
    block_n = 128
    padded = -(-n_k // block_n) * block_n
    ordered = np.zeros((batch * kv_heads, padded), np.float32)
    position = [16 * (t // 16) + 4 * (t % 8 // 2) + 2 * (t % 16 // 8) + t % 2 for t in range(n_k)]
    ordered[:, position] = saved.k.scale.flatten(0, 1).numpy()
    out = np.full(o.numel(), np.nan, np.float16)
    lse = np.full(saved.lse.numel(), np.nan, np.float32)
    bounds = (None, None)
    if cu_seqlens is not None:
        bounds = [Pointer(x.numpy()) for x in document_bounds(cu_seqlens, n_q)]
    machine = Machine()
    kernel, consumers = kernel_on(machine)
    blocks = -(-n_q // (64 * consumers))
    for pid in range(min(programs, blocks * batch * heads)):
        machine.pid, machine.programs = pid, programs
        kernel(
            Descriptor(saved.q.codes.flatten(0, 2).numpy(), [64, head_dim]),
            Descriptor(saved.k.codes.flatten(0, 2).numpy(), [block_n, head_dim]),
            Descriptor(v.flatten(2).numpy(), [1, block_n, head_dim]),
            Descriptor(ordered.reshape(-1), [block_n]),
            Pointer(saved.q.scale.flatten().numpy()), *bounds, Pointer(out), Pointer(lse),
            np.float32(scale * math.log2(math.e)),
            heads, kv_heads, batch * heads, n_q, n_k, padded, blocks, heads_per_group, blocks * batch * heads, head_dim,
            n_q * heads * head_dim, heads * head_dim, head_dim,
            HEAD_DIM=head_dim, BLOCK_N=block_n, STAGES=stages, IS_CAUSAL=causal, PACKED=cu_seqlens is not None,
            REGISTERS=240,
        )  # fmt: skip
    return torch.from_numpy(out).view(o.shape), torch.from_numpy(lse).view(saved.lse.shape), o, saved.lse


@pytest.mark.parametrize(
    ("batch", "n_q", "n_k", "heads", "kv_heads", "causal", "programs", "heads_per_group", "stages"),
    [
        (1, 384, 384, 2, 1, True, 2, 2, 3),
        (2, 300, 300, 2, 2, False, 3, 3, 4),
        (1, 130, 333, 3, 1, True, 4, 2, 3),
        (1, 1, 257, 1, 1, True, 8, 1, 3),
        (1, 257, 256, 1, 1, False, 1, 5, 2),
        (2, 64, 64, 1, 1, True, 1, 1, 4),
        (1, 700, 700, 1, 1, True, 2, 1, 2),
    ],
)
def test_schedule(batch, n_q, n_k, heads, kv_heads, causal, programs, heads_per_group, stages):
    generator = torch.Generator().manual_seed(n_q)
    q, k, v = (
        torch.randn(batch, n, h, 64, generator=generator).half()
        for n, h in ((n_q, heads), (n_k, kv_heads), (n_k, kv_heads))
    )
    o, lse, o_twin, lse_twin = emulated_forward(q, k + 1, v, causal, 0.125, programs, heads_per_group, stages)
    assert ((o.float() - o_twin.float()).norm() / o_twin.float().norm()).item() < 1e-3
    assert torch.allclose(lse, lse_twin, atol=1e-4)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "documents", [(700,), (1, 0, 63, 64, 300, 1, 271), (1,) * 130, (129, 256, 127), (600, 30, 70), (5, 195)]
)
def test_documents(documents, causal):
    n = sum(documents)
    generator = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(1, n, 2 if i == 0 else 1, 64, generator=generator).half() for i in range(3))
    cu_seqlens = torch.tensor([0, *documents]).cumsum(0).to(torch.int32)
    o, lse, o_twin, lse_twin = emulated_forward(q, k, v, causal, 0.125, 3, 2, 3, cu_seqlens)
    assert ((o.float() - o_twin.float()).norm() / o_twin.float().norm()).item() < 1e-3
    assert torch.allclose(lse, lse_twin, atol=1e-4)


def test_non_finite_values_propagate_and_zeros_do_not():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 200, 1, 64, generator=generator).half() for _ in range(3))
    q[0, 20], q[0, 30, 0, 5], q[0, 40, 0, 6] = 0, math.nan, math.inf
    o, lse, o_twin, lse_twin = emulated_forward(q, k, v, True, 0.125, 1, 1, 3)
    assert torch.equal(o.isnan().any(-1).flatten().nonzero().flatten(), torch.tensor([30, 40]))
    assert torch.equal(lse.isnan(), lse_twin.isnan())
    assert torch.allclose(o[0, 20].float(), o_twin[0, 20].float(), atol=1e-3)


def descriptor_type(name, block, kind):
    layout = NVMMASharedLayout.get_default_for(block, hopper_forward._GLUON_TYPES[kind])
    return f"tensordesc<{name}{block},{layout!r}>"


@pytest.mark.parametrize(("head_dim", "causal", "packed"), [(64, True, True), (128, True, False), (128, False, False)])
def test_compiles(head_dim, causal, packed):
    """Both kinds of matrix product are warpgroup instructions, and shared memory is enough."""
    block_n, stages = hopper_forward.SCHEDULES[head_dim]
    kernel = hopper_forward._forward_kernel
    signature = dict.fromkeys(kernel.arg_names, "i32")
    signature["q_desc"] = descriptor_type("i8", [64, head_dim], torch.int8)
    signature["k_desc"] = descriptor_type("i8", [block_n, head_dim], torch.int8)
    signature["v_desc"] = descriptor_type("bf16", [1, block_n, head_dim], torch.bfloat16)
    signature["ks_desc"] = descriptor_type("fp32", [block_n], torch.float32)
    signature.update(Q_SCALE="*fp32", STARTS="*i32", ENDS="*i32", O="*bf16", LSE="*fp32", factor="fp32")
    constants = {"HEAD_DIM": head_dim, "BLOCK_N": block_n, "STAGES": stages, "IS_CAUSAL": causal, "PACKED": packed}
    constants["REGISTERS"] = hopper_forward.REGISTERS
    signature.update(dict.fromkeys(constants, "constexpr"))
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name.startswith("stride_o")
    }
    compiled = compile(
        GluonASTSource(kernel, signature, constants, aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 4, "maxnreg": hopper_forward.START_REGISTERS},
    )
    assert compiled.metadata.shared <= 227 * 1024
    ptx = compiled.asm["ptx"]
    assert f"wgmma.mma_async.sync.aligned.m64n{block_n}k32.s32.s8.s8" in ptx
    assert f"wgmma.mma_async.sync.aligned.m64n{head_dim}k16.f32.bf16.bf16" in ptx
