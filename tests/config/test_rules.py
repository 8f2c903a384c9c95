# ruff: noqa: E501 - one case a line reads best
"""Combinations that cannot run are found before any process group starts. Each finding has numbers and a way out."""

import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from checked_config import check_fixes, check_found, fixed, only, run_config
from sagetrain.config import Finding
from sagetrain.config.arithmetic import padded_vocab_size
from sagetrain.config.check import check
from sagetrain.config.load import load_config
from sagetrain.config.rules import fit


def staged(*pairs: tuple[int, int]) -> dict:
    return {"schedule": "stages", "stages": [{"from_tokens": f, "tokens": t} for f, t in pairs]}


def ramp(start: int, end: int, tokens: int, multiple: int | None = None) -> dict:
    return {"schedule": "ramp", "start": start, "end": end, "ramp_tokens": tokens, "multiple": multiple}


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_a_sound_configuration_has_no_findings(world_size):
    assert fit(run_config(), world_size) == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_go_with_what_was_proven(ranks):
    training = {"activation_checkpointing": "auto", "dtype": "bf16"}
    evaluation = {"samples_every_tokens": 2**20, "tasks": ["arc_easy"]}
    also = {"stability": {"quant_noise": {"every_steps": 5}}, "evaluation": evaluation}
    parallel = {"expert_parallel_size": ranks, "engine": "fsdp"}
    cfg = run_config(model={"experts": EXPERTS}, training=training, parallel=parallel, **also)
    assert not [finding for finding in fit(cfg, 2) if "experts" in finding.rule]


def test_a_launch_has_as_many_ranks_as_the_configuration_says():
    assert check(run_config(parallel={"world_size": 8}), 8, files=False) == check(run_config(), 8, files=False)
    found = check(run_config(parallel={"world_size": 8}), 4, files=False)
    finding = only([finding for finding in found if finding.level == "error"])
    assert finding.key == "parallel.world_size" and "8: this launch has 4 ranks" in str(finding)
    assert "a hostfile that is not there or lacks hosts" in finding.fix


@pytest.mark.parametrize(("sections", "key"), [
    ({"model": {"windows": {"tokens": 64}}}, "model.windows"),
    ({"model": {"experts": {"number": 8, "per_token": 2, "ffn_size": 64}}}, "model.experts"),
    ({"model": {"qkv_bias": True}}, "model.qkv_bias"),
    ({"model": {"conventions": "gemma"}}, "model.conventions"),
    *(({"parallel": {f"{axis}_parallel_size": 2}}, f"parallel.{axis}_parallel_size") for axis in ("tensor", "context", "pipeline")),
    ({"parallel": {"offload": "optimizer"}}, "parallel.offload"),
    ({"training": {"activation_checkpointing": "auto"}}, "training.activation_checkpointing"),
])  # fmt: skip
def test_gated_delta_nets_go_with_what_was_proven(sections, key):
    model = {"num_layers": 4, "delta_net": {"key_heads": 2}, **sections.pop("model", {})}
    found = only([f for f in fit(run_config(model=model, **sections), 4) if f.rule == "not_proven_with_delta_net"])
    assert found.key == key and "was not proven with model.delta_net yet" in found.message
    assert "model.delta_net: null" in found.fix
    assert fit(run_config(model={"num_layers": 4, "delta_net": {"key_heads": 2}}), 4) == []


