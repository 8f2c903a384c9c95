"""FP4 attention: its rounding number by number, its groups by hand, its error against float64, and bad calls."""

import itertools
import math

import pytest
import torch

from sagekernels import attention_reference, document_bounds, fp4_attention
from sagekernels.fp4.quantize import (
    E2M1,
    FORMATS,
    e2m1_codes,
    e8m0_scale,
    head_unit,
    quantize_fp4,
    quantize_probabilities,
    round_e4m3,
)
from sagekernels.testing import Shape, cosine, random_inputs, rel_l2

# These are all e4m3 numbers from 0 to 448, written out from the format: exponent bias 7, 3 bits of mantissa, no
# infinity.
E4M3 = [m * 2.0**-9 for m in range(8)] + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)][:-1]


def nearest_even(x, numbers):
    """Return the index of the nearest of `numbers` (rising, exact in float64). For a tie it is the even index."""
    table = torch.tensor(numbers, dtype=torch.float64)
    distance = (x.double()[:, None] - table).abs()
    near = distance == distance.amin(1, keepdim=True)
    even = torch.arange(len(numbers)) % 2 == 0
    return torch.where(near.sum(1) == 2, (near & even).int().argmax(1), near.int().argmax(1))


def around(points):
    """Return the points, and their neighbours in float32."""
    x = torch.tensor(points, dtype=torch.float32)
    return torch.cat((x, x.nextafter(torch.tensor(math.inf)), x.nextafter(torch.tensor(0.0))))


def test_e4m3_is_exact_at_every_number_midpoint_and_neighbour():
    middles = [(a + b) / 2 for a, b in itertools.pairwise(E4M3)]
    x = around(E4M3 + middles + [1e-30, 449.0, 464.0, 465.0, 1e30, math.inf])
    assert len(E4M3) == 127 and E4M3[-1] == 448 and E4M3[1] == 2.0**-9
    expected = torch.tensor(E4M3)[nearest_even(x.clamp(max=448), E4M3)]
    assert torch.equal(round_e4m3(x), expected)
    assert round_e4m3(torch.tensor(math.nan)).isnan()


def test_e4m3_agrees_with_torchs_cast_on_a_million_numbers():
    x = torch.rand(1 << 20).mul(40).sub(20).exp2().clamp(max=448)
    assert torch.equal(round_e4m3(x), x.to(torch.float8_e4m3fn).float())


def test_every_float16_becomes_the_nearest_e2m1():
    """All positive float16 are tried with all e4m3 scales. The quotient is in float64, which orders them correctly."""
    x = torch.arange(0x7C00, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    middles = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(E2M1)], dtype=torch.float64)
    for s in E4M3[1:]:
        got = e2m1_codes(x, torch.tensor(s)).int()
        quotient = x.double() / s
        below, upto = torch.searchsorted(middles, quotient), torch.searchsorted(middles, quotient, right=True)
        assert torch.equal(got, torch.where(below % 2 == 0, below, upto).int()), s


def test_e2m1_ties_signs_and_saturation():
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.01, 1e30, -0.75, -5.0, -0.2, -0.0, 0.0])
    codes = e2m1_codes(x, torch.tensor(1.0))
    assert codes.tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 7, 10, 14, 0, 0, 0]
    assert e2m1_codes(x, torch.tensor(0.0)).tolist() == [0] * 14


def test_e8m0_scales():
    largest = torch.tensor([0.0, 2.0**-149, 2.0**-126, 1.0, 1.99, 2.0, 6.0, 7.99, 3.0e38])
    expected = [2.0**-127, 2.0**-127, 2.0**-127, 0.25, 0.25, 0.5, 1.0, 1.0, 2.0**125]
    assert e8m0_scale(largest).tolist() == expected


def test_a_group_by_hand():
    x = torch.tensor([6.0, -3.0, 1.2, 0.3] + [0.0] * 12 + [13.0, 0.5, -1.0])  # The last group is short.
    ours = quantize_fp4(x)
    assert ours.scale.tolist() == [1.0, 2.25]  # 13 / 6 = 2.1667 lies between 2.0 and 2.25.
    assert ours.dequantized().tolist() == [6.0, -3.0, 1.0, 0.5] + [0.0] * 12 + [13.5, 0.0, -1.125]
    mx = quantize_fp4(x, format="mxfp4")
    assert mx.scale.tolist() == [2.0]  # 13 / 2 saturates at 6.
    assert mx.dequantized().tolist() == [6.0, -3.0, 1.0, 0.0] + [0.0] * 12 + [12.0, 0.0, -1.0]


@pytest.mark.parametrize("format", FORMATS)
def test_groups_of_zeros_of_nan_and_of_infinity(format):
    group = FORMATS[format].group
    x = torch.full((4 * group,), 6.0)
    x[:group] = 0.0
    x[group + 3], x[2 * group + 5] = math.nan, math.inf
    values = quantize_fp4(x, format=format).dequantized().view(4, group)
    assert (values[0] == 0).all() and values[1].isnan().all() and values[2].isnan().all() and (values[3] == 6).all()


