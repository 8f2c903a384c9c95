"""Small configurations, the findings of the rules for them, and the fixes that these name."""

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml

from sagetrain.config import Finding, RunConfig, load_config
from sagetrain.config.check import check
from sagetrain.config.reference import keys

KEYS = [key.name for key in keys()]


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
    """Check that these sections have one finding of this rule and key, what it says, and that its fix mends it."""
    found = check(run_config(**sections), world_size, files=False)
    finding = only([f for f in found if (f.rule, f.key) == (rule, key)])
    assert finding.level == level, str(finding)
    assert says in str(finding), str(finding)
    assert fix in finding.fix, finding.fix
    check_fixes(sections, world_size)


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, [str(f) for f in findings]
    return findings[0]


def fixed(finding: Finding, file: Path) -> Iterator[tuple[dict[str, str], RunConfig]]:
    """Yield what each way of a fix that names values changes (`use 2 or 4 with num_key_value_heads 2, or a
    tensor_parallel_size of 1`), and the configuration after it."""

    def whole(name: str) -> str:
        within = finding.key.rpartition(".")[0]
        return min(
            (each for each in KEYS if f".{each}".endswith(f".{name}")),
            key=lambda each: not each.startswith(within),
            default="",
        )

    value = r"(?:[0-9][0-9.e]*|null|none|true|false|[a-z]+[0-9]+|fsdp|sdpa|flash|sage)"
    for way in re.split(r", or (?!0$)|; ", re.sub(r" \(.*?\)", "", finding.fix)):
        first, _, also = way.partition(" with ")
        named = re.fullmatch(
            rf"(?:use |set |a |an )*(?!use |it )([a-z_.]+)(?:: | of at most | of | )({value}(?:(?:, | or ){value})*)",
            first,
        )
        given = re.fullmatch(rf"(?:use |set it to )(?:at most )?({value}(?:(?:, or |, | or ){value})*)", first)
        key, values = (whole(named[1]), named[2]) if named else (finding.key, given[1] if given else "")
        for each in re.split(", or |, | or ", values) if key and values else ():
            changes = {key: each} | {whole(name): number for name, number in re.findall(r"([a-z_]+) ([0-9]+)", also)}
            yield changes, load_config(file, [f"{name}={new}" for name, new in changes.items()])


def errors_of(cfg: RunConfig, world_size: int) -> dict[tuple[str, str], Finding]:
    """Return the errors by rule and key."""
    return {(each.rule, each.key): each for each in check(cfg, world_size, files=False) if each.level == "error"}


def check_fixes(sections: dict, world_size: int) -> None:
    """Check that each fix that names values mends its error, and that what was right before stays right. A length
    alone may need other tokens per step."""
    cfg = run_config(**sections)
    before = errors_of(cfg, world_size)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(yaml.safe_dump(cfg.model_dump(mode="json", exclude_unset=True)))
        mends = [(finding, *each) for finding in before.values() for each in fixed(finding, file)]
    for finding, changes, mended in mends:
        wrong = {key for _, key in before} - {finding.key}
        after = errors_of(mended, world_size)
        assert (finding.rule, finding.key) not in after, (str(finding), changes)
        new = {rule: str(after[rule, key]) for rule, key in after.keys() - before.keys() if key not in wrong}
        assert not new.keys() - {"whole_micro_steps"}, (str(finding), changes, new)
