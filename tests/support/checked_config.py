"""Small configurations, and the findings of the rules for them."""

from sagetrain.config import Finding, RunConfig
from sagetrain.config.check import check


def run_config(**sections: dict) -> RunConfig:
    """Build a configuration without findings on 1, 2, 4 or 8 ranks. The sections replace keys of its sections."""
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


def check_found(sections: dict, world_size: int, rule: str, level: str, key: str, says: str, fix: str) -> None:
    """Check that these sections have one finding of this rule and key, and what it says."""
    found = check(run_config(**sections), world_size, files=False)
    finding = only([f for f in found if (f.rule, f.key) == (rule, key)])
    assert finding.level == level, str(finding)
    assert says in str(finding), str(finding)
    assert fix in finding.fix, finding.fix


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, [str(f) for f in findings]
    return findings[0]
