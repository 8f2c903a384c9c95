"""Families of models train alike on every layout: tensor, context, pipeline and data parallelism change no number."""

import pytest
import torch

import tiny
from distributed import run_distributed
from sagetrain.inference import cache
from sagetrain.inference.cache import CachedModel
from sagetrain.model.backends import AttentionFunction, Reference, Sage, Sdpa, token_layout
from sagetrain.model.compile import compile_blocks
from sagetrain.model.rotary import rotary_tables
from sagetrain.parallel.topology import ParallelGroups

SHAPE = {"num_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
FAMILIES: dict[str, tuple[dict, dict]] = {
    "qwen2.5": ({"qkv_bias": True}, {"qk_norm": "none"}),
    "values": ({"value_embeddings": True, "windows": {"tokens": 5, "pattern": "WF"}}, {}),
    "olmo3": ({"norms": "post", "windows": {"tokens": 5, "pattern": "WWF"}}, {"qk_norm": "all_heads"}),
    "gpt-oss": (
        {
            "sinks": True,
            "qkv_bias": True,
            "conventions": "gpt_oss",
            "windows": {"tokens": 5, "pattern": "WF"},
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_seq_length": 16, "truncate": False},
        },
        {"qk_norm": "none", "backend": "reference"},
    ),
    "gemma3": (
        {
            "norms": "sandwich",
            "activation": "geglu",
            "conventions": "gemma",
            "query_scale": 24,
            "windows": {"tokens": 3, "pattern": "WF", "rope_theta": 100.0},
        },
        {"qk_norm": "before_rope"},
    ),
}
"""The sections model and attention of each family. Experts are left out."""
LAYOUTS: dict[str, dict] = {
    "one": {},
    "dp2-z3": {"zero_stage": 3},
    "tp2": {"tensor_parallel_size": 2},
    "tp2-sp": {"tensor_parallel_size": 2, "sequence_parallel": True, "tensor_parallel_overlap": "on"},
    "cp2": {"context_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
}


def losses_of(layouts: list[str]) -> dict[str, list[tuple[float, float]]]:
    """Return the (loss, gradient norm) pairs of 2 steps, keyed by family and layout."""
    found, groups = {}, {}
    for name, (shape, attention) in FAMILIES.items():
        for layout in layouts:
            parallel = LAYOUTS[layout]
            sizes = tuple(parallel.get(f"{axis}_parallel_size", 1) for axis in ("tensor", "context", "pipeline"))
            groups[sizes] = groups.get(sizes) or tiny.join(*sizes)
            # With an eps of 1e-8, Adam takes a full step of lr on a gradient that is nothing but rounding.
            optimizer = {"eps": 1e-6, "clip_grad": 0.5}
            sections = {"model": SHAPE | shape, "attention": attention, "optimizer": optimizer}
            engine = tiny.engine(tiny.config(0, **sections, parallel=parallel), groups[sizes])
            steps = [tiny.global_step(engine, step, sequences=2) for step in range(2)]
            found[f"{name} {layout}"] = [(step.loss, step.grad_norm) for step in steps]
    return found


def test_layouts_change_no_number() -> None:
    (alone,) = run_distributed(losses_of, 1, ["one"])
    for rank in run_distributed(losses_of, 2, [layout for layout in LAYOUTS if layout != "one"]):
        for name, steps in rank.items():
            expected = alone[f"{name.split()[0]} one"]
            assert steps == [pytest.approx(pair, rel=1e-4) for pair in expected], name


WINDOW, LENGTH = 5, 24


def seen(cu_seqlens: list[int]) -> torch.Tensor:
    """Return which keys each query sees, written from the definition of a window."""
    document = torch.bucketize(torch.arange(LENGTH), torch.tensor(cu_seqlens[1:]), right=True)
    return torch.tensor(
        [[document[i] == document[j] and i - WINDOW < j <= i for j in range(LENGTH)] for i in range(LENGTH)]
    )


@pytest.mark.parametrize("function", [Sdpa(), Reference(), Sage("fine"), Sage("scores")], ids=lambda each: each.name)
@pytest.mark.parametrize("documents", [None, [0, 7, 24]])
def test_every_attention_function_keeps_to_the_window(function: AttentionFunction, documents: list[int] | None) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, LENGTH, heads, 16, generator=draw, requires_grad=True) for heads in (4, 2, 2))
    given = None if documents is None else torch.tensor(documents, dtype=torch.int32)
    tables = rotary_tables(torch.arange(LENGTH), 16, 1e4, None)
    layout = token_layout({function.wants(True)}, 1, LENGTH, *tables, given, None, WINDOW)
    mask = seen(documents or [0, LENGTH])
    heads = [x.transpose(1, 2).repeat_interleave(4 // x.shape[2], 1) for x in (q, k, v)]
    exact = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2)
    found, grad = function(q, k, v, layout), torch.randn(exact.shape, generator=draw)
    limit = 0.03 if function.quantized else 1e-5
    wanted = [exact, *torch.autograd.grad(exact, (q, k, v), grad)]
    for ours, theirs in zip([found, *torch.autograd.grad(found, (q, k, v), grad)], wanted, strict=True):
        assert (ours - theirs).norm() < limit * theirs.norm()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_cache_of_generation_changes_no_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of different lengths are read, then continued past the window. A layer with a window keeps so many tokens
    alone, in whole stretches."""
    monkeypatch.setattr(cache, "_STRETCH", 4)
    shape, attention = FAMILIES[name]
    cfg = tiny.config(0, model=SHAPE | shape, attention=attention)
    model = tiny.model(cfg, ParallelGroups.single())
    for tensor, parameter in model.named_parameters():
        if tensor.endswith(("sinks", "bias", "gates.values")):  # They are all 0, and so alike.
            parameter.detach().copy_(torch.linspace(-1.0, 3.0, parameter.numel()).view_as(parameter))
    texts = [torch.randint(0, tiny.VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (11, 14)]
    with torch.no_grad():
        cached = CachedModel(model, rows=2, capacity=32)
        for row, text in enumerate(texts):
            begin = text[: (4, 7)[row]]
            whole = model(torch.tensor([begin]))[0, -1]
            torch.testing.assert_close(cached.read(row, begin), whole, rtol=0, atol=1e-5)
        windows = {block.attention.window for block in model.blocks}
        kept = {function.window: function._k.shape[1] for function in cached._functions}
        assert kept == {window: 32 if window is None else -(-window // 4) * 4 for window in windows}
        for step in range(7):
            logits = cached([texts[0][4 + step], texts[1][7 + step]])
            for row, first in enumerate((4, 7)):
                whole = model(torch.tensor([texts[row][: first + step + 1]]))[0, -1]
                torch.testing.assert_close(logits[row], whole, rtol=0, atol=1e-5)


def test_compiled_blocks_compute_the_same() -> None:
    """Two of the families recompute, and so go through AOTAutograd, which takes longer. Each kind of block is compiled
    for what follows it, so two blocks show all that three do."""
    tokens = torch.randint(0, tiny.VOCAB, (2, 24), generator=torch.Generator().manual_seed(1))
    for number, (shape, attention) in enumerate(FAMILIES.values()):
        how, backend = ("selective", "aot_eager") if number > 1 else ("none", "eager")
        cfg = tiny.config(0, model=SHAPE | shape | {"num_layers": 2}, attention=attention)
        found = []
        for compiled in (False, True):
            torch._dynamo.reset()
            model = tiny.model(cfg, ParallelGroups.single(), activation_checkpointing=how if compiled else "none")
            if compiled:
                compile_blocks(model, backend)
            loss = model(tokens, tokens.flip(1))
            loss.backward()
            found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)
