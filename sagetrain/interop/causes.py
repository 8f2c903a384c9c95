"""Find out why a folder is not the Hugging Face folder of a model that its user takes it for, so that the error names
the true cause."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from sagetrain.config.errors import url_meant

_AGAIN = "copy the folder again"
# Last parts of the names of tensors that quantized weights have beside them or are stored as.
_QUANTIZED = re.compile(r"(\w*_)?(scales?|scale_inv|qweight|qzeros|g_idx|biases|packed|absmax|quant_map|SCB)")
_FUSED = re.compile(r"\b(qkv_proj|gate_up_proj|query_key_value|c_attn|Wqkv|W_pack|linear_qkv)\b")
MERGE = "merge the two (peft's merge_and_unload, then save_pretrained)"
GATHER = (
    "as trainers store the part of one rank (DeepSpeed's ZeRO 3, FSDP): save the whole model "
    "(stage3_gather_16bit_weights_on_model_save, zero_to_fp32.py, or FSDP's FULL_STATE_DICT)"
)


def no_folder(path: Path) -> str:
    """Return the message for a path that is no folder."""
    if said := url_meant(path):
        return said
    if path.suffix == ".gguf":
        return f"{path}: GGUF files are not read; name the Hugging Face folder that it was made of"
    if path.is_file():
        return f"{path} is a file; name the Hugging Face folder that it is in, with its config.json: {path.parent}"
    return (
        f"{path}: no such folder; a model of the Hugging Face hub comes into one by `hf download NAME --local-dir DIR`"
    )


def no_model(folder: Path) -> str:
    """Return the message for a folder without a config.json."""
    lacks = f"{folder} has no config.json"
    if (folder / "adapter_config.json").is_file():
        return f"{folder} holds an adapter of another model alone (adapter_config.json): {MERGE}"
    if (folder / "params.json").is_file():
        return (
            f"{lacks}, but params.json: it holds the weights as Meta or Mistral publish them beside those for "
            "transformers; name the folder with config.json and model.safetensors"
        )
    if [*folder.glob("*.gguf")]:
        return f"{lacks}, but GGUF files, which are not read; name the Hugging Face folder that they were made of"
    # A cache of the hub has snapshots/HASH, and a Trainer's folder checkpoint-STEP.
    below = sorted(
        (file.parent for depth in ("*", "*/*") for file in folder.glob(f"{depth}/config.json")),
        key=lambda each: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(each))],
    )
    if below:
        others = f", or another of the {len(below)} folders in it that have one" if len(below) > 1 else ""
        return f"{lacks}; name {below[-1]}{others}"
    return f"{lacks}; name a Hugging Face folder that has it"


def no_weights(folder: Path, whole: str, index: str) -> str:
    """Return the message for a folder that has neither of two files of weights."""
    lacks = f"{folder}: has neither {whole} nor {index}"
    others = sorted(each.name for each in folder.glob("*.safetensors") if each.is_file())
    if len(others) == 1:
        return f"{lacks} (there is {others[0]}: rename it if it is the model's)"
    if others:
        return (
            f"{lacks}, but {len(others)} other files, first: {others[0]}; copy the index, which names the file of each "
            "tensor, from where the folder was published"
        )
    if [*folder.glob("*.bin")]:
        return f"{lacks} (pytorch_model.bin could run code; save it anew with transformers' save_pretrained)"
    return f"{lacks}; {_AGAIN} from where it was published"


def other_names(missing: Sequence[str], others: Sequence[str]) -> str:
    """Say what names of tensors show about a folder, and what to do. The folder lacks `missing` names of the model, and
    has `others`."""
    if any(_QUANTIZED.fullmatch(each.rpartition(".")[2]) for each in others):
        return "its weights are quantized, which are not read; take the folder in which it is published in 16 bits"
    if any(re.search(r"\.(lora_\w+|base_layer)\.", each) for each in others):
        return f"they are of an adapter beside the model; {MERGE}"
    if missing and (fused := next((each for each in others if _FUSED.search(each)), None)):
        return (
            f"{fused} holds several matrices in one, as in other classes of models: take the folder of this class, or "
            "convert it with the tool that wrote it"
        )
    if "lm_head.weight" in missing and "score.weight" in others:
        return (
            "score.weight is the head of a classifier or of a reward model, which predicts no tokens: take the folder "
            "of the language model that it was made of"
        )
    for other in others if missing else ():
        if part := _inserted(missing[0].split("."), other.split(".")):
            return (
                f"it is there as {other}, with {part!r} in its name, as in a model inside of another or in a wrapper "
                "(torch.compile, DataParallel, FSDP): save that model by itself"
            )
    if len(missing) > 1 and len(missing) == len(others):
        return (
            "the same number of tensors is there under other names, as other libraries have them: convert the folder "
            "to transformers with the tool of the library that wrote it"
        )
    return ""


def _inserted(name: list[str], other: list[str]) -> str:
    """Return the parts of a name that stand in one place of another name, in addition; "" if it differs otherwise."""
    more = len(other) - len(name)
    for place in range(len(name) + 1 if more > 0 else 0):
        if other[:place] == name[:place] and other[place + more :] == name[place:]:
            return ".".join(other[place : place + more]) + "."
    return ""
