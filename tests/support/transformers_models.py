"""Models of transformers with random weights, and their logits beside ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from sagetrain.inference.load import load_run


def save(folder: Path, config: Any, dtype: torch.dtype = torch.float32, shard: str = "5GB") -> Path:
    """Save a model with random weights and gains, and return its folder."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gain = config.model_type != "gemma3_text"  # Gemma's norms multiply by 1 + their weight.
            parameter.normal_(1.0 if "norm" in name and gain else 0.0, 0.2)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


def check_logits(folder: Path, run_dir: Path, atol: float = 1e-4) -> None:
    """Compare the logits of a folder and of a run in float32, on two sequences, and our loss with the folder's."""
    ours, theirs = load_run(run_dir, print), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    vocab_size = theirs.config.vocab_size
    tokens = torch.randint(0, vocab_size, (2, 150), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = theirs(tokens).logits, ours.model(tokens)[..., :vocab_size].float()
        loss = ours.model(tokens, tokens.flip(-1))
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)
    # The rows that pad the vocabulary are left out.
    exact = cross_entropy(expected.flatten(0, 1), tokens.flip(-1).flatten())
    torch.testing.assert_close(loss, exact, rtol=0, atol=2e-4)
