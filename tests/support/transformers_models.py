"""Models of transformers with random weights, and their logits beside ours."""

import json
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from sagetrain.inference.load import load_run
from sagetrain.interop.families import FAMILIES

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256}
SIZES |= {"vocab_size": 352}  # The vocabulary is padded to 384 here.
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


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


def edit(folder: Path, drop: tuple[str, ...] = (), file: str = "config.json", **keys: Any) -> dict[str, Any]:
    """Set keys in a JSON file of a folder and drop others. Return all that it had before."""
    before = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    after = {key: value for key, value in (before | keys).items() if key not in drop}
    (folder / file).write_text(json.dumps(after))
    return before


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
