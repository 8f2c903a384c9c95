"""Predictions agree with recorded runs whose micro-steps are replayed, on H200s (results/graphs)."""

from pathlib import Path

import pytest

from sagetrain.config import load_config
from sagetrain.config.arithmetic import padded_vocab_size
from sagetrain.costs.hardware import H200
from sagetrain.planning.performance import predict

CONFIGS = Path(__file__).parents[2] / "configs"
VOCAB = padded_vocab_size(32_000)
EVEN = "tokens_per_step={schedule: constant, tokens: %d}"
THREE = (
    "model={num_layers: 28, hidden_size: 3072, ffn_hidden_size: 8192, num_attention_heads: 24, "
    "num_key_value_heads: 8, vocab_size: 32000}"
)
"""The model of 3B."""
HALVED = [
    "parallel.tensor_parallel_size=2", "parallel.sequence_parallel=true", "parallel.tensor_parallel_overlap=off"
]  # fmt: skip
WHOLE_SEQUENCES = ["data.document_attention=false", "data.document_positions=false"]
SAGE = ["attention={backend: sage, recipe: scores}"]


def short_micro_steps(size, length, linear, micros, *more):
    """Return the predicted tokens/s of so many micro-batches of one sequence a step on one H200."""
    backend = "sdpa" if linear == "bf16" else "sage"
    cfg = load_config(CONFIGS / f"{size}.yaml", [
        "model.vocab_size=32000", "data.micro_batch_size=1", f"data.seq_length={length}", *WHOLE_SEQUENCES, *more,
        f"attention={{backend: {backend}, recipe: scores}}", f"linear.precision={linear}", EVEN % (micros * length),
    ])  # fmt: skip
    return predict(cfg, 1, VOCAB, H200).tokens_per_second


@pytest.mark.parametrize(("size", "length", "linear", "tokens_per_second"), [
    ("325m", 1024, "bf16", 100_208),
    ("325m", 1024, "fp8", 95_323),
    ("325m", 1024, "int8", 88_867),
    ("1b", 4096, "bf16", 68_865),
    ("1b", 4096, "int8", 91_507),
])  # fmt: skip
def test_replayed_micro_steps_are_met(size, length, linear, tokens_per_second):
    """The runs are those of results/graphs, 2026-11-29, of 32 micro-batches of one sequence. Attention's backward pass
    has become faster since where programs are few (the next test)."""
    assert short_micro_steps(size, length, linear, 32) == pytest.approx(tokens_per_second, rel=0.07)


@pytest.mark.parametrize(("settings", "linear", "ranks", "milliseconds"), [
    (["model.vocab_size=32000"], "int8", 1, 41.03), ([THREE, *HALVED], "fp8", 2, 69.26),
])  # fmt: skip
def test_replays_with_query_heads_apart_are_met(settings, linear, ranks, milliseconds):
    """The micro-steps are those of 2026-11-30 (results/log/kernels.md, tensor-parallel.md): one sequence of 4,096
    tokens, gradients added, without the update."""
    settings = [*SAGE, *WHOLE_SEQUENCES, *settings, f"linear.precision={linear}", "training.cuda_graphs=on"]
    settings += ["data.micro_batch_size=1", "data.seq_length=4096"]
    steps = [
        predict(load_config(CONFIGS / "1b.yaml", [*settings, EVEN % (micros * 4096)]), ranks, 32_000, H200).seconds
        for micros in (32, 64)
    ]
    assert 1e3 * (steps[1] - steps[0]) / 32 == pytest.approx(milliseconds, rel=0.07)


@pytest.mark.parametrize(("linear", "delta_net", "replayed", "by_the_host"), [
    ("int8", "{key_heads: 4, value_heads: 8}", 138_830, 57_909), ("int8", "null", 123_061, 113_808),
    ("bf16", "{key_heads: 4, value_heads: 8}", 126_594, 77_752),
])  # fmt: skip
def test_gated_delta_nets_are_met(linear, delta_net, replayed, by_the_host):
    """The runs are those of results/log/step.md, 2026-11-30. `cuda_graphs: auto` replays their micro-steps."""
    settings = "325m", 16_384, linear, 1, f"model.delta_net={delta_net}"
    assert short_micro_steps(*settings) == pytest.approx(replayed, rel=0.07)
    assert short_micro_steps(*settings, "training.cuda_graphs=off") == pytest.approx(by_the_host, rel=0.1)
