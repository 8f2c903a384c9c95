"""Pieces that the Hopper backward kernels share: conversions, column vectors, order of the blocks, stores."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

MAGIC = gl.constexpr(12582912.0)
# Arguments whose divisibility is not worth another compilation.
SIZES = ["KV_HEADS", "N_Q", "N_K", "BLOCKS", "HEADS", "HEADS_PER_GROUP"]


@gluon.jit
def exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def magic_float(x):
    """int32 below 2^22 -> float32 plus MAGIC: the conversion instruction runs at the rate of the exponentials."""
    return (x + 0x4B400000).to(gl.float32, bitcast=True)


@gluon.jit
def short_scale(scale):
    """scale to 22 bits, so that its product with MAGIC is exact."""
    return (scale.to(gl.int32, bitcast=True) & -4).to(gl.float32, bitcast=True)


@gluon.jit
def column_vector(memory, layout: gl.constexpr):
    """A [64] vector stored in that order, by 16-byte loads."""
    load: gl.constexpr = gl.DistributedLinearLayout(
        [[1], [2], [16], [32]], [[4], [8], [0], [0], [0]], [[0], [0]], [], [64]
    )
    x = gl.reshape(memory.load(load), [4, 4, 2, 2])
    return gl.convert_layout(gl.reshape(gl.permute(x, (0, 2, 1, 3)), [64]), layout, assert_trivial=True)


@gluon.jit
def key_block(pid, BLOCKS, HEADS, HEADS_PER_GROUP):
    """Heads in groups whose operands fit the L2 cache; within a group the blocks with the most queries come first."""
    per_group = BLOCKS * HEADS_PER_GROUP
    group = pid // per_group
    rest = pid - group * per_group
    heads = gl.minimum(HEADS_PER_GROUP, HEADS - group * HEADS_PER_GROUP)
    block = rest // heads
    return group * HEADS_PER_GROUP + rest - block * heads, block


@gluon.jit
def store_rows(pointer, x, rows, tokens, stride, layout: gl.constexpr):
    columns = gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
    pointers = pointer + rows.to(gl.int64)[:, None] * stride + columns[None, :]
    gl.store(pointers, x.to(pointer.dtype.element_ty), mask=(rows < tokens)[:, None])
