"""The Hopper backward on a machine without a GPU: its schedule run in numpy, and its compilation for sm_90.

As in test_hopper_forward.py, whose stand-ins for Gluon it uses.
"""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import compile
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

import sagekernels
from sagekernels import hopper, hopper_backward, hopper_dkdv, hopper_dq, sage_attention
from sagekernels.reference import RECIPES, document_bounds, twin_backward, twin_forward
from sagekernels.testing import Shape, random_inputs, results_of
from test_hopper_forward import MBARRIER, Barrier, Descriptor, Machine, Pending, Pointer, Shared, product_wait, raw

FOLDER = Path(sagekernels.__file__).parent
COLUMN_ORDER = [16 * (p // 16) + 8 * (p // 2 % 2) + 2 * (p // 4 % 4) + p % 2 for p in range(64)]


class Memory(Shared):
    """Shared memory that can be sliced and written."""

    def index(self, i):
        return Memory(super().index(i).array)

    def permute(self, order):
        return Memory(super().permute(order).array)

    def slice(self, start, length, dim):
        return Memory(self.array[(slice(None),) * dim + (slice(start, start + length),)])

    def store(self, value):
        self.array[...] = raw(value)


class Gluon(Machine):
    """What the backward uses beyond the forward."""

    convert_layout = staticmethod(lambda x, layout, assert_trivial=False: x)

    def allocate_shared_memory(self, dtype, shape, layout):
        if layout == "barrier" and len(shape) == 1:
            return Barrier()
        memory = super().allocate_shared_memory(dtype, shape, layout)
        return Memory(memory.array) if isinstance(memory, Shared) else memory

    @staticmethod
    def atomic_add(pointer, value, sem):
        np.add.at(pointer.array, pointer.offset, raw(value))


def kernels_on(machine):
    """The device functions of the backward, on this machine."""
    text = "\n".join((FOLDER / f"hopper_{name}.py").read_text() for name in ("pieces", "dkdv", "dq"))
    text = re.sub(r"^from .*? import (\([^)]*\)|.*)$", "", text, flags=re.MULTILINE)
    text = re.sub(r"@gluon\.jit(\(.*\))?", "", text)
    copies = type(
        "", (), {"async_copy_global_to_shared": staticmethod(lambda d, at, bar, memory: d.copy(at, bar, memory))}
    )
    names = {
        "gl": machine, "mbarrier": MBARRIER, "tma": copies, "LOG2E": math.log2(math.e),
        "fence_async_shared": lambda: None, "warpgroup_mma_wait": product_wait,
        "warpgroup_mma": lambda a, b, acc, use_acc=True, is_async=True: Pending(a, b, acc, use_acc),
    }  # fmt: skip
    exec(text, names)
    return names["dkdv_kernel"], names["dq_kernel"]


def columns(x, tiles, value=0.0):
    """[heads, N] -> [heads, tiles, 64] in the order of column vectors."""
    padded = torch.nn.functional.pad(x.flatten(0, 1), (0, tiles * 64 - x.shape[-1]), value=value)
    return padded.unflatten(1, (tiles, 64))[..., COLUMN_ORDER]


def emulated_backward(do, v, o, saved, causal, scale, cu_seqlens, fused, heads_per_group, stages, consumers):
    """dq, dk, dv of the kernels."""
    batch, n_q, heads, head_dim = do.shape
    n_k, kv_heads = v.shape[1:3]
    q_tiles, k_tiles, group = -(-n_q // 64), -(-n_k // 64), heads // kv_heads
    delta = (do.float() * o.float()).sum(-1).transpose(1, 2).contiguous()
    log2e = math.log2(math.e)
    vectors = torch.stack(
        (
            columns(saved.q.scale * (scale * log2e), q_tiles),
            columns(saved.lse * log2e, q_tiles, math.inf),
            columns(delta, q_tiles),
        ),
        2,
    )
    q16, k16 = (x.dequantized().half().flatten(0, 2).numpy() for x in (saved.q, saved.k))
    box = [64, head_dim]
    q8 = Descriptor(saved.q.codes.flatten(0, 2).numpy(), box)
    k8 = Descriptor(saved.k.codes.flatten(0, 2).numpy(), box)
    do_rows, v_rows = (Descriptor(x.flatten(0, 1).flatten(1).numpy(), box) for x in (do, v))
    dq, dk, dv = (np.full(x.numel(), np.nan, np.float16) for x in (do, v, v))
    dq_sum = np.zeros(batch * heads * q_tiles * 64 * head_dim, np.float32)
    packed = cu_seqlens is not None
    bounds = [Pointer(x.numpy()) for x in document_bounds(cu_seqlens, n_k)] if packed else [None, None]
    machine = Gluon()
    dkdv_kernel, dq_kernel = kernels_on(machine)
    strides = lambda h: (h * head_dim, head_dim)  # noqa: E731
    blocks = -(-n_k // 128)
    for machine.pid in reversed(range(blocks * batch * kv_heads)):
        dkdv_kernel(
            q8, Descriptor(q16, box), do_rows, Descriptor(vectors.flatten().numpy(), [64]), k8, v_rows,
            Descriptor(k16, [128, head_dim]), Pointer(saved.k.scale.flatten().numpy()), *bounds, Pointer(dk),
            Pointer(dv), Pointer(dq_sum), np.float32(scale), kv_heads, group, n_q, n_k, q_tiles, blocks,
            batch * kv_heads, heads_per_group, head_dim, head_dim, n_k * kv_heads * head_dim, *strides(kv_heads),
            HEAD_DIM=head_dim, STAGES=stages, IS_CAUSAL=causal, PACKED=packed, FUSED=fused, K_REGS=fused,
        )  # fmt: skip
    if fused:
        sums = torch.from_numpy(dq_sum).view(batch, heads, q_tiles, 8, 4, 8, 4, 2, 2) * scale
        sums = sums.permute(0, 1, 2, 4, 7, 5, 3, 6, 8).reshape(batch, heads, q_tiles * 64, 64)[:, :, :n_q]
        return sums.transpose(1, 2), *(torch.from_numpy(x).view(v.shape) for x in (dk, dv))
    blocks = -(-n_q // (64 * consumers))
    for machine.pid in range(blocks * batch * heads):
        dq_kernel(
            q8, do_rows, k8, Descriptor(k16, box), v_rows,
            Descriptor(columns(saved.k.scale, k_tiles).flatten().numpy(), [64]),
            Pointer(saved.q.scale.flatten().numpy()), Pointer(saved.lse.flatten().numpy()),
            Pointer(delta.flatten().numpy()), *bounds, Pointer(dq), np.float32(scale), kv_heads, group, n_q, n_k,
            k_tiles, blocks, batch * heads, heads_per_group, head_dim, head_dim, n_q * heads * head_dim,
            *strides(heads),
            HEAD_DIM=head_dim, STAGES=stages, CONSUMERS=consumers, IS_CAUSAL=causal, PACKED=packed, REGISTERS=240,
        )  # fmt: skip
    return tuple(torch.from_numpy(x).view(shape) for x, shape in ((dq, do.shape), (dk, v.shape), (dv, v.shape)))


@pytest.mark.parametrize(
    (
        "batch",
        "n_q",
        "n_k",
        "heads",
        "kv_heads",
        "causal",
        "documents",
        "fused",
        "heads_per_group",
        "stages",
        "consumers",
    ),
    [
        (1, 320, 320, 2, 1, True, (), False, 1, 2, 3),
        (2, 300, 300, 2, 2, True, (), True, 3, 3, 2),
        (2, 200, 333, 1, 1, False, (), True, 2, 2, 2),
        (1, 130, 333, 3, 1, True, (), True, 2, 3, 2),
        (2, 130, 333, 2, 1, True, (), False, 4, 3, 2),
        (1, 1, 257, 1, 1, True, (), False, 1, 2, 2),
        (2, 257, 70, 1, 1, False, (), False, 5, 2, 3),
        (1, 64, 64, 1, 1, True, (), True, 1, 3, 2),
        (1, 420, 420, 2, 1, True, (100, 0, 1, 63, 220, 36, 0), False, 2, 2, 3),
        (1, 420, 420, 1, 1, False, (100, 0, 1, 63, 220, 36, 0), False, 1, 3, 2),
        (1, 400, 400, 1, 1, True, (200, 200), True, 1, 2, 2),
        (1, 390, 390, 2, 2, False, (10,) * 39, True, 1, 2, 2),
        (1, 390, 390, 1, 1, False, (10,) * 39, False, 1, 2, 3),
    ],
)
def test_schedule(
    batch, n_q, n_k, heads, kv_heads, causal, documents, fused, heads_per_group, stages, consumers
):  # fmt: skip
    generator = torch.Generator().manual_seed(n_q)
    q, k, v, do = (
        torch.randn(batch, n, h, 64, generator=generator).half()
        for n, h in ((n_q, heads), (n_k, kv_heads), (n_k, kv_heads), (n_q, heads))
    )
    cu_seqlens = torch.tensor((0, *documents)).cumsum(0).int() if documents else None
    options = {"causal": causal, "scale": 0.125, "cu_seqlens": cu_seqlens, "recipe": "scores"}
    o, saved = twin_forward(q, k + 1, v, smooth_k=True, smooth_q=False, **options)
    expected = twin_backward(do, None, v, o, saved, **options)
    got = emulated_backward(do, v, o, saved, causal, 0.125, cu_seqlens, fused, heads_per_group, stages, consumers)
    for x, y in zip(got, expected, strict=True):
        assert ((x.float() - y.float()).norm() / y.float().norm()).item() < 4e-3


def test_serves_the_recipe_without_int8_gradients():
    assert [name for name, rules in RECIPES.items() if not rules.int8_gradients] == ["scores"]


def test_backend_leaves_other_calls_to_the_portable_kernels(monkeypatch):
    monkeypatch.setattr(hopper, "triton_forward", twin_forward)
    monkeypatch.setattr(hopper, "triton_backward", twin_backward)
    inputs = random_inputs(Shape(1, 70, 70, 2, 1, 64, documents=(30, 40)))
    options = {"recipe": "scores", "cu_seqlens": Shape(documents=(30, 40)).cu_seqlens()}
    ours, twin = (results_of(sage_attention, *inputs, backend=backend, **options) for backend in ("hopper", "twin"))
    assert all(torch.equal(a, b) for a, b in zip(ours, twin, strict=True))


def compiled_for_hopper(kernel, blocks, pointers, constants, maxnreg):
    signature = dict.fromkeys(kernel.arg_names, "i32")
    for name, (type_name, block, kind) in blocks.items():
        layout = NVMMASharedLayout.get_default_for(block, hopper_backward._GLUON_TYPES[kind])
        signature[name] = f"tensordesc<{type_name}{block},{layout!r}>"
    signature.update(pointers, scale="fp32", **dict.fromkeys(constants, "constexpr"))
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name.startswith("stride_")
    }
    return compile(
        GluonASTSource(kernel, signature, constants, aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 4, "maxnreg": maxnreg},
    )


@pytest.mark.parametrize(
    ("head_dim", "packed", "fused"), [(64, False, True), (64, True, False), (128, False, False), (128, True, False)]
)
def test_compiles(head_dim, packed, fused):
    """P and dS reach the matrix instructions in registers, sums leave in 16-byte words, shared memory suffices."""
    plan = hopper_backward.SCHEDULES[head_dim]
    codes, wide = ("i8", [64, head_dim], torch.int8), ("bf16", [64, head_dim], torch.bfloat16)
    vector = ("fp32", [64], torch.float32)
    blocks = {"q8_desc": codes, "q_desc": wide, "do_desc": wide, "vec_desc": vector, "k8_desc": codes, "v_desc": wide}
    blocks["k_desc"] = ("bf16", [128, head_dim], torch.bfloat16)
    constants = {"HEAD_DIM": head_dim, "STAGES": plan.stages, "IS_CAUSAL": True, "PACKED": packed, "FUSED": fused}
    constants["K_REGS"] = plan.k_in_registers
    pointers = {"KS": "*fp32", "STARTS": "*i32", "ENDS": "*i32", "DK": "*bf16", "DV": "*bf16", "DQ": "*fp32"}
    compiled = compiled_for_hopper(hopper_dkdv.dkdv_kernel, blocks, pointers, constants, 168)
    assert compiled.metadata.shared <= 227 * 1024
    ptx = compiled.asm["ptx"]
    assert "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8" in ptx
    assert re.search(rf"m64n{head_dim}k16\.f32\.bf16\.bf16 {{[^}}]*}}, {{%r", ptx)
    assert ("red.global.gpu.relaxed.v4.f32.add" in ptx or ".v4.f32" in ptx) or not fused
    blocks = {"q8_desc": codes, "do_desc": wide, "k8_desc": codes, "k_desc": wide, "v_desc": wide, "ks_desc": vector}
    constants = {"HEAD_DIM": head_dim, "STAGES": plan.dq_stages, "CONSUMERS": plan.dq_consumers, "IS_CAUSAL": True}
    constants.update(PACKED=packed, REGISTERS={2: 240, 3: 160}[plan.dq_consumers])
    pointers = {"QS": "*fp32", "LSE": "*fp32", "DELTA": "*fp32", "STARTS": "*i32", "ENDS": "*i32", "DQ": "*bf16"}
    maxnreg = {2: 168, 3: 128}[plan.dq_consumers]
    compiled = compiled_for_hopper(hopper_dq.dq_kernel, blocks, pointers, constants, maxnreg)
    assert compiled.metadata.shared <= 227 * 1024
    assert re.search(rf"m64n{head_dim}k16\.f32\.bf16\.bf16 {{[^}}]*}}, {{%r", compiled.asm["ptx"])