EXPERTS = {"number": 8, "per_token": 2, "ffn_size": 64}
STRETCHED = {"type": "llama3", "factor": 8, "original_seq_length": 8192}
CASES = [
    # The columns are: sections, world size, rule, level, key, a part of the message, a part of the fix.
    ({"parallel": {"tensor_parallel_size": 3}, "model": {"num_attention_heads": 6, "head_dim": 64}}, 4,
     "world_size", "error", "parallel.tensor_parallel_size", "does not divide the 4 ranks", "start a multiple of 3 ranks (torchrun --nproc-per-node 3 -m sagetrain train; for plan --world-size), or a tensor_parallel_size of 1, 2"),
    ({"parallel": {"tensor_parallel_size": 2}, "model": {"num_attention_heads": 3, "head_dim": 64, "num_key_value_heads": 1}}, 2,
     "tensor_parallel_split", "error", "model.num_attention_heads", "3: is not a multiple of parallel.tensor_parallel_size 2", "use 2 or 4 with num_key_value_heads 2, or a tensor_parallel_size of 1"),
    ({"parallel": {"tensor_parallel_size": 4}, "model": {"num_key_value_heads": 2}}, 4,
     "tensor_parallel_split", "error", "model.num_key_value_heads", "2: is not a multiple of parallel.tensor_parallel_size 4", "use 4, or a tensor_parallel_size of 1, 2"),
    ({"parallel": {"tensor_parallel_size": 3, "context_parallel_size": 10**6}, "model": {"num_key_value_heads": 2}}, 1,
     "tensor_parallel_split", "error", "model.num_attention_heads", "4: is not a multiple of parallel.tensor_parallel_size 3", "use a smaller parallel.tensor_parallel_size or context"),
    ({"parallel": {"tensor_parallel_size": 2}, "model": {"ffn_hidden_size": 767}}, 2,
     "tensor_parallel_split", "error", "model.ffn_hidden_size", "767: is not a multiple", "use 766 or 768"),
    ({"model": {"num_key_value_heads": 3}}, 1,
     "grouped_query_heads", "error", "model.num_key_value_heads", "does not divide num_attention_heads 4", "one of 1, 2, 4"),
    ({"model": {"hidden_size": 258}}, 1,
     "default_head_dim", "error", "model.hidden_size", "258: is not a multiple of num_attention_heads 4", "use 256 or 272, or give"),
    ({"model": {"head_dim": 63}}, 1,
     "even_head_dim", "error", "model.head_dim", "63: is odd", "even head_dim"),
    ({"model": {"num_layers": 4, "delta_net": {"key_heads": 2, "value_heads": 3}}}, 1,
     "delta_net_heads", "error", "model.delta_net.value_heads", "3: is not a multiple of key_heads 2", "use 2 or 4"),
    ({"model": {"num_layers": 4, "delta_net": {"key_heads": 2, "key_dim": 24}}}, 1,
     "delta_net_width", "error", "model.delta_net.key_dim", "24: is not a multiple of 16 up to 256", "use 64 or 128"),
    ({"model": {"num_layers": 3, "delta_net": {"key_heads": 2}}}, 1,
     "delta_net_pattern", "error", "model.delta_net.pattern", "has no F in the first 3 letters, one a layer", "use a pattern with D and F"),
    ({"model": {"num_layers": 1, "delta_net": {"key_heads": 2}}}, 1,
     "delta_net_pattern", "error", "model.delta_net.pattern", "has no F in the first letter, one a layer", "use model.num_layers 4 or more, or"),
    ({"model": {"num_layers": 3, "delta_net": {"key_heads": 2, "pattern": "DF"}, "value_embeddings": True}}, 1,
     "no_effect", "warning", "model.value_embeddings", "true: has no effect with a gated delta net in every second layer from the last one", "remove it"),
    ({"model": {"experts": {**EXPERTS, "per_token": 9}}}, 1,
     "experts_per_token", "error", "model.experts.per_token", "9: is more than the 8 experts of a layer", "use 1 to 8"),
    ({"model": {"experts": {**EXPERTS, "number": 1024}}}, 1,
     "experts_number", "error", "model.experts.number", "1024: is more than 1,023", "use up to 1,023"),
    ({"model": {"experts": {**EXPERTS, "dense_layers": 2}}}, 1,
     "experts_in_no_layer", "error", "model.experts.dense_layers", "2: leaves none of the 2 layers", "use 0 to 1"),
    ({"model": {"experts": {**EXPERTS, "ffn_size": 72}}}, 1,
     "experts_multiple", "error", "model.experts.ffn_size", "72: is not a multiple of 16", "use 64 or 80"),
    ({"model": {"hidden_size": 264, "experts": EXPERTS}}, 1,
     "experts_multiple", "error", "model.hidden_size", "264: is not a multiple of 16", "use 256 or 272"),
    ({"model": {"experts": {**EXPERTS, "ffn_size": 16, "shared": 1}}, "parallel": {"tensor_parallel_size": 32}}, 32,
     "tensor_parallel_split", "error", "model.experts.shared", "1: x ffn_size 16 is not a multiple of", "use 2, or 0"),
    ({"model": {"num_attention_heads": 6, "head_dim": 64, "ffn_hidden_size": 768, "experts": {**EXPERTS, "number": 6}}, "evaluation": {"samples_every_tokens": 10**6}, "parallel": {"tensor_parallel_size": 2, "sequence_parallel": True, "expert_parallel_size": 3}}, 6,
     "texts_of_experts", "error", "parallel.expert_parallel_size", "3: cuts across tensor-parallel groups of 2 ranks", "use a divisor or a multiple of 2, or no"),
    ({"model": {"experts": EXPERTS, "conventions": "gpt_oss", "activation": "geglu"}}, 1,
     "not_proven_with_experts", "error", "model.activation", '"geglu": was not proven with model.experts in model.conventions gpt_oss', "use swiglu, or other"),
    ({"model": {"experts": {**EXPERTS, "per_token": 1}}}, 1,
     "router_learns_nothing", "warning", "model.experts.renormalize", "makes the weight of a token's only expert 1", "use false"),
    ({"model": {"experts": {**EXPERTS, "balance": {"aux_weight": 0}}}}, 1,
     "router_not_balanced", "warning", "model.experts.balance.aux_weight", "send most tokens to a few", "bias_rate 0.001"),
    ({"model": {"experts": EXPERTS}, "parallel": {"tensor_parallel_size": 2}}, 2,
     "not_proven_with_experts", "error", "parallel.sequence_parallel", "false: was not proven", "use true, or a dense"),
    ({"model": {"experts": EXPERTS}, "parallel": {"expert_parallel_size": 2}}, 3,
     "expert_parallel_split", "error", "parallel.expert_parallel_size", "2: does not divide 8 experts (model.experts.number) and 3 ranks", "use 1"),
    ({"model": {"experts": EXPERTS}, "parallel": {"expert_parallel_size": 2, "pipeline_parallel_size": 2}}, 2,
     "expert_parallel_split", "error", "parallel.expert_parallel_size", "2: does not divide 8 experts (model.experts.number) and 1 rank of a pipeline stage", "use 1"),
    ({"model": {"experts": {**EXPERTS, "dense_layers": 1}, "ffn_hidden_size": 776}, "linear": {"precision": "int8"}}, 1,
     "experts_multiple_in_8_bits", "error", "linear.precision", '"int8": needs sides that are multiples of 16, and a rank\'s gate_up has one of 776', "use other sizes"),
    ({"model": {"experts": EXPERTS}, "linear": {"precision": "int8"}, "data": {"micro_batch_size": 256}, "tokens_per_step": {"schedule": "constant", "tokens": 2**18}}, 1,
     "experts_tokens_in_int8", "error", "data.micro_batch_size", "256: gives experts 262,144 tokens at a time", "linear.precision fp8"),
    ({"parallel": {"expert_parallel_size": 2}}, 2,
     "no_experts", "error", "parallel.expert_parallel_size", "2: ranks are to have experts between them", "remove it"),
    ({"model": {"experts": EXPERTS}, "parallel": {"engine": "deepspeed"}}, 1,
     "not_proven_with_experts", "error", "parallel.engine", '"deepspeed": was not proven with model.experts', "use auto or fsdp, or a dense"),
    ({"model": {"rope_scaling": {**STRETCHED, "low_freq_factor": 4}}}, 1,
     "rope_scaling_bounds", "error", "model.rope_scaling.low_freq_factor", "4.0: is not below high_freq_factor 4.0", "smaller"),
    ({"model": {"rope_scaling": {**STRETCHED, "type": "yarn", "beta_fast": 0.5}}}, 1,
     "rope_scaling_bounds", "error", "model.rope_scaling.beta_slow", "1.0: is not below beta_fast 0.5", "smaller"),
    ({"model": {"rope_scaling": {**STRETCHED, "attention_factor": 1.5}}}, 1,
     "no_effect", "warning", "model.rope_scaling.attention_factor", "1.5: has no effect with type llama3", "remove"),
    ({"model": {"windows": {"tokens": 1024, "pattern": "WF"}}}, 1,
     "no_effect", "warning", "model.windows.tokens", "1024: has no effect with data.seq_length 1024", "remove"),
    ({"model": {"windows": {"tokens": 8, "pattern": "FFW"}}}, 1,
     "no_effect", "warning", "model.windows.pattern", '"FFW": has no effect with the first 2 letters, one a layer, have no W', "remove"),
    ({"training": {"perturb": 257}}, 1,
     "perturb_channel", "error", "training.perturb", "257: names a channel, and model.hidden_size is 256", "1 to 256"),
    ({"model": {"head_dim": 14}}, 1,
     "head_dim_of_backend", "error", "model.head_dim", "14: attention.backend sage takes 16 to 256", "sdpa"),
    ({"model": {"head_dim": 258}}, 1,
     "head_dim_of_backend", "error", "model.head_dim", "258: attention.backend sage takes 16 to 256", "sdpa"),
    ({"model": {"head_dim": 264}, "attention": {"backend": "flash"}}, 1,
     "head_dim_of_backend", "error", "model.head_dim", "flash takes 8 to 256", "sdpa"),
    ({"model": {"sinks": True}, "attention": {"backend": "auto"}}, 1,
     "sinks_of_backend", "error", "attention.backend", '"auto": has no sinks, which model.sinks asks for', "use attention.backend sage or reference, or model.sinks false"),
    ({"parallel": {"tensor_parallel_size": 4, "sequence_parallel": True}, "data": {"seq_length": 1022}, "tokens_per_step": {"schedule": "constant", "tokens": 2044}}, 4,
     "sequence_parallel_split", "error", "data.seq_length", "1022: is not a multiple of parallel.tensor_parallel_size 4", "use 1020 or 1024"),
    ({"parallel": {"tensor_parallel_size": 2, "context_parallel_size": 3}, "model": {"num_attention_heads": 6, "head_dim": 64}, "data": {"seq_length": 1536}}, 4,
     "world_size", "error", "parallel.context_parallel_size", "3: times tensor_parallel_size 2 does not divide the 4 ranks", "start a multiple of 6 ranks"),
    ({"parallel": {"context_parallel_size": 6}, "model": {"num_attention_heads": 12, "head_dim": 64, "num_key_value_heads": 4}, "data": {"seq_length": 1536}}, 6,
     "context_parallel_split", "error", "model.num_key_value_heads", "4: is neither a multiple of parallel.tensor_parallel_size 1 x context_parallel_size 6 nor divides it:", "use 1, 2, 3, 6, 12, or a context_parallel_size of 1, 2"),
    ({"parallel": {"context_parallel_size": 3, "tensor_parallel_size": 2}, "model": {"num_attention_heads": 12, "head_dim": 64, "num_key_value_heads": 4}, "data": {"seq_length": 1536}}, 6,
     "context_parallel_split", "error", "model.num_key_value_heads", "4: is neither a multiple of parallel.tensor_parallel_size 2 x context_parallel_size 3 nor divides it:", "use 2, 6, 12, or a context_parallel_size of 1"),
    ({"parallel": {"context_parallel_size": 4, "tensor_parallel_size": 2}, "model": {"num_attention_heads": 12, "head_dim": 64, "num_key_value_heads": 4}}, 8,
     "context_parallel_split", "error", "model.num_attention_heads", "12: is not a multiple of parallel.tensor_parallel_size 2 x context_parallel_size 4:", "use 8 or 16, or a context_parallel_size of 1, 2"),
    ({"parallel": {"context_parallel_size": 3}, "data": {"seq_length": 1536}}, 3,
     "context_parallel_split", "error", "model.num_attention_heads", "4: is not a multiple of", "use 3 or 6 with head_dim 64, or a context_parallel_size of 1"),
    ({"parallel": {"context_parallel_size": 3}, "model": {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64}, "data": {"seq_length": 1536}}, 3,
     "context_parallel_split", "error", "model.num_attention_heads", "16: is not a multiple of", "use 15 with num_key_value_heads 15, or 18 with num_key_value_heads 18, or a"),
    ({"parallel": {"context_parallel_size": 2}, "model": {"num_attention_heads": 15, "num_key_value_heads": 6, "head_dim": 64}}, 2,
     "context_parallel_split", "error", "model.num_attention_heads", "15: is not a multiple of", "use 12 or 18, or a"),
    ({"parallel": {"context_parallel_size": 8}, "attention": {"backend": "sdpa"}, "data": {"seq_length": 1100}}, 8,
     "gather_of_tokens", "error", "data.seq_length", "1100: is not a multiple of 256: parallel.context_parallel_size 8 is more than the 4 query heads of a rank, so that keys are gathered over 2 ranks, and each has two chunks", "use 1024 or 1280, or a context_parallel_size of 1, 2, 4"),
    *(({"parallel": {"context_parallel_size": 8, **parallel}, "attention": {"backend": "sdpa", **attention}, **stability}, 8,
       "gather_of_keys", "error", key, "keys are gathered over 2 ranks", fix)
      for parallel, attention, stability, key, fix in [
          ({"engine": "deepspeed"}, {}, {}, "parallel.engine", "use fsdp, or a context_parallel_size of 1, 2, 4"),
          ({"offload": "optimizer"}, {}, {}, "parallel.offload", "use none"),
          ({}, {}, {"model": {"experts": {"number": 4, "per_token": 1, "ffn_size": 64}}}, "model.experts.number", "use a model without experts"),
          ({}, {"backend": "auto"}, {}, "attention.backend", "use flash or sdpa"),
          ({}, {"backend": "sage"}, {}, "attention.recipe", "use scores or fine"),
          ({}, {"backend": "sage", "recipe": "fine"}, {}, "stability.monitor.every_steps", "use null"),
          ({}, {"backend": "sage", "recipe": "fine"}, {"stability": {"quant_noise": {"every_steps": 10}}}, "stability.quant_noise.every_steps", "use null"),
      ]),
    ({"parallel": {"context_parallel_size": 4}, "data": {"seq_length": 1022}}, 4,
     "context_parallel_split", "error", "data.seq_length", "1022: is not a multiple of parallel.context_parallel_size 4", "use 1020 or 1024"),
    ({"parallel": {"context_parallel_size": 2, "tensor_parallel_size": 2, "sequence_parallel": True}, "data": {"seq_length": 1022}}, 4,
     "sequence_parallel_split", "error", "data.seq_length", "1022: is not a multiple of parallel.tensor_parallel_size 2 x context_parallel_size 2,", "use 1020 or 1024"),
    ({"parallel": {"context_parallel_size": 2}, "tokens_per_step": {"schedule": "constant", "tokens": 65000}}, 8,
     "whole_micro_steps", "error", "tokens_per_step.tokens", "seq_length 1024 x 4 data-parallel ranks = 8192", "use 57344 or 65536"),
    ({"parallel": {"tensor_parallel_size": 3}, "model": {"num_attention_heads": 6, "head_dim": 64, "vocab_size": 1000}}, 3,
     "tensor_parallel_vocab", "error", "parallel.tensor_parallel_size", "3: does not divide the padded vocabulary 1024", "divisor of 128"),
    ({"tokens_per_step": {"schedule": "constant", "tokens": 65000}}, 4,
     "whole_micro_steps", "error", "tokens_per_step.tokens", "65000: is not a multiple of micro_batch_size 2 x seq_length 1024 x 4 data-parallel ranks = 8192", "use 57344 or 65536"),
    ({"data": {"micro_batch_size": 8}, "tokens_per_step": {"schedule": "constant", "tokens": 12288}}, 2,
     "whole_micro_steps", "error", "tokens_per_step.tokens", "12288: is not a multiple", "use 16384, or data.micro_batch_size 6"),
    ({"tokens_per_step": {"schedule": "constant", "tokens": 3072}}, 2,
     "whole_micro_steps", "error", "tokens_per_step.tokens", "3072: is not a multiple", "use 4096, or fewer data-parallel ranks"),
    ({"tokens_per_step": {"schedule": "constant", "tokens": 4096}}, 4,
     "whole_micro_steps", "error", "tokens_per_step.tokens", "4096: is not a multiple", "use 8192,"),
    ({"data": {"micro_batch_size": 10**17}}, 1,  # The fix must not be searched among all smaller numbers.
     "whole_micro_steps", "error", "tokens_per_step.tokens", "65536: is not a multiple", "use data.micro_batch_size 64"),
    ({"optimizer": {"lr": 1e-12}}, 1,
     "small_lr", "warning", "optimizer.lr", "1e-12: fp32 rounds a step of AdamW away beside weights that begin with", "such as 3e-4"),
    ({"training": {"init_from": "runs/{{name}}"}}, 1,
     "path_not_expanded", "error", "training.init_from", "is taken as it is written: variables are not replaced", "write the path in full"),
    ({"optimizer": {"lr": 3e-2}}, 1,
     "large_lr", "warning", "optimizer.lr", "0.03: one step of AdamW may change each weight by that much; they begin with a standard deviation of model.init_std 0.02", "such as 3e-4"),
    ({"optimizer": {"weight_decay": 1000}}, 1,
     "decay_in_one_step", "error", "optimizer.weight_decay", "1000.0: times optimizer.lr 0.001 is 1 or more", "smaller optimizer.lr (3e-4, say), or a decay far below 1000"),
    ({"tokens_per_step": ramp(8192, 65000, 10**6)}, 4,
     "whole_micro_steps", "error", "tokens_per_step.end", "65000: is not a multiple", "use 57344 or 65536"),
    ({"tokens_per_step": staged((0, 8192), (10**6, 10000), (10**7, 65536))}, 4,
     "whole_micro_steps", "error", "tokens_per_step.stages.1.tokens", "10000: is not a multiple", "use 8192 or 16384"),
    ({"tokens_per_step": ramp(8192, 65536, 10**6, 4096)}, 4,
     "whole_micro_steps", "error", "tokens_per_step.multiple", "4096: is not a multiple of micro_batch_size 2 x seq_length 1024 x 4", "use 8192,"),
    ({"tokens_per_step": ramp(10240, 65536, 10**6, 4096)}, 1,
     "ramp_multiple", "error", "tokens_per_step.start", "10240: is not a multiple of tokens_per_step.multiple 4096", "use 8192 or 12288, or a multiple such as 2048, which divides both ends"),
    ({"tokens_per_step": ramp(65536, 10240, 10**6, 4096)}, 1,
     "ramp_multiple", "error", "tokens_per_step.end", "10240: is not a multiple of tokens_per_step.multiple 4096", "use 8192 or 12288, or a multiple such as 2048, which divides both ends"),
    ({"tokens_per_step": ramp(65536, 65536 * 10**7, 10**6)}, 1,
     "ramp_too_fine", "error", "tokens_per_step.multiple", "null: with multiples of 65536 tokens the ramp has steps of 10,000,000 sizes", "use a larger multiple"),
    ({"tokens_per_step": ramp(32768, 65536, 10**6)}, 1,
     "ramp_in_one_step", "warning", "tokens_per_step.multiple", "null: tokens per step are rounded down to multiples of 32768: 32768 until the ramp ends, then 65536", "4096 makes steps of that size between"),
    ({"tokens_per_step": staged((5, 65536))}, 1,
     "first_stage", "error", "tokens_per_step.stages.0.from_tokens", "5: the first stage must begin at 0", "set it to 0"),
    ({"tokens_per_step": staged((0, 65536), (2000, 8192), (2000, 65536))}, 1,
     "stages_in_order", "error", "tokens_per_step.stages.2.from_tokens", "2000: is not after the stage before it, which begins at 2000", "increasing"),
    ({"tokens_per_step": staged((0, 65536), (10**8, 8192))}, 1,
     "stage_never_reached", "warning", "tokens_per_step.stages.1.from_tokens", "the run ends before, at training.total_tokens 100000000", "train longer"),
    ({"training": {"drop_steps": [3, 10**6]}}, 1,
     "no_effect", "warning", "training.drop_steps", "[1000000]: has no effect with training.total_tokens 100000000: the run ends before step", "remove"),
    ({"tokens_per_step": ramp(65536, 262144, 10**6, 2048), "training": {"drop_steps": [10**4]}}, 1,
     "no_effect", "warning", "training.drop_steps", "[10000]: has no effect with training.total_tokens 100000000: the run ends before step 1527", "remove"),
    ({"profile": {"from_step": 10**6}}, 1,
     "no_effect", "warning", "profile.from_step", "1000000: has no effect with training.total_tokens 100000000: the run ends before step", "remove"),
    ({"tokens_per_step": ramp(8192, 65536, 2 * 10**8)}, 1,
     "ramp_never_ends", "warning", "tokens_per_step.ramp_tokens", "65536 tokens per step are never reached", "shorten the ramp"),
    ({"training": {"total_tokens": 65535}, "lr_schedule": {"warmup_tokens": 0}}, 1,
     "total_tokens", "error", "training.total_tokens", "65535: is less than the first optimizer step of 65536", "train longer"),
    ({"lr_schedule": {"warmup_tokens": 10**8}}, 1,
     "warmup_before_end", "error", "lr_schedule.warmup_tokens", "is not less than training.total_tokens 100000000", "shorten"),
    ({"lr_schedule": {"warmup_tokens": 90_000_000}}, 1,
     "warmup_of_most", "warning", "lr_schedule.warmup_tokens", "takes 90% of the run", "for example lr_schedule.warmup: 0.025. In a run of 400 steps 0.75 was"),
    ({"lr_schedule": {"warmup": 0.01}}, 1,
     "one_warmup", "error", "lr_schedule.warmup_tokens", "1000000: is a second warm-up beside lr_schedule.warmup 0.01", "keep one"),
    ({"lr_schedule": {"shape": "wsd", "decay_tokens": 99_500_000}}, 1,
     "decay_after_warmup", "error", "lr_schedule.decay_tokens", "with a warm-up of 1000000 a decay of 99500000 tokens is more than", "use decay_tokens of at most 99000000"),
    ({"lr_schedule": {"shape": "wsd", "decay": 0.995}}, 1,
     "decay_after_warmup", "error", "lr_schedule.decay", "0.995: with a warm-up of 1000000 a decay of 99500000 tokens is more than", "use at most 0.99, or"),
    ({"lr_schedule": {"shape": "wsd", "decay": 0.2, "decay_tokens": 5}}, 1,
     "one_decay", "error", "lr_schedule.decay_tokens", "5: is a second decay beside lr_schedule.decay 0.2", "keep one of the two, and set the other to null"),
    ({"lr_schedule": {"decay": 0.2}}, 1,
     "no_effect", "warning", "lr_schedule.decay", "has no effect with shape cosine", "remove it"),
    ({"lr_schedule": {"shape": "wsd", "warmup_tokens": 95_000_000}}, 1,
     "decay_after_warmup", "error", "lr_schedule.decay", "with a warm-up of 95000000 a decay of 10000000 tokens is more than training.total_tokens 100000000", "use decay_tokens of at most 5000000, or shorten the warm-up"),
    ({"lr_schedule": {"min_lr": 2e-3}}, 1,
     "min_lr", "error", "lr_schedule.min_lr", "0.002: is above the peak, optimizer.lr 0.001", "smaller"),
    ({"training": {"dtype": "fp32"}, "attention": {"backend": "flash"}}, 1,
     "flash_needs_16_bits", "error", "attention.backend", "flash-attn takes bf16 only", "sdpa"),
    ({"training": {"dtype": "fp32"}}, 1,
     "sage_in_fp32", "info", "training.dtype", "on a machine without a GPU only", "bf16"),
    ({"parallel": {"gradient_reduction": "bf16"}, "training": {"dtype": "fp32"}}, 1,
     "gradient_reduction_in_fp32", "error", "parallel.gradient_reduction", "would round the gradients of a run in fp32", "use fp32, or"),
    ({"parallel": {"gradient_reduction": "bf16", "zero_stage": 3}}, 1,
     "zero_3_of_deepspeed", "error", "parallel.zero_stage", "by FSDP2 alone, and parallel.engine auto is deepspeed", "leave parallel.gradient_reduction out"),
    ({"parallel": {"engine": "deepspeed", "zero_stage": 0}}, 1,
     "zero_0_in_bf16", "info", "parallel.zero_stage", "0: runs as stage 1", ""),
    ({"parallel": {"engine": "fsdp", "gradient_reduction": "bf16"}}, 1,
     "gradient_reduction_of_fsdp", "error", "parallel.gradient_reduction", "one precision for both sums", "use fp32, or"),
    ({"parallel": {"engine": "deepspeed", "shard_size": 2}}, 4,
     "shard_size_of_deepspeed", "error", "parallel.shard_size", "2: is for parallel.engine fsdp", "set parallel.engine: fsdp"),
    ({"parallel": {"shard_size": 2, "gradient_reduction": "bf16"}}, 4,
     "shard_size_of_deepspeed", "error", "parallel.shard_size", "auto is deepspeed with parallel.gradient_reduction", "leave parallel.gradient_reduction out"),
    ({"parallel": {"offload": "optimizer", "gradient_reduction": "bf16"}}, 1,
     "offload_of_deepspeed", "error", "parallel.offload", "auto is deepspeed with parallel.gradient_reduction, which only", "leave parallel.gradient_reduction out, or use none"),
    ({"parallel": {"engine": "fsdp", "shard_size": 3, "tensor_parallel_size": 2}}, 8,
     "shard_size", "error", "parallel.shard_size", "3: does not divide the 4 replicas of this launch (8 ranks over tensor_parallel_size 2)", "use 1, 2, 4, or null"),
    ({"parallel": {"engine": "fsdp", "shard_size": 2, "zero_stage": 0}}, 2,
     "no_effect", "warning", "parallel.shard_size", "zero_stage 0, where every rank has all weights", "remove it"),
    ({"lr_schedule": {"decay_tokens": 5}}, 1,
     "no_effect", "warning", "lr_schedule.decay_tokens", "has no effect with shape cosine", "remove it"),
    ({"lr_schedule": {"shape": "constant", "min_lr": 1e-5}}, 1,
     "no_effect", "warning", "lr_schedule.min_lr", "has no effect with shape constant", "remove it"),
    ({"lr_schedule": {"reference_tokens_per_step": 5}}, 1,
     "no_effect", "warning", "lr_schedule.reference_tokens_per_step", "has no effect with batch_rule none", "remove it"),
    ({"lr_schedule": {"batch_rule": "sqrt"}, "tokens_per_step": staged((0, 8192), (10**6, 65536))}, 1,
     "batch_rule_reference", "error", "lr_schedule.reference_tokens_per_step", "null: batch_rule sqrt needs it", "8192 if optimizer.lr is meant for the first steps"),
    ({"lr_schedule": {"batch_rule": "linear"}, "tokens_per_step": ramp(8192, 65536, 10**6)}, 1,
     "batch_rule_reference", "error", "lr_schedule.reference_tokens_per_step", "made adding a stage change the learning rates before it", "goes on exactly as before with the largest of its schedule, 65536"),
    ({"parallel": {"sequence_parallel": True}}, 1,
     "no_effect", "warning", "parallel.sequence_parallel", "has no effect with tensor_parallel_size 1", "remove it"),
    ({"evaluation": {"every_tokens": 5}}, 1,
     "no_effect", "warning", "evaluation.every_tokens", "has no effect with no data.valid", "remove it"),
    ({"evaluation": {"tasks_every_tokens": 5}}, 1,
     "no_effect", "warning", "evaluation.tasks_every_tokens", "has no effect with no evaluation.tasks", "remove it"),
    ({"evaluation": {"tasks_limit": 5}}, 1,
     "no_effect", "warning", "evaluation.tasks_limit", "has no effect with no evaluation.tasks", "remove it"),
    ({"data": {"document_attention": False}}, 1,
     "positions_across_documents", "error", "data.document_positions", "restart at every document, while attention crosses", "set data.document_positions: false"),
    ({"data": {"valid": [{"path": "x"}]}}, 1,
     "held_out_data", "warning", "data.valid", '"x": is also a training source', "not trained on"),
    ({"training": {"init_from": "x/checkpoints/step-00000005"}}, 1,
     "init_from_itself", "error", "training.init_from", "is this run's own folder", "leave it out"),
    ({"training": {"init_from": "/nowhere"}}, 1,
     "data_files", "warning", "training.init_from", "no checkpoint there", "`sagetrain import` wrote"),
    ({"training": {"init_moments": True}}, 1,
     "no_effect", "warning", "training.init_moments", "has no effect with no training.init_from", "remove"),
]  # fmt: skip


