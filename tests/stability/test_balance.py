"""Loads move what balances experts, and experts that starve are reported."""

import torch

from sagetrain.config.schema import AttentionConfig, ModelConfig
from sagetrain.model.tensors import tensors
from sagetrain.parallel.metrics import Metrics
from sagetrain.stability.balance import VECTOR, Balance, Starving
from sagetrain.stability.controller import Taken

EXPERTS = {"number": 4, "per_token": 2, "ffn_size": 16, "dense_layers": 1, "balance": {"bias_rate": 0.25}}


def test_states_move_by_the_loads_of_a_step() -> None:
    """An expert with exactly the mean keeps its bias, also where a division by ranks was not exact."""
    cfg = ModelConfig(num_layers=2, hidden_size=32, ffn_hidden_size=64, num_attention_heads=2, experts=EXPERTS)
    specs = {spec.name: spec for spec in tensors(cfg, AttentionConfig(), 128)}
    names = [f"blocks.1.mlp.router.{kind}" for kind in ("bias", "load")]
    masters = {name: torch.zeros(3) for name in names}  # This rank has the last three rows.
    metrics, counted = Metrics(), dict.fromkeys(names, True)
    balance = Balance(cfg, specs, masters, dict.fromkeys(names, 1), counted.__getitem__, 3, metrics)
    gradients = {name: torch.tensor([10.0, 31.0, 19.0]) / 3 for name in names} | {"other": torch.ones(1)}
    balance.take(gradients)
    assert list(gradients) == ["other"]
    metrics.vector("moe/loads", torch.tensor([[20.0, 0.0, 0.0, 0.0]]))  # Another rank has the first one.
    assert metrics.reduce(torch.device("cpu")) == {}
    numbers = balance.numbers()
    assert (numbers["moe/1/max_load"], numbers["moe/1/min_load"]) == (31 / 20, 0.5)
    assert numbers["moe/max_load"] == 31 / 20
    shares = torch.tensor([20.0, 10, 31, 19]) / 80
    assert abs(numbers["moe/1/entropy"] - float(-(shares * shares.log()).sum() / torch.tensor(4.0).log())) < 1e-6
    assert masters[names[0]].tolist() == [0, 0, 0]  # Nothing moves before the step is decided.
    balance.update()
    assert masters[names[0]].tolist() == [0.25, -0.25, 0.25]
    torch.testing.assert_close(masters[names[1]], torch.tensor([-0.5, 0.55, -0.05]))


def test_experts_that_starve_are_reported_once() -> None:
    """Each expert is counted for itself, across a continued run as well."""
    loads = torch.tensor([[40.0, 40, 40, 40], [40, 40, 40, 40]])
    reduced = Metrics()
    reduced.vectors = {VECTOR: loads.flatten()}  # A view, which shows what the loads become.
    watch = Starving(reduced, 4)

    def after(step: int, *hungry: tuple[int, int]) -> list[str]:
        loads[:] = 40.0
        for place in hungry:
            loads[place] = 2.0
        metrics = {"moe/3/min_load": 0.0, "moe/4/min_load": 0.9, "moe/max_load": 2.0}
        return [event.text for event in watch.after_step(Taken(step, step, 1, metrics))]

    assert [after(step, (0, 1), (1, 2)) for step in range(99)] == [[]] * 99
    assert after(99, (0, 2), (1, 3)) == []  # Others starve now, so each count begins anew.
    assert [after(step, (0, 1), (0, 3), (1, 0)) for step in range(99)] == [[]] * 99
    again = Starving(reduced, 4)
    again.restore(watch.state())
    watch = again
    (said,) = after(99, (0, 1), (0, 3))
    assert "less than 10% of the mean number of tokens (layer 3: 1, 3)" in said
    assert [after(step, (0, 1), (0, 3)) for step in range(300)] == [[]] * 300
    (said,) = (text for step in range(100) for text in after(step, (0, 1), (1, 0)))
    assert "(layer 4: 0)" in said
    again.restore({"steps": {"3": 99}})  # An earlier version counted whole layers.
    assert after(0, (0, 1)) == [] and again.after_step(Taken(1, 1, 1, {})) == []
