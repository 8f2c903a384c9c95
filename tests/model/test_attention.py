"""The choice of an attention backend, its reason, and the proof that each backend computes attention."""

import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar, get_args

import pytest
import torch
from torch import Tensor

import tiny
from sagekernels import attention_reference
from sagekernels.admission import LIMITS, Admission
from sagetrain.auto import attention_choice
from sagetrain.config.schema import AttentionConfig, ModelConfig
from sagetrain.model.backends import (
    AttentionFunction,
    Product,
    Reference,
    Sage,
    Sdpa,
    TokenLayout,
    attention_function,
    token_layout,
)
from sagetrain.model.selection import resolve_backend

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SHAPE = ModelConfig(num_layers=1, hidden_size=64, ffn_hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
CU_SEQLENS = torch.tensor([0, 3, 20, 24, 40, 40, 40], dtype=torch.int32)


def _resolve(backend: str, device: torch.device, dtype: torch.dtype = torch.bfloat16, **shape: int) -> tuple[str, str]:
    model = SHAPE.model_copy(update=shape)
    return resolve_backend(AttentionConfig(backend=backend), model, device=device, dtype=dtype)


@pytest.mark.parametrize(("backend", "device", "resolved", "reason"), [
    ("sage", CPU, "sage", "recipe fine: its torch twin"), ("sage", GPU, "sage", "recipe auto"),
    ("sdpa", CPU, "sdpa", "through a mask"), ("sdpa", GPU, "sdpa", "varlen_attn"),
    ("reference", CPU, "reference", "plain"), ("auto", CPU, "sdpa", "auto"),
])  # fmt: skip
def test_resolution(backend: str, device: torch.device, resolved: str, reason: str) -> None:
    name, why = _resolve(backend, device)
    assert name == resolved
    assert reason in why


@pytest.mark.parametrize(
    ("recipe", "head_dim", "named"),
    [("fine", 128, True), ("scores", 128, False), ("auto", 128, False), ("fine", 96, False)],
)
def test_where_another_recipe_is_faster_it_is_named(
    monkeypatch: pytest.MonkeyPatch, recipe: str, head_dim: int, named: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    model, attention = SHAPE.model_copy(update={"head_dim": head_dim}), AttentionConfig(recipe=recipe)
    _, why = resolve_backend(attention, model, device=GPU, dtype=torch.bfloat16)
    assert ("scores is much faster" in why) == named


def test_int8_attention_is_refused_where_it_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 3))
    with pytest.raises(ValueError, match=r"backend sage: INT8 products of compute capability 10\.3 .* flash or sdpa"):
        resolve_backend(AttentionConfig(backend="sage"), SHAPE, device=GPU, dtype=torch.bfloat16)


@pytest.mark.parametrize(("backend", "device", "dtype", "shape", "message"), [
    ("sage", GPU, torch.float32, {}, "needs training.dtype bf16"),
    ("sage", CPU, torch.float32, {"head_dim": 8}, "head_dim 16 to 256, not 8"),
    ("flash", CPU, torch.bfloat16, {}, "flash needs a GPU"),
    ("flash", GPU, torch.float32, {}, "flash needs a GPU and training.dtype bf16"),
])  # fmt: skip
def test_impossible_choices(backend: str, device: torch.device, dtype: torch.dtype, shape: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _resolve(backend, device, dtype, **shape)


def _inputs(heads: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 20, heads, 16), (2, 20, 2, 16), (2, 20, 2, 16))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float32) for shape in shapes)


def _layout(function: AttentionFunction, packed: bool) -> TokenLayout:
    return token_layout({function.documents}, 2, 40, None, None, CU_SEQLENS if packed else None, 17)


def _truth(packed: bool) -> Tensor:
    q, k, v = (x.double() for x in _inputs())
    if not packed:
        return attention_reference(q, k, v, causal=True)
    pieces, bounds = [], CU_SEQLENS.tolist()
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    for start, stop in pairwise(bounds):
        if stop > start:
            document = (x[None, start:stop] for x in (q, k, v))
            pieces.append(attention_reference(*document, causal=True)[0])
    return torch.cat(pieces).view(2, 20, 4, 16)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("backend", "tolerance"), [("sdpa", 1e-6), ("reference", 1e-6), ("sage", 0.03)])