@pytest.mark.parametrize(("attention", "positions"), [(True, True), (True, False), (False, False)])
def test_documents_may_share_positions_but_not_the_reverse(attention, positions):
    cfg = run_config(data={"document_attention": attention, "document_positions": positions})
    assert check(cfg, 1, files=False) == check(run_config(), 1, files=False)


@pytest.mark.parametrize("case", CASES)
def test_findings(case):
    check_found(*case)


@pytest.mark.parametrize(("fix", "changes"), [
    ("use 8 with num_key_value_heads 2 and head_dim 64, or a tensor_parallel_size of 1, 2", [
        {"model.num_attention_heads": "8", "model.num_key_value_heads": "2", "model.head_dim": "64"},
        {"parallel.tensor_parallel_size": "1"}, {"parallel.tensor_parallel_size": "2"}]),
    ("use at most 4, or linear.head bf16", [{"model.num_attention_heads": "4"}, {"linear.head": "bf16"}]),
    ("train longer, or set data.tokenizer: null", [{"data.tokenizer": "null"}]),
])  # fmt: skip
def test_a_fix_is_read_as_its_reader_does(tmp_path, fix, changes):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run_config().model_dump(mode="json", exclude_unset=True)))
    finding = Finding("a_rule", "error", "model.num_attention_heads", 3, "", fix)
    assert [each for each, _ in fixed(finding, tmp_path / "run.yaml")] == changes


