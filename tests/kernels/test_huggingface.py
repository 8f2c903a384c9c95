"""attn_implementation="sage" in transformers: padding, packed documents, refusals, torch.compile and Trainer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from sagekernels import Linear8bit, convert, document_bounds
from sagekernels.huggingface import bounds_of, document_mask, register

transformers.logging.set_verbosity_error()
register()

IDS = torch.randint(1, 64, (3, 12), generator=torch.Generator().manual_seed(0))
RIGHT, LEFT = torch.ones_like(IDS), torch.ones_like(IDS)
RIGHT[0, 9:] = RIGHT[2, 5:] = 0
LEFT[1, :4] = 0
PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7], [*range(9), 0, 1, 2], [*range(12)]])
DOCUMENTS = [(0, 0, 4), (0, 4, 12), (1, 0, 9), (1, 9, 12), (2, 0, 12)]
"""The documents of PACKED: row, first token, one past the last."""
INPUTS = {
    "whole": {},
    "padded right": {"attention_mask": RIGHT},
    "padded left": {"attention_mask": LEFT},
    "packed": {"position_ids": PACKED, "use_cache": False},
    "packed, with a cache": {"position_ids": PACKED},
}


def model_of(family: str, **changes: Any) -> nn.Module:
    """Build a small model of a family, whose attention is far from uniform."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
             "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "initializer_range": 0.15,
             "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
    if family in ("GPT2", "Bert", "T5", "Bart", "ModernBert"):
        del sizes["head_dim"], sizes["num_key_value_heads"]
    if family == "GPT2":
        sizes |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    config = getattr(transformers, f"{family}Config")(**sizes | changes)
    kind = {"Bert": transformers.AutoModelForMaskedLM, "ModernBert": transformers.AutoModelForMaskedLM,
            "T5": transformers.AutoModelForSeq2SeqLM,
            "Bart": transformers.AutoModelForSeq2SeqLM}  # fmt: skip
    torch.manual_seed(1)
    return kind.get(family, transformers.AutoModelForCausalLM).from_config(config, attn_implementation="sage").eval()