def test_backends_compute_attention(backend: str, tolerance: float, packed: bool) -> None:
    attend = attention_function(backend, AttentionConfig(backend=backend), CPU)
    assert attend.name == backend
    o = attend(*_inputs(), _layout(attend, packed))
    truth = _truth(packed)
    assert o.shape == truth.shape
    assert (o.double() - truth).norm() <= tolerance * truth.norm()


def _packed_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    assert q.shape == (40, 4, 16)
    return attention_reference(q[None], k[None], v[None], causal=True, cu_seqlens=cu_seqlens)[0]


def _flash_4_varlen(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=None,
    causal=False,
):
    assert (max_seqlen_q, max_seqlen_k, causal) == (17, 17, True)
    assert cu_seqlens_q is cu_seqlens_k
    return _packed_attention(q, k, v, cu_seqlens_q), None


def _flash_2_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, causal=False):
    return _flash_4_varlen(q, k, v, None, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, None, causal)[0]


FLASH = {
    "flash_attn.cute": ("4", _flash_4_varlen, lambda q, k, v, causal: (attention_reference(q, k, v, causal=causal), 0)),
    "flash_attn_interface": ("3", _flash_2_varlen, lambda q, k, v, causal: attention_reference(q, k, v, causal=causal)),
    "flash_attn": ("2", _flash_2_varlen, lambda q, k, v, causal: attention_reference(q, k, v, causal=causal)),
}