@given(st.data())
def test_a_fix_of_a_layout_passes_all_rules_of_the_layout(data):
    draw = lambda *numbers: data.draw(st.sampled_from(numbers))  # noqa: E731
    model = {
        "num_attention_heads": data.draw(st.integers(1, 24)),
        "hidden_size": 4 * data.draw(st.integers(6, 80)),
        "ffn_hidden_size": data.draw(st.integers(32, 300)),
    }
    model |= draw({}, {"head_dim": 32}) | draw({}, {"num_key_value_heads": data.draw(st.integers(1, 12))})
    parallel = {"tensor_parallel_size": draw(1, 2, 3, 4, 6, 8), "context_parallel_size": draw(1, 1, 2, 3, 4)}
    parallel |= {"sequence_parallel": draw(True, False), "pipeline_parallel_size": draw(1, 1, 2)}
    sections = {"model": model, "parallel": parallel, "attention": {"backend": "sdpa"}}
    check_fixes(sections, draw(1, 2, 3, 4, 6, 8, 12, 16, 24, 48))


def test_a_length_that_a_fix_names_is_right_for_all_rules():
    """12 ranks that exchange heads, times two that gather keys, cut sequences of whole tiles into equal slices."""
    sizes = {"parallel": {"context_parallel_size": 24}, "attention": {"backend": "sdpa"}}
    shape = {"num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 64}

    def about_length(length):
        cfg = run_config(**sizes, model=shape, data={"seq_length": length, "micro_batch_size": 1})
        return [each for each in check(cfg, 24, files=False) if each.key == "data.seq_length"]

    (finding,) = about_length(1000)
    fitting = [int(number) for number in re.findall(r"\d+", finding.fix.split(",")[0])]
    assert finding.rule == "gather_of_tokens" and fitting == [768, 1536]
    assert [about_length(length) for length in fitting] == [[], []]


def test_vocabulary_smaller_than_the_tokenizers():
    finding = only(fit(run_config(model={"vocab_size": 1000}), 1, vocab_size=32000))
    assert "1000: is less than the 32000 tokens of the tokenizer" in str(finding)
    assert fit(run_config(model={"vocab_size": 32000}), 1, vocab_size=32000) == []


def test_what_has_too_many_sizes_of_steps_is_checked_in_no_time():
    cfg = run_config(
        tokens_per_step=ramp(2048, 2048 * 10**12, 10**17),
        training={"run_dir": "x", "total_tokens": 10**18},
        linear={"keep_first_fraction": 0.5},
    )
    assert "ramp_too_fine" in {found.rule for found in check(cfg, 1, files=False)}


def test_the_vocabulary_is_padded():
    assert [padded_vocab_size(n) for n in (1, 128, 129, 50257)] == [128, 128, 256, 50304]


def test_check_puts_errors_first_and_names_file_and_line(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {num_layers: 2, hidden_size: 256, ffn_hidden_size: 768, num_attention_heads: 4}\n"
        "data:\n  train: [{path: here}]\n  seq_length: 1024\n  micro_batch_size: 2\n"
        "tokens_per_step:\n  schedule: constant\n  tokens: 65000\n"
        "optimizer: {lr: 1e-3}\n"
        "lr_schedule: {shape: constant, min_lr: 1e-5, warmup_tokens: 5}\n"
        "training: {run_dir: x, total_tokens: 1e8}\n"
    )
    overrides = ["parallel.sequence_parallel=true"]
    findings = check(load_config(path, overrides), 1, path=path, overrides=overrides)
    assert [f.level for f in findings] == ["error", "error", "warning", "warning"]
    assert [f.where.removeprefix(f"{tmp_path}/") for f in findings] == [
        "run.yaml:8",
        "run.yaml:3",
        "override parallel.sequence_parallel=true",
        "run.yaml:10",
    ]
    assert str(findings[0]).startswith(f"{path}:8: tokens_per_step.tokens = 65000: is not a multiple of")


def test_missing_data_is_an_error_to_train_a_warning_to_plan(tmp_path):
    for end in (".bin", ".idx"):
        (tmp_path / f"whole{end}").touch()
    (tmp_path / "whole.json").touch()
    (tmp_path / "half.bin").touch()
    data = {
        "train": [{"path": f"{tmp_path}/whole"}, {"path": f"{tmp_path}/half"}],
        "valid": [{"path": f"{tmp_path}/none"}],
        "tokenizer": f"{tmp_path}/tokenizer.model",
    }
    for files, level in ((True, "error"), (False, "warning")):
        findings = check(run_config(data=data), 1, files=files)
        assert [(f.rule, f.level, f.key) for f in findings] == [
            ("data_files", level, "data.train.1.path"),
            ("data_files", level, "data.valid.0.path"),
            ("data_files", level, "data.tokenizer"),
        ]
    assert re.search(
        r"half\": no .*half\.idx \[data_files\]\n    fix: write it with `sagetrain prepare`", str(findings[0])
    )
    assert "no such file" in str(findings[2])


def test_nothing_prepared_is_one_finding(tmp_path) -> None:
    data = {"train": [{"path": f"{tmp_path}/train"}], "valid": [{"path": f"{tmp_path}/valid"}]}
    finding = only(check(run_config(data=data), 1, files=False))
    assert (finding.rule, finding.key, finding.value) == ("data_files", "data.train.0.path", f"{tmp_path}/train")
    assert finding.message == (
        f"nothing is prepared: no .bin and .idx of {tmp_path}/train, nor of {tmp_path}/valid, "
        f"and no {tmp_path}/tokenizer.model"
    )


def test_a_run_saved_or_evaluated_at_its_end_alone_is_told() -> None:
    sections = {name: {"every_tokens": 4096} for name in ("evaluation", "checkpoint")} | {
        "data": {"valid": [{"path": "y"}]}
    }
    for total, names in ((4096, ["evaluation.every_tokens", "checkpoint.every_tokens"]), (8192, [])):
        found = check(run_config(training={"total_tokens": total}, **sections), 1, files=False)
        assert [finding.key for finding in found if finding.rule == "only_at_the_end"] == names


def test_the_tokenizer_beside_the_data_is_looked_for(tmp_path):
    for end in (".bin", ".idx", ".json"):
        (tmp_path / f"whole{end}").touch()
    cfg = run_config(data={"train": [{"path": f"{tmp_path}/whole"}]})
    finding = only(check(cfg, 1))
    assert (finding.rule, finding.key, finding.value) == ("data_files", "data.tokenizer", None)
    assert finding.message == f"no {tmp_path}/tokenizer.model"
    (tmp_path / "tokenizer.model").touch()
    assert check(cfg, 1) == []


def test_token_files_that_name_no_tokenizer_are_a_warning(tmp_path):
    for name in ("elsewhere.bin", "elsewhere.idx", "tokenizer.model"):
        (tmp_path / name).touch()
    finding = only(check(run_config(data={"train": [{"path": f"{tmp_path}/elsewhere"}]}), 1))
    assert (finding.rule, finding.level, finding.key) == ("unknown_tokenizer", "warning", "data.train.0.path")
    assert f"no {tmp_path}/elsewhere.json: nothing says which tokenizer" in finding.message


def test_a_default_is_placed_at_its_nearest_parent(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {num_layers: 2, hidden_size: 256, ffn_hidden_size: 768, num_attention_heads: 4}\n"
        "data: {train: [{path: here}], seq_length: 1024, micro_batch_size: 2}\n"
        "tokens_per_step: {schedule: constant, tokens: 65536}\n"
        "optimizer: {lr: 1e-3}\n"
        "training: {run_dir: x, total_tokens: 1e8}\n"
    )
    findings = check(load_config(path), 1, path=path, files=False)
    assert {f.rule: f.where for f in findings}["no_warmup"] == str(path)