@pytest.mark.parametrize("format", FORMATS)
def test_rounding_is_bounded(format):
    """The error |x - phi(x)| is at most half the widest step, s, plus the part that saturation cuts. x / s is at most
    6.4 (e4m3, whose scale is at most 1/16 too small) or below 8 (e8m0)."""
    torch.manual_seed(0)
    x = torch.randn(64, 160) * torch.randn(64, 1).exp()
    ours = quantize_fp4(x, format=format, unit=head_unit(x))
    scale = ours.scale.repeat_interleave(ours.group, -1)
    assert ((ours.dequantized() - x).abs() <= scale * (2.0 if format == "mxfp4" else 1.0)).all()
    assert rel_l2(ours.dequantized(), x) < (0.16 if format == "mxfp4" else 0.11)


@pytest.mark.parametrize("power", [-60, -12, 0, 12, 60])
def test_a_unit_keeps_tiny_and_huge_heads(power):
    """A head's rounding does not depend on its size if the head has its unit. NVFP4 without a unit loses or cuts the
    head."""
    x = torch.randn(3, 50, 64)
    plain = quantize_fp4(x).dequantized()
    scaled = x * 2.0**power
    with_unit = quantize_fp4(scaled, unit=head_unit(scaled)).dequantized()
    assert torch.equal(with_unit, plain * 2.0**power)
    if power:
        assert rel_l2(quantize_fp4(scaled).dequantized(), scaled) > 0.12


def test_dequantized_numbers_are_bfloat16():
    x = torch.randn(64, 64).exp()
    for format in FORMATS:
        values = quantize_fp4(x, format=format).dequantized()
        assert torch.equal(values.bfloat16().float(), values)


def test_two_level_probabilities_keep_what_direct_ones_lose():
    p = torch.zeros(64)
    p[:16], p[16:32], p[32:48] = 1.0, math.exp(-6), math.exp(-12)
    direct, two = quantize_probabilities(p, two_level=False), quantize_probabilities(p)
    assert (direct[:16] == 1.03125).all() and (direct[16:] == 0).all()
    assert (two[:16] == 1).all() and ((two[:48] / p[:48] - 1).abs() < 0.35).all() and (two[48:] == 0).all()
    assert ((two[16:32] / p[16:32] - 1).abs() < 0.07).all()


SHAPES = [
    Shape(2, 200, 200, 4, 2, 32),
    Shape(1, 192, 192, 7, 1, 64, causal=False),
    Shape(1, 100, 333, 2, 1, 80),
    Shape(1, 133, 133, 2, 2, 96, documents=(5, 0, 25, 103, 0, 0)),
    Shape(1, 333, 333, 2, 2, 24, causal=False, documents=(5, 0, 125, 203, 0, 0)),
    Shape(1, 1, 77, 2, 2, 256),
    Shape(3, 65, 65, 1, 1, 16),
]