def logits_and_gradient(
    model: nn.Module, inputs: dict[str, Tensor], documents: list[tuple[int, int, int]] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the logits of tokens that are not padding, and the gradient of all parameters in one vector. Documents
    (row, first, end) each get a call of their own."""
    model.zero_grad()
    keep = inputs.get("attention_mask", torch.ones_like(IDS)).bool()
    if documents is None:
        logits = model(input_ids=IDS, **inputs).logits[keep]
    else:
        logits = torch.cat([model(input_ids=IDS[row : row + 1, a:b], **inputs).logits[0] for row, a, b in documents])
    nn.functional.cross_entropy(logits, IDS[keep]).backward()
    grads = [each.grad.flatten() for each in model.parameters() if each.grad is not None]
    return logits.detach(), torch.cat(grads)


def apart(one: Tensor, other: Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mistral", "GPTNeoX", "GPT2", "Phi3"])
def test_masks_are_those_of_transformers(family: str) -> None:
    model = model_of(family)
    for name, inputs in INPUTS.items():
        model.set_attn_implementation("sage")
        logits, grads = logits_and_gradient(model, inputs)
        model.set_attn_implementation("eager")
        expected, wanted = logits_and_gradient(model, {**inputs, "use_cache": False})
        assert 0 < apart(logits, expected) < 0.03 and 0 < apart(grads, wanted) < 0.05, name
        if name not in ("whole", "padded right"):  # Causal attention does not look to the right.
            keep = inputs.get("attention_mask", torch.ones_like(IDS)).bool()
            without, _ = logits_and_gradient(model, {})
            assert apart(without.view(*IDS.shape, -1)[keep], expected) > 0.1, name


WINDOWED: dict[str, dict[str, Any]] = {
    "Mistral": {},
    "Gemma3Text": {"query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "Olmo3": {"layer_types": ["full_attention", "sliding_attention"]},
    # Every token goes to both experts: a router that chooses would turn INT8's error into other experts.
    "GptOss": {"num_local_experts": 2, "num_experts_per_tok": 2, "initializer_range": 0.1},
}


@pytest.mark.parametrize("family", WINDOWED)
def test_windows_and_sinks_are_those_of_transformers(family: str) -> None:
    """Layers with windows and full ones have bounds of their own, with padding and documents and without. The sinks of
    GPT-OSS get gradients."""
    model = model_of(family, sliding_window=5, **WINDOWED[family])
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            nn.init.uniform_(parameter, 0, 3)
    for name in ("whole", "padded left", "packed", "packed, with a cache"):
        inputs = INPUTS[name]
        model.set_attn_implementation("sage")
        logits, grads = logits_and_gradient(model, inputs)
        of_sinks = [each.grad for name, each in model.named_parameters() if name.endswith("sinks")]
        model.set_attn_implementation("eager")
        if name.startswith("packed"):
            expected, wanted = logits_and_gradient(model, {}, DOCUMENTS)
        else:
            expected, wanted = logits_and_gradient(model, {**inputs, "use_cache": False})
        assert 0 < apart(logits, expected) < 0.03 and 0 < apart(grads, wanted) < 0.05, name
        assert len(of_sinks) == 2 * (family == "GptOss") and all(each.all() for each in of_sinks)


@pytest.mark.parametrize("family", WINDOWED)
def test_a_text_is_read_in_pieces_behind_a_cache(family: str) -> None:
    """The cache of a layer with a window is longer than the piece, and shorter than the text."""
    model = model_of(family, sliding_window=5, **WINDOWED[family])
    with torch.no_grad():
        model.set_attn_implementation("sage")
        cache = model(IDS[:, :9], use_cache=True).past_key_values
        found = model(IDS[:, 9:], past_key_values=cache).logits
        model.set_attn_implementation("eager")
        assert 0 < apart(found, model(IDS).logits[:, 9:]) < 0.03


def test_encoders_see_both_sides_and_no_padding() -> None:
    model = model_of("Bert")
    for mask in (RIGHT, LEFT):
        model.set_attn_implementation("sage")
        logits, _ = logits_and_gradient(model, {"attention_mask": mask})
        model.set_attn_implementation("eager")
        assert 0 < apart(logits, logits_and_gradient(model, {"attention_mask": mask})[0]) < 0.03


def test_flattened_batches_take_either_description() -> None:
    """DataCollatorWithFlattening gives position_ids, and cu_seq_lens beside them. Rotary angles are relative, so the
    boundaries alone must give the same logits."""
    model = model_of("Llama")
    rows = [{"input_ids": row[:length].tolist()} for row, length in zip(IDS, (5, 12, 8), strict=True)]
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_tensors="pt")(rows)
    both = model(**batch).logits
    positions = batch.pop("position_ids")
    assert apart(model(**batch).logits, both) < 0.03
    torch.testing.assert_close(model(input_ids=batch["input_ids"], position_ids=positions).logits, both)
    assert apart(model(input_ids=batch["input_ids"]).logits, both) > 0.05


def test_bounds_are_those_of_boundaries() -> None:
    starts = torch.tensor([[1, 0, 0, 1, 0], [1, 1, 0, 0, 1]]).bool()
    expected = document_bounds(torch.tensor([0, 3, 5, 6, 9, 10], dtype=torch.int32), 10)
    assert torch.equal(bounds_of(starts), expected)


def test_position_ids_that_change_in_place_are_read_again() -> None:
    model, positions = model_of("Llama"), torch.arange(12)[None].repeat(3, 1)
    whole = model(input_ids=IDS, position_ids=positions).logits
    positions.copy_(PACKED)
    packed = model(input_ids=IDS, position_ids=positions).logits
    torch.testing.assert_close(packed, model(input_ids=IDS, position_ids=PACKED).logits)
    assert apart(whole, packed) > 0.05


@pytest.mark.parametrize(("name", "backend"), [("padded left", "aot_eager"), ("packed, with a cache", "eager")])
def test_compile_traces_a_model_whole(name: str, backend: str) -> None:
    """torch.compile makes one graph. One of the kinds has 8-bit layers and goes through AOTAutograd, which takes
    longer."""
    model = model_of("Llama", num_hidden_layers=1)
    model = convert(model) if backend == "aot_eager" else model
    expected, wanted = logits_and_gradient(model, INPUTS[name])
    logits, grads = logits_and_gradient(torch.compile(model, backend=backend, fullgraph=True), INPUTS[name])
    assert apart(logits, expected) < 0.002 and apart(grads, wanted) < 0.01


def gap() -> Tensor:
    mask = RIGHT.clone()
    mask[1, 5] = 0
    return mask


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "chunks": ("Llama4Text", {"attention_chunk_size": 8, "intermediate_size_mlp": 96, "num_local_experts": 2}, {},
               "chunks of 8 over 12 tokens"),
    "both sides": ("ModernBert", {"local_attention": 8, "global_attn_every_n_layers": 3}, {}, "on both sides"),
    "softcap": ("Gemma2", {}, {}, "the argument softcap"),
    "dropout": ("Llama", {"attention_dropout": 0.1}, {}, r"attention dropout 0\.1; set attention_dropout"),
    "own mask": ("Llama", {}, {"attention_mask": torch.zeros(3, 1, 12, 12)}, r"a mask of your own \(4 dimensions\)"),
    "gap": ("Llama", {}, {"attention_mask": gap()}, "must lie together"),
    "weights": ("Llama", {}, {"output_attentions": True}, "output_attentions"),
    "cross-attention": ("Bart", {"dropout": 0.0}, {"attention_mask": RIGHT, "labels": IDS},
                        "padding of an encoder whose tokens a decoder attends to"),
    "position bias": ("T5", {"dropout_rate": 0.0, "d_model": 64, "d_kv": 16}, {"decoder_input_ids": IDS},
                      "position_bias"),
    "eager alone": ("CodeGen", {"rotary_dim": 16}, {}, "CodeGenConfig: .* eager attention alone"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_compute_is_refused_by_name(name: str) -> None:
    family, changes, inputs, message = REFUSED[name]
    model = model_of(family, **changes).train()
    with pytest.raises((NotImplementedError, ValueError), match=message):
        model(input_ids=IDS, **inputs)


def test_masks_that_are_no_intersection_are_refused() -> None:
    def prefix(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key < 4) | (key <= query)

    for options in ({"mask_function": prefix}, {"use_vmap": True}):
        with pytest.raises(NotImplementedError, match="this model's mask"):
            document_mask(3, 12, 12, **options)


def test_it_generates_single_rows_and_refuses_padding() -> None:
    model = model_of("Llama")
    options = {"max_new_tokens": 6, "do_sample": False}
    found = model.generate(IDS[:1], **options)
    model.set_attn_implementation("eager")
    assert torch.equal(found, model.generate(IDS[:1], **options))
    model.set_attn_implementation("sage")
    with pytest.raises(NotImplementedError, match=r"keys than queries \(a cache, cross-attention\); generate with"):
        model.generate(IDS, attention_mask=LEFT, **options)


# -- Trainer ---------------------------------------------------------------------------------------------------------

TEXTS = [[int(c) % 60 + 1 for c in (torch.arange(length) * (3 + length % 4)).tolist()] for length in range(8, 40)]


def trained(tmp_path: Path, collate: Callable, implementation: str, prepare: Callable[[nn.Module], Any]) -> list[float]:
    """Return the losses of a run of Trainer, step by step."""
    torch.manual_seed(0)
    model = model_of("Llama", initializer_range=0.05).train()
    model.set_attn_implementation(implementation)
    prepare(model)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=8, per_device_train_batch_size=8, learning_rate=1e-2, logging_steps=1,
        report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, lr_scheduler_type="constant",
    )  # fmt: skip
    rows = [{"input_ids": text, "labels": text} for text in TEXTS]
    trainer = Trainer(model, arguments, data_collator=collate, train_dataset=rows)
    trainer.train()
    assert not implementation.startswith("sage") or model.config._attn_implementation == "sage"
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def padded(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "labels": -100}
    batch = {name: torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])
             for name, value in fill.items()}  # fmt: skip
    return {**batch, "attention_mask": (batch["labels"] != -100).long()}


COLLATORS = {"padding": padded, "packing": DataCollatorWithFlattening(return_tensors="pt")}


@pytest.mark.parametrize("collator", COLLATORS)
def test_trainer_trains_as_with_eager_attention(tmp_path: Path, collator: str) -> None:
    """The test includes 8-bit linear layers."""
    collate = COLLATORS[collator]
    eager = trained(tmp_path, collate, "eager", lambda model: None)
    sage = trained(tmp_path, collate, "sage", convert)
    assert len(eager) == len(sage) == 8 and eager[-1] < 0.8 * eager[0]
    assert sage != eager and max(abs(a - b) for a, b in zip(eager, sage, strict=True)) < 0.05
    assert sum(isinstance(layer, Linear8bit) for layer in convert(model_of("Llama")).modules()) == 14
