"""Models of transformers with random weights, and their logits beside ours."""

from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from sagetrain.inference.load import load_run
from sagetrain.interop.families import FAMILIES


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


def check_gradients(folder: Path, run_dir: Path) -> None:
    """Compare the gradients of a loss by a folder's tensors with ours, in float32."""
    ours, theirs = load_run(run_dir, print).model, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    family, vocab_size = FAMILIES[type(theirs).__name__], theirs.config.vocab_size
    tokens = torch.randint(0, vocab_size, (2, 100), generator=torch.Generator().manual_seed(2))
    labels = tokens.flip(-1)
    ours.requires_grad_(True)
    ours(tokens, labels).backward()
    cross_entropy(theirs(tokens).logits.flatten(0, 1), labels.flatten()).backward()
    compared = set()
    for name, parameter in ours.named_parameters():
        spec = ours.specs[name]
        names = family.theirs(spec)
        if not names:
            continue  # It is a state of our model alone.
        assert parameter.grad is not None, name
        for each, own in zip(names, parameter.grad.view(len(names), -1), strict=True):
            wanted = theirs.get_parameter(each).grad
            assert wanted is not None, each
            shape = spec.matrix if len(names) > 1 else spec.shape
            found = family.for_folder(spec, own.view(shape))[: len(wanted)]  # Rows that pad the vocabulary are last.
            assert (found - wanted).norm() <= 1e-4 * wanted.norm(), each
            compared.add(each)
    assert compared == {name for name, _ in theirs.named_parameters()}