def by_hand(q, k, v, shape, scale):
    """Compute attention in float64 from the codes, one query at a time: no online softmax, no chunks, no padding."""
    n_q, n_k, group = shape.n_q, shape.n_k, shape.heads // shape.kv_heads
    document = torch.zeros(n_k)
    if shape.documents:
        document = torch.repeat_interleave(torch.arange(len(shape.documents)), torch.tensor(shape.documents))
    o = torch.empty(q.shape, dtype=torch.float64)

    def phi(x):
        return quantize_fp4(x, unit=head_unit(x)).dequantized()

    for b in range(shape.batch):
        for h in range(shape.heads):
            qs, ks, vs = q[b, :, h].float(), k[b, :, h // group].float(), v[b, :, h // group].float()
            ks = ks - ks.mean(0)
            means = torch.cat([t.mean(0, keepdim=True).expand_as(t) for t in qs.split(64)])
            q4, k4, v4 = (x.double() for x in (phi(qs - means), phi(ks), phi(vs.mT).mT))
            s = q4 @ k4.mT + means.double() @ ks.double().mT
            for i in range(n_q):
                last = i + n_k - n_q
                seen = torch.tensor([
                    (j <= last or not shape.causal) and (not shape.documents or document[j] == document[last])
                    for j in range(n_k)
                ])  # fmt: skip
                p = torch.exp((s[i] - s[i][seen].max()) * scale) * seen
                padded = torch.nn.functional.pad(p, (0, -n_k % 64))
                p4 = quantize_probabilities(padded.float()).double()[:n_k]
                o[b, i, h] = p4 @ v4 / p.sum()
    return o


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_its_definition(shape):
    """The results are equal, except that float32 sums of the scores may push a P at a midpoint to either code."""
    q, k, v, _ = random_inputs(shape, k_mean=2.0, dtype=torch.float32, seed=1)
    ours = fp4_attention(q, k, v, causal=shape.causal, cu_seqlens=shape.cu_seqlens())
    expected = by_hand(q, k, v, shape, shape.head_dim**-0.5)
    assert rel_l2(ours, expected) < 2e-3


@pytest.mark.parametrize(("format", "limit"), [("nvfp4", 0.2), ("mxfp4", 0.3)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_close_to_exact(shape, format, limit):
    q, k, v, _ = random_inputs(shape, k_mean=3.0)
    options = {"causal": shape.causal, "cu_seqlens": shape.cu_seqlens()}
    exact = attention_reference(q.double(), k.double(), v.double(), **options)
    ours = fp4_attention(q, k, v, **options, format=format)
    assert ours.dtype == q.dtype and ours.is_contiguous()
    assert rel_l2(ours, exact) < limit


def test_smoothing_cancels_exactly():
    """Means that all keys of a head or all queries of a tile share change nothing but float32 rounding."""
    q, k, v, _ = random_inputs(Shape(1, 128, 128, 2, 2, 64), dtype=torch.float32)
    exact = attention_reference(q.double(), (k + 30).double(), v.double())
    assert cosine(fp4_attention(q, k + 30, v), exact) > 0.97
    assert cosine(fp4_attention(q, k + 30, v, smooth_k=False), exact) < 0.9
    k = k - k.mean(-1, keepdim=True)  # Scores do not see the shift of Q, but its codes do.
    shifted = attention_reference((q + 30).double(), k.double(), v.double())
    assert cosine(fp4_attention(q + 30, k, v), shifted) > 0.97
    assert cosine(fp4_attention(q + 30, k, v, smooth_q=False), shifted) < 0.9


def test_tiny_and_huge_values():
    q, k, v, _ = random_inputs(Shape(1, 100, 100, 2, 1, 64), dtype=torch.float32)
    usual = fp4_attention(q, k, v)
    for power in (-40, 40):
        assert torch.equal(fp4_attention(q, k, v * 2.0**power), usual * 2.0**power)
        assert torch.equal(fp4_attention(q * 2.0**power, k * 2.0**-power, v), usual)


def test_chunks_and_poison_do_not_change_it(monkeypatch):
    q, k, v, _ = random_inputs(Shape(1, 400, 431, 4, 2, 32))
    whole = fp4_attention(q, k, v)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    torch.use_deterministic_algorithms(True)  # This setting fills torch.empty with NaN.
    try:
        monkeypatch.setattr("sagekernels.reference.CHUNK_SCORES", 1)
        assert rel_l2(fp4_attention(*strided), whole) < 4e-3
    finally:
        torch.use_deterministic_algorithms(False)
    assert whole.isfinite().all()


def test_inputs_stay_as_they_are_and_bounds_are_documents():
    shape = Shape(1, 150, 150, 2, 2, 32, documents=(50, 0, 100))
    q, k, v, _ = random_inputs(shape, k_mean=5.0)
    before = [x.clone() for x in (q, k, v)]
    packed = fp4_attention(q, k, v, cu_seqlens=shape.cu_seqlens())
    assert torch.equal(packed, fp4_attention(q, k, v, bounds=document_bounds(shape.cu_seqlens(), 150)))
    assert all(torch.equal(a, b) for a, b in zip(before, (q, k, v), strict=True))
    assert fp4_attention(q[:, :0], k, v).shape == (1, 0, 2, 32)
    rows, bounds = [torch.cat((x, x.flip(0) * 2)) for x in (q, k, v)], document_bounds(None, 150, 40)
    windowed = fp4_attention(*rows, bounds=bounds)  # Both rows have the same bounds.
    assert torch.equal(windowed[1:], fp4_attention(*(x[1:] for x in rows), bounds=bounds))
    exact = attention_reference(*(x.double() for x in (q, k, v)), window=40)
    assert rel_l2(windowed[:1], exact) < 0.2


def test_gradients_are_refused():
    q, k, v, _ = random_inputs(Shape(1, 32, 32, 1, 1, 16))
    for i in range(3):
        inputs = [x.clone().requires_grad_(i == j) for j, x in enumerate((q, k, v))]
        with pytest.raises(NotImplementedError, match=r"forward only.*no_grad.*sage_attention"):
            fp4_attention(*inputs)
        with torch.no_grad():
            assert torch.equal(fp4_attention(*inputs), fp4_attention(q, k, v))


def test_bad_calls():
    q, k, v, _ = random_inputs(Shape(1, 32, 32, 1, 1, 16))
    with pytest.raises(ValueError, match="format 'fp4' is not one of nvfp4, mxfp4"):
        fp4_attention(q, k, v, format="fp4")
    with pytest.raises(ValueError, match="scale must be positive"):
        fp4_attention(q, k, v, scale=-1.0)
    with pytest.raises(ValueError, match="at least as many keys"):
        fp4_attention(q, k[:, :5], v[:, :5])
    with pytest.raises(TypeError, match="one dtype"):
        fp4_attention(q, k.half(), v)