def _install(monkeypatch: pytest.MonkeyPatch, *names: str, capability: tuple[int, int] = (9, 0)) -> None:
    """Install stand-ins with the signatures of the real packages. None in sys.modules makes an import fail."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for name, (_, varlen, dense) in FLASH.items():
        module = None
        if name in names:
            module = ModuleType(name)
            module.flash_attn_varlen_func, module.flash_attn_func = varlen, dense
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", list(FLASH))
def test_flash_packages_are_called_by_their_signatures(
    monkeypatch: pytest.MonkeyPatch, name: str, packed: bool
) -> None:
    _install(monkeypatch, name)
    assert _resolve("flash", GPU) == ("flash", f"flash-attn {FLASH[name][0]}")
    attend = attention_function("flash", AttentionConfig(backend="flash"), GPU)
    o = attend(*_inputs(), _layout(attend, packed))
    torch.testing.assert_close(o.double(), _truth(packed), rtol=1e-4, atol=1e-5)


def test_the_newest_flash_that_fits_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, *FLASH)
    assert _resolve("flash", GPU)[1] == "flash-attn 4"
    _install(monkeypatch, *FLASH, capability=(8, 6))
    assert _resolve("flash", GPU)[1] == "flash-attn 2"
    _install(monkeypatch)
    with pytest.raises(ValueError, match="no flash-attn package for this GPU"):
        _resolve("flash", GPU)
    assert _resolve("auto", GPU)[0] == "auto"  # choose_attention settles it later.


def _varlen_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
    assert is_causal and max_q == max_k == 17 and query.shape == key.shape
    return _packed_attention(query, key, value, cu_seq_q)


def _varlen_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1)):
    assert window_size == (-1, 0)
    return _varlen_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, True)


def _varlen_2_13(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1), enable_gqa=False):
    assert enable_gqa and window_size == (-1, 0)
    return _packed_attention(query, key, value, cu_seq_q)


@pytest.mark.parametrize("varlen_attn", [_varlen_2_10, _varlen_2_11, _varlen_2_13, None])
def test_documents_on_a_gpu_under_each_torch(monkeypatch: pytest.MonkeyPatch, varlen_attn: object) -> None:
    stand_in = None if varlen_attn is None else SimpleNamespace(varlen_attn=varlen_attn)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", stand_in)
    assert ("a mask" in _resolve("sdpa", GPU)[1]) == (varlen_attn is None)
    attend = attention_function("sdpa", AttentionConfig(backend="sdpa"), GPU)
    assert (attend.documents == "mask") == (varlen_attn is None)
    o = attend(*_inputs(), _layout(attend, True))
    torch.testing.assert_close(o.double(), _truth(True), rtol=1e-4, atol=1e-5)


class Broken(AttentionFunction):
    """A function that drops the gradient of k."""

    def __init__(self, function: AttentionFunction) -> None:
        self.function, self.documents = function, function.documents

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout) -> Tensor:
        return self.function(q, k.detach(), v, layout) + 0 * k.sum()


def _choose(
    folder: Path, said: list[str], documents: list[list[int]], ranks: int = 1, context: int = 1, **asked: str
) -> str:
    """Return the choice of attention as on a GPU, and add the last thing that it said to `said`."""
    heard: list[str] = []
    attention = AttentionConfig(**{"backend": "auto", "recipe": "fine", **asked})
    parallel = {"tensor_parallel_size": ranks, "context_parallel_size": context, "tensor_parallel_overlap": "on"}
    cfg = tiny.config(1, "bf16", data={"micro_batch_size": 2, "seq_length": 64}, parallel=parallel)
    cfg = cfg.model_copy(update={"model": SHAPE, "attention": attention})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_choice, "to_be_chosen", lambda *_: True)
        chosen, _ = attention_choice.settle_attention(tiny.start(cfg, folder, heard.append), None, lambda: documents)
    said.append(heard[-1])
    assert chosen.model_copy(update={"backend": attention.backend, "recipe": attention.recipe}) == attention
    return f"sage {chosen.recipe}" if chosen.backend == "sage" else chosen.backend


@pytest.mark.parametrize(
    ("packed", "ranks", "context"), [(False, 1, 1), (True, 1, 1), (True, 2, 1), (False, 1, 2), (True, 1, 2)]
)
def test_auto_takes_the_admitted_and_remembers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, packed: bool, ranks: int, context: int
) -> None:
    """A backend that drops a gradient is never chosen, however fast it is. A second start does not time again. The
    calls of one rank are timed: half of the sequences and its heads under tensor parallelism, whole sequences and its
    heads under context parallelism."""

    def broken(name: str, attention: AttentionConfig, device: torch.device) -> AttentionFunction:
        function = attention_function(name, attention, device)
        return function if name == "sage" else Broken(function)

    monkeypatch.setattr(attention_choice, "attention_function", broken)
    said: list[str] = []
    case = tmp_path, said, [[64], [60, 4], [64]] if packed else [], ranks, context
    assert _choose(*case) == "sage fine"
    assert "not used: dk is zero in some head" in said[0]
    rows, heads = (1, 128 // ranks) if packed else (2 // ranks, 64), SHAPE.num_attention_heads // (ranks * context)
    assert "B{} N{} H{}/".format(*rows, heads) in said[0]
    assert _choose(*case) == "sage fine"
    assert "chosen before" in said[1]
    assert _choose(*case, recipe="paper") == "sage paper"
    assert "not used: dk is zero" in said[2]  # Another function was chosen before, so this one is tested again.


@pytest.mark.parametrize(("backend", "fastest", "taken"), [
    ("auto", "sage scores", "sage scores"),
    ("auto", "sage fine", "sage fine"),
    ("auto", "sdpa", "sdpa"),
    ("sage", "sdpa", "sage fine"),  # Attention in 16 bits is no candidate where sage is asked for.
    ("sage", "sage scores", "sage scores"),
    ("auto", "sage paper", "sage fine"),  # The least exact recipe runs only by name.
])  # fmt: skip
def test_recipe_auto_is_the_faster_of_the_nearly_exact(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, backend: str, fastest: str, taken: str
) -> None:
    order = [fastest, "sage fine", "sage scores", "sdpa"]

    def admit(name: str, *_: object, limits: dict, **__: object) -> Admission:
        assert limits == LIMITS[name.removeprefix("sage ") if name != "sdpa" else "fine"]
        return Admission(True, "", {})

    def named(backend: str, settings: AttentionConfig, device: torch.device) -> str:
        return f"sage {settings.recipe}" if backend == "sage" else backend

    replaced = {"attention_function": named, "_plain": str, "_behind_norm": str, "admit": admit}
    for name, function in replaced.items():
        monkeypatch.setattr(attention_choice, name, function)
    monkeypatch.setattr(attention_choice, "seconds_per_step", lambda name, *_, **__: 1.0 + order.index(name))
    assert _choose(tmp_path, [], [], backend=backend, recipe="auto") == taken


def test_the_settings_that_are_left_to_be_chosen() -> None:
    """Nothing is left to be chosen if there is no GPU."""
    for backend, recipe, device, is_open in (
        ("auto", "fine", GPU, True),
        ("sage", "auto", GPU, True),
        ("sage", "fine", GPU, False),
        ("sdpa", "auto", GPU, False),
        ("sage", "auto", CPU, False),
    ):
        assert attention_choice.to_be_chosen(AttentionConfig(backend=backend, recipe=recipe), device) == is_open
    assert attention_function("sage", AttentionConfig(), CPU) == Sage("fine")


class Noted(Sdpa):
    """A function that records the lengths of documents, and the longest one that it is told."""

    noted: ClassVar[list[tuple[list[int], int]]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout) -> Tensor:
        self.noted.append((layout.cu_seqlens.diff().tolist(), layout.max_seqlen))
        return super().__call__(q, k, v, layout)


def test_auto_times_documents_as_short_as_those_of_the_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The documents are those of the sequences with the median of the work. A choice for other work is not taken over,
    and one for nearly the same is: another seed of the same data has other documents."""
    monkeypatch.setattr(attention_choice, "attention_function", lambda *_: Noted())
    monkeypatch.setattr(Noted, "noted", [])
    said: list[str] = []
    # The sums of squares are 4096, 64, 2056, 1536, 3616 and 3016.
    sampled = [[64], [1] * 64, [30, 34], [32, 16, 16], [60, 4], [10, 54]]
    _choose(tmp_path, said, sampled)
    assert Noted.noted[-1] == ([30, 34, 10, 54], 54)
    _choose(tmp_path, said, list(reversed(sampled)))
    assert "chosen before" in said[1]
    shorter = [[16] * 4]
    _choose(tmp_path, said, shorter)
    assert Noted.noted[-1] == ([16] * 8, 16)
    _choose(tmp_path, said, [[6, 26, 16, 16]])  # The number of documents is the same.
    assert Noted.noted[-1] == ([6, 26, 16, 16] * 2, 26)
    _choose(tmp_path, said, [[15, 17, 15, 17]])
    assert ["chosen before" in line for line in said] == [False, True, False, False, True]


