"""Small configurations, and what the rules say of them."""

from sagetrain.config import Finding, RunConfig


def run_config(**sections: dict) -> RunConfig:
    """A configuration without findings on 1, 2, 4 or 8 ranks, with keys of its sections replaced."""
    tree = {
        "model": {"num_layers": 2, "hidden_size": 256, "ffn_hidden_size": 768, "num_attention_heads": 4},
        "data": {"train": [{"path": "x"}], "seq_length": 1024, "micro_batch_size": 2},
        "tokens_per_step": {"schedule": "constant", "tokens": 65536},
        "optimizer": {"lr": 1e-3},
        "lr_schedule": {"warmup_tokens": 10**6},
        "training": {"run_dir": "x", "total_tokens": 10**8},
    }
    for name, section in sections.items():
        replaces = name == "tokens_per_step"
        tree[name] = section if replaces or not isinstance(section, dict) else {**tree.get(name, {}), **section}
    return RunConfig.model_validate(tree)


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, [str(f) for f in findings]
    return findings[0]
