"""Configurations of short runs, for the tests of runs that begin with the weights of another run."""

from pathlib import Path

import yaml

from runs import write_config

SHORT = {
    "training": {"total_tokens": 1280},
    "tokens_per_step": {"schedule": "constant", "tokens": 256, "stages": None},
    "lr_schedule": {"warmup_tokens": 256},
}


def configured(path: Path, corpus: Path, run_dir: Path, **sections: dict) -> Path:
    """Write the configuration of a run of five steps. The sections update those of the run."""
    merged = {name: {**SHORT.get(name, {}), **sections.get(name, {})} for name in {*SHORT, *sections}}
    config = write_config(path, corpus, run_dir, **merged)
    tree = yaml.safe_load(config.read_text())
    tree["tokens_per_step"] = {"schedule": "constant", "tokens": merged["tokens_per_step"]["tokens"]}
    config.write_text(yaml.safe_dump(tree))
    return config