# -- values ------------------------------------------------------------------------------------------------------


def test_functions_with_the_same_settings_are_one_value() -> None:
    made = [attention_function("sage", AttentionConfig(recipe=recipe), CPU) for recipe in ("fine", "fine", "paper")]
    assert made[0] == made[1] != made[2]
    assert len({*made, Sage("paper"), Sdpa(), Sdpa(), Reference()}) == 4


@pytest.mark.parametrize(("recipe", "count", "sixteen_bit", "eight_bit"), [
    ("paper", 6, "dO V^T", "P V"), ("fine", 5, "P V", "Q K^T again"), ("scores", 2, "dS K", "Q K^T again"),
])  # fmt: skip
def test_quantized_products(recipe: str, count: int, sixteen_bit: str, eight_bit: str) -> None:
    function = Sage(recipe)
    assert len(function.quantized) == count and sixteen_bit not in function.quantized
    assert eight_bit in function.quantized < set(get_args(Product))
    assert {"Q K^T", "Q K^T again"} <= function.quantized
    assert function.reference.quantized == Sdpa().quantized == frozenset()


@pytest.mark.parametrize("packed", [False, True])
def test_reference_of_a_function_is_exact(packed: bool) -> None:
    reference = Sage().reference
    o = reference(*(x.double() for x in _inputs()), _layout(reference, packed))
    torch.testing.assert_close(o, _truth(packed))
