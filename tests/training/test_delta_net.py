"""A hybrid of gated delta nets and attention trains, stops, continues and is evaluated as other models are."""

from runs import check_killed, check_scored, log_of, rows_of, sagetrain

SECTIONS: dict[str, dict] = {
    "model": {
        "delta_net": {"key_heads": 2, "value_heads": 4, "key_dim": 16, "value_dim": 16},
        "num_layers": 4,
        "value_embeddings": True,
    },
    "attention": {"backend": "sage", "recipe": "scores"},
    "linear": {"precision": "int8", "keep_last_fraction": 0.3},
    "optimizer": {"name": "muon"},
    "data": {"micro_batch_size": 2},
    "training": {"dtype": "bf16"},
    "evaluation": {"every_tokens": 2560, "samples_every_tokens": 2560, "samples_tokens": 4},
    "stability": {
        "monitor": {"every_steps": 4},
        "noise_scale": {"every_steps": 4},
        "quant_noise": {"every_steps": 4},
    },
}


def test_a_run_that_is_killed_ends_with_the_same_bits(tmp_path, corpus) -> None:
    """The monitor measures the only layer with attention. `eval`, `generate` and `diagnose` take the checkpoint, and
    `export` has no class for it."""
    check_killed(tmp_path, corpus, 8, 4, SECTIONS)
    assert "gated delta net in plain torch, since there is no GPU" in log_of(tmp_path / "whole.yaml")
    trained = [row for row in rows_of(tmp_path / "whole") if "train/loss" in row]
    assert trained[-1]["train/loss"] < trained[0]["train/loss"]
    assert {name for row in trained for name in row if name.endswith("S/largest")} == {"quant/3/S/largest"}
    assert any(name.startswith("quant_noise/0/") for row in trained for name in row)
    check_scored(tmp_path / "whole")
    assert sagetrain("generate", tmp_path / "whole", "the", "--max-tokens", "4").returncode == 0
    table = sagetrain("diagnose", tmp_path / "whole").stdout
    assert "largest relative L2 of dS: layer 3" in table and "0.attention.qkv" in table
    refused = sagetrain("export", tmp_path / "whole", tmp_path / "folder")
    assert refused.returncode != 0 and "model.delta_net.pattern DDDF" in refused.stdout + refused.stderr
