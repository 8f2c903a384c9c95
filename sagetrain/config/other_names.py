"""The names that other libraries give to our keys and values: Megatron-LM, torchtitan, transformers, DeepSpeed and
PyTorch. The error about an unknown name says what to write here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_EPOCHS = "training.total_tokens, in tokens: an epoch has as many as its `.json` says"
_BATCH = "tokens_per_step.tokens (of a step of all ranks), beside data.micro_batch_size (sequences of a rank at once)"
_STEPS = "training.total_tokens, in tokens: steps times tokens_per_step"
_SAVE = "checkpoint.every_tokens, in tokens: steps times tokens_per_step"
_DERIVED = "none: it follows from the ranks of the launch and the other sizes of parallel"
_NO_DROPOUT = "none: there is no dropout"
_ALL_WEIGHTS = "none: all weights are trained, in 16 bits or more; there are no adapters"
_PACKED = "none: documents always fill sequences; data.document_attention keeps attention within each"

# Our key for each name, or a text that says what there is. A name with a dot belongs to that section alone.
_KEYS: dict[str, str] = {
    other: ours
    for ours, others in {
        "parallel.tensor_parallel_size": "tp tp_size tp_degree tensor_model_parallel_size tensor_parallel "
        "tensor_parallel_degree autotp_size",
        "parallel.context_parallel_size": "cp cp_size cp_degree context_parallel context_parallel_degree ulysses_size "
        "ulysses_degree sequence_parallel_size ulysses_sequence_parallel_size sp_size",
        "parallel.pipeline_parallel_size": "pp pp_size pp_degree pipeline_size pipeline_stages num_stages stages "
        "pipeline_parallel pipeline_parallel_degree pipeline_model_parallel_size num_pipeline_stages",
        "parallel.pipeline_chunks (ranges of blocks on a stage; above 1 is interleaved 1F1B)": "virtual_pipeline_size "
        "vpp virtual_pipeline_model_parallel_size virtual_pipeline_parallel_size pipeline_schedule "
        "pipeline_parallel_schedule num_virtual_stages num_model_chunks parallel.schedule",
        "parallel.pipeline_blocks (the number of blocks in each chunk)": "num_layers_per_virtual_pipeline_stage "
        "pipeline_parallel_layers_per_stage pipeline_parallel_split_points decoder_first_pipeline_num_layers "
        "decoder_last_pipeline_num_layers pipeline_parallel_first_stage_less_layers module_fqns_per_model_part "
        "pipeline_parallel_last_stage_less_layers pipeline_model_parallel_layout layers_per_stage",
        "data.micro_batch_size": "pipeline_parallel_microbatch_size per_device_train_batch_size local_batch_size "
        "micro_batch_size_per_gpu train_micro_batch_size_per_gpu device_batch_size",
        "parallel.shard_size (ranks that shard; others copy)": "hsdp hybrid_shard_size fsdp_size mics_shard_size "
        "dp_shard data_parallel_shard_degree "
        "zero_hpz_partition_size num_distributed_optimizer_instances dp_replicate data_parallel_replicate_degree "
        "replica_size",
        "parallel.zero_stage (3 shards weights, 1 and 2 keep them between passes)": "zero stage zero_level "
        "sharding_strategy reshard_after_forward fsdp_reshard_after_forward zero_optimization "
        "use_distributed_optimizer "
        "data_parallel_sharding_strategy sharding_stage",
        "parallel.offload": "cpu_offload offload_optimizer offload_param offload_params optimizer_cpu_offload "
        "enable_cpu_offload fsdp_offload_params offload_policy zero_offload",
        "parallel.zero_stage (3 is FSDP, by the default of parallel.engine)": "fsdp fsdp2 use_fsdp use_torch_fsdp2 "
        "use_megatron_fsdp strategy distributed_type",
        "parallel.gradient_reduction": "grad_reduce_in_bf16 mixed_precision_reduce accumulate_allreduce_grads_in_fp32 "
        "communication_data_type reduce_dtype grad_reduce_in_fp32",
        "parallel.tensor_parallel_overlap": "tp_comm_overlap enable_async_tensor_parallel async_tp",
        "parallel.world_size": "gpus num_gpus num_gpus_per_node nnodes nodes nproc_per_node num_nodes devices",
        "parallel": "parallelism",
        _DERIVED: "data_parallel_size dp dp_size dp_degree data_parallel data_parallel_degree",
        "parallel.expert_parallel_size": "expert_model_parallel_size expert_parallel_degree ep ep_size",
        "model.experts (number, per_token, ffn_size, ...)": "moe mixture_of_experts moe_args",
        "model.experts.number": "num_experts num_local_experts n_routed_experts moe_num_experts",
        "model.experts.per_token": "moe_top_k num_experts_per_tok moe_router_topk top_k_experts",
        "model.experts.ffn_size": "moe_intermediate_size moe_ffn_hidden_size moe_inter_dim expert_hidden_size",
        "model.experts.shared": "num_shared_experts n_shared_experts moe_shared_expert_intermediate_size",
        "model.experts.scores": "score_func scoring_func moe_router_score_function",
        "model.experts.renormalize": "norm_topk_prob route_norm moe_router_pre_softmax",
        "model.experts.scale": "routed_scaling_factor route_scale moe_router_topk_scaling_factor",
        "model.experts.dense_layers (first n)": "first_k_dense_replace n_dense_layers moe_layer_freq",
        "model.experts.balance.bias_rate": "moe_router_bias_update_rate load_balance_coeff bias_update_speed",
        "model.experts.balance.aux_weight": "moe_aux_loss_coeff router_aux_loss_coef aux_loss_alpha",
        "model.experts.balance.z_weight": "moe_z_loss_coeff router_z_loss_coef",
        "model.num_layers": "n_layer n_layers num_hidden_layers num_blocks depth",
        "model.hidden_size": "dim d_model n_embd embed_dim hidden_dim model_dim",
        "model.ffn_hidden_size": "intermediate_size ffn_dim mlp_dim multiple_of ffn_dim_multiplier d_ff",
        "model.num_attention_heads": "n_head n_heads num_heads",
        "model.num_key_value_heads (key heads, or their groups)": "kv_heads n_kv_heads n_kv_head num_kv_heads "
        "num_query_groups n_query_groups group_query_attention",
        "model.head_dim": "kv_channels head_size d_head",
        "model.norm_eps": "rms_norm_eps layer_norm_eps norm_epsilon layernorm_epsilon",
        "model.init_std": "initializer_range init_method_std",
        "model.rope_theta": "rotary_base rope_base rope_freq_base",
        "model.rope_theta, and model.rope_scaling for another range than the default": "rope_parameters rope_type",
        "model.tie_embeddings": "tie_word_embeddings weight_tying share_embeddings_and_output_weights "
        "untie_embeddings_and_output_weights",
        "data.seq_length": "seq_len sequence_length max_seq_len max_seq_length max_position_embeddings block_size "
        "context_length sequence_len cutoff_len max_length",
        "model.qkv_bias (of q, k and v; conventions gpt_oss has more)": "attention_bias mlp_bias bias add_qkv_bias",
        "model.conventions (gpt_oss)": "swiglu_limit swiglu_alpha activation_func_clamp_value",
        "model.activation (swiglu or geglu)": "hidden_act hidden_activation activation_func",
        "model.windows (tokens, pattern, rope_theta)": "window sliding_window window_size sliding_window_pattern",
        "model.delta_net (pattern, key_heads, value_heads, ...)": "linear_attention linear_attn gated_delta_net "
        "full_attention_interval experimental_attention_variant linear_attention_freq",
        "model.delta_net.key_heads": "linear_num_key_heads",
        "model.delta_net.value_heads": "linear_num_value_heads",
        "model.delta_net.key_dim": "linear_key_head_dim",
        "model.delta_net.value_dim": "linear_value_head_dim",
        "model.delta_net.conv_size": "linear_conv_kernel_dim",
        "model.value_embeddings": "value_embeds use_value_embeds value_embedding use_value_embedding value_emb",
        "model.sinks": "attention_sinks learnable_sink learnable_sinks s_aux",
        _NO_DROPOUT: "dropout attention_dropout hidden_dropout",
        "none: there is no soft cap of logits": "softcap logit_softcap attn_logit_softcap attn_logit_softcapping "
        "final_logit_softcap final_logit_softcapping",
        "none: there is no prediction of several tokens": "mtp num_mtp_layers mtp_num_layers num_nextn_predict_layers",
        "none: all of a head is rotated": "rotary_percent rotary_pct partial_rotary_factor",
        "none: norms are RMSNorms, with model.norm_eps": "norm_type normalization rms_norm layernorm",
        "none: bf16 needs no scale of the loss": "loss_scale initial_loss_scale loss_scaling",
        "none: a file is one whole configuration, which KEY=VALUE on the command line changes": "defaults include "
        "extends base _base_ import inherit",
        "attention.qk_norm": "use_qk_norm qk_layernorm",
        "model.vocab_size, which is padded to a multiple of 128": "pad_vocab_size_multiple pad_vocab_size_to "
        "make_vocab_size_divisible_by",
        "attention.backend": "attn_implementation attention_implementation attn_backend attention_backend "
        "use_flash_attn use_flash_attention flash_attention attention.implementation attention.type "
        "attention.precision attn_type",
        "attention.backend, for all layers": "attention.layers attention.overrides",
        "linear.precision": "float8 fp8 mxfp8 quantize quantization fp8_format fp8_recipe linear.dtype linear.type",
        "linear.keep_first_blocks, keep_last_blocks or keep_layers_below": "linear.filter filter_fqns linear.overrides "
        "linear.layers linear.exclude first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16",
        "optimizer.lr": "learning_rate max_lr peak_lr",
        "optimizer.weight_decay": "wd",
        "optimizer.betas": "beta1 beta2 adam_beta1 adam_beta2 beta",
        "optimizer.eps": "adam_eps adam_epsilon epsilon",
        "optimizer.clip_grad": "grad_clip gradient_clipping max_grad_norm max_norm gradient_clip_val clip_grad_norm",
        "optimizer.name": "optimizer.type optim optimizer_name",
        "optimizer.muon.momentum (AdamW's is optimizer.betas)": "optimizer.momentum muon_momentum",
        "optimizer.muon.steps": "ns_steps backend_steps num_ns_steps muon_num_ns_steps newton_schulz_steps",
        "optimizer.muon.adjust_lr": "adjust_lr_fn muon_scale_mode scale_mode",
        "optimizer.lr, and optimizer.lr_of for embedding, head, matrix, gain or router": "muon_lr muon.lr embed_lr "
        "embedding_lr matrix_lr adam_lr adamw_lr router_lr head_lr unembedding_lr",
        "optimizer.lr_base_width, the width at which the rates were found": "mup use_mup mup_base_width base_width "
        "mup_width_multiplier mup_base_hidden_size base_shapes",
        "optimizer.weight_decay_lr, the rate that weight decay is multiplied by": "independent_weight_decay "
        "decoupled_weight_decay fully_decoupled independent_wd",
        "optimizer.moments": "moments_dtype moment_dtype state_dtype exp_avg_dtype exp_avg_sq_dtype use_8bit "
        "optim_bits optimizer_state_dtype",
        "optimizer.master": "master_weights master_dtype main_params_dtype stochastic_rounding kahan "
        "master_weight_dtype "
        "use_kahan_summation bf16_stochastic_round",
        "none: the updates are written for our layouts already": "fused foreach implementation",
        "lr_schedule": "lr_scheduler optimizer.schedule scheduler",
        "lr_schedule.shape": "lr_schedule.type lr_schedule.name lr_schedule.schedule decay_type lr_decay_style "
        "lr_scheduler_type",
        "lr_schedule.warmup, a share of the run": "warmup warmup_ratio lr_warmup_fraction",
        "lr_schedule.warmup_tokens, in tokens": "warmup_steps warmup_iters lr_warmup_iters lr_warmup_samples",
        "lr_schedule.decay, a share of the run, with shape wsd": "decay_ratio cooldown cooldown_ratio",
        "lr_schedule.decay_tokens, in tokens, with shape wsd": "decay_steps lr_wsd_decay_iters",
        "lr_schedule.min_lr": "min_lr_factor min_lr_ratio end_lr",
        "training.total_tokens": "num_tokens max_tokens train_tokens",
        _STEPS: "steps max_steps train_iters num_steps total_steps max_iters train_steps train_samples",
        _EPOCHS: "epochs num_train_epochs num_epochs max_epochs",
        _BATCH: "batch_size global_batch_size train_batch_size total_batch_size gradient_accumulation_steps "
        "accumulate_grad_batches accumulation_steps",
        "training.run_dir": "output_dir save_dir dump_folder job checkpoint.folder save out_dir log_dir save_folder",
        "training.activation_checkpointing": "gradient_checkpointing activation_checkpoint ac recompute "
        "recompute_granularity recompute_num_layers recompute_method recompute_activations checkpoint_activations "
        "selective_ac_option activation_checkpointing",
        "training.dtype (bf16 or fp32; 8 bits are linear.precision)": "bf16 fp16 amp mixed_precision "
        "mixed_precision_param training.precision torch_dtype params_dtype model.dtype",
        "training.compile": "torch_compile compile compile_model",
        "training.init_from, for the weights of a run; the same command continues a run": "load load_checkpoint "
        "resume_from_checkpoint pretrained_model_name_or_path initial_load_path from_checkpoint ckpt_path",
        "training.init_from, a run: `sagetrain import` reads a Hugging Face folder into one": "base_model model_id "
        "model_name_or_path model_name hf_model",
        _ALL_WEIGHTS: "lora lora_r lora_alpha lora_rank lora_target_modules peft peft_config use_peft adapter "
        "finetuning_type load_in_4bit load_in_8bit quantization_bit freeze",
        "none: equal launches give equal bits": "deterministic deterministic_mode use_deterministic_algorithms",
        "training.timeout_minutes": "timeout distributed_timeout_minutes comm init_timeout_seconds "
        "train_timeout_seconds ddp_timeout",
        _SAVE: "checkpoint.interval save_interval save_steps checkpoint.every_steps save_every",
        "checkpoint.keep_last": "save_total_limit keep_latest_k max_checkpoints",
        "none: checkpoints are always written beside training": "async async_save async_mode",
        "logging": "metrics",
        "logging.every_steps": "log_interval logging_steps log_freq log_every",
        "logging.wandb": "report_to enable_wandb wandb_project",
        "logging.tensorboard": "enable_tensorboard tensorboard_dir",
        "evaluation.every_tokens, in tokens: steps times tokens_per_step": "evaluation.interval "
        "evaluation.every_steps eval_interval eval_steps eval_every",
        "evaluation.num_sequences": "eval_iters",
        "data.train, a list of token files of `sagetrain prepare`": "dataset dataset_path data_path data.path "
        "dataset_name train_data datasets train_file train_files train_dataset",
        "data.valid, from `sagetrain prepare --valid-fraction`": "val_set_size val_size valid_data validation "
        "validation_data eval_dataset test_datasets validation_split split",
        "data.tokenizer": "tokenizer_type tokenizer_path tokenizer_model tokenizer_name hf_assets_path",
        "none: samples are always in a random order of training.seed": "shuffle",
        _PACKED: "packing pack sample_packing reset_attention_mask",
        "data.document_positions": "reset_position_ids",
        "profile": "profiling profiler",
        "none: what can travel beside computation does": "overlap_comm overlap_grad_reduce overlap_param_gather",
        "none: `sagetrain config NAME` prints a whole configuration of a size": "flavor model.name model.size preset",
    }.items()
    for other in others.split()
}

# The value to take instead of another library's, where it is among the choices of a key.
_VALUES: dict[str, str] = {
    other: ours
    for ours, others in {
        "bf16": "bfloat16 torch.bfloat16 bf16-mixed bf16-true",
        "fp32": "float32 float torch.float32 32-true",
        "fp8": "float8 fp8_e4m3 e4m3 float8_e4m3fn hybrid",
        "int8": "8bit w8a8 i8",
        "sage": "int8 sageattention sage_attention sagebwd",
        "flash": "flash_attention_2 flash_attention_3 flash_attention_4 flash_attn fa2 fa3 fa4",
        "reference": "eager math",
        "fsdp": "fsdp2 fully_shard torch torch_fsdp",
        "deepspeed": "zero",
        "optimizer": "cpu",
        "adamw": "adam",
        "adamw, with optimizer.moments int8": "adamw_8bit adamw8bit adam8bit adamw_bnb_8bit paged_adamw_8bit",
        "wsd": "warmup_stable_decay trapezoidal",
        "cosine": "cosine_with_min_lr cosine_annealing",
        "constant": "none fixed flat",
        "linear": "linear_with_warmup polynomial",
    }.items()
    for other in others.split()
}
# The key that takes values for which people look at another key.
_VALUES_ELSEWHERE = {"training.dtype": ("linear.precision", ("fp8", "int8"))}
_SWITCHES = {"on": True, "yes": True, "true": True, "off": False, "no": False, "false": False}
_SWITCHED = {True: ("on", "full", "before_rope", "auto"), False: ("off", "none", "never")}


def key_meant(name: str, section: str) -> str | None:
    """Return a hint with our key for another library's name of a key in a dotted section, or with the reason why there
    is none."""
    name = name.lower().replace("-", "_").strip("_")
    meant = _KEYS.get(f"{section.rpartition('.')[2]}.{name}") or _KEYS.get(name)
    if meant is None:
        return None
    none = meant.removeprefix("none: ")
    return f"the key here is {meant}" if none == meant else f"there is nothing to set here: {none}"


def value_meant(value: Any, choices: Sequence[Any], key: str = "") -> str | None:
    """Return the choice, and what goes with it, that a switch or another library's word stands for. The value may also
    be one of another key than `key`, which is then returned with it."""
    switch = value if isinstance(value, bool) else _SWITCHES.get(value.lower()) if isinstance(value, str) else None
    if switch is not None and choices == (True, False):
        meant = str(switch).lower()
        return f"{meant}, without quotes" if str(value).lower() == meant else meant
    if switch is not None and (word := next((word for word in _SWITCHED[switch] if word in choices), None)):
        return word
    if not isinstance(value, str):
        return None
    word = value.lower()
    if word in choices:
        return word
    ours = _VALUES.get(word, "")
    elsewhere, theirs = _VALUES_ELSEWHERE.get(key, ("", ()))
    if low := next((each for each in (word, ours) if each in theirs), None):
        return f"{elsewhere}: {low}"
    return ours if ours.partition(",")[0] in choices else None
