"""Parameters, FLOPs and memory of a model as plain integers: no torch, so that planning runs anywhere."""

from __future__ import annotations

from typing import NamedTuple

from sagetrain.config.arithmetic import data_parallel_size, resolved_zero_stage, token_multiple
from sagetrain.config.schema import AttentionConfig, ModelConfig, RunConfig

# DeepSpeed's defaults for deepspeed.zero_optimization, in elements; the first also bounds what stage 1 flattens.
_REDUCE_BUCKET = 500_000_000
PREFETCH_BUCKET = 50_000_000
_REUSE_DISTANCE = 1_000_000_000
# Logits that exist at once; see parallel/cross_entropy.py.
_CHUNK_LOGITS = 2**28
# FLOPs of a block's matmuls from which two halves gain: below, a host launches slower than a GPU computes (RESULTS.md).
_OVERLAP_FLOPS = 3e12


class MemoryItem(NamedTuple):
    """One line of the memory estimate."""

    name: str
    bytes: int
    why: str


def num_parameters(model: ModelConfig, attention: AttentionConfig, vocab_size: int) -> int:
    """Exact number of parameters of Transformer with `vocab_size` (padded) rows in the embedding."""
    embeddings = (1 if model.tie_embeddings else 2) * vocab_size * model.hidden_size
    gains = (2 * model.num_layers + 1) * model.hidden_size
    if attention.qk_norm != "none":
        gains += 2 * model.num_layers * model.head_dim
    return embeddings + model.num_layers * _block_matrices(model) + gains


def flops_per_token(model: ModelConfig, vocab_size: int, seq_length: int) -> int:
    """Floating point operations of forward and backward for one token, by the usual convention for MFU.

    6 per weight of a matmul (the output projection counts, tied or not; the embedding lookup and gains do not), plus
    6 x layers x attention width x seq_length for causal attention: half the square, forward 1 and backward 2 parts.
    Recomputation is not counted, nor are the shorter spans of packed documents.
    """
    matmul_weights = model.num_layers * _block_matrices(model) + vocab_size * model.hidden_size
    return 6 * matmul_weights + 6 * model.num_layers * model.num_attention_heads * model.head_dim * seq_length


def _block_matrices(model: ModelConfig) -> int:
    """Weights of one block's matmuls: q and out, k and v, and the three of the MLP."""
    heads = 2 * model.num_attention_heads + 2 * model.num_key_value_heads
    return model.hidden_size * (heads * model.head_dim + 3 * model.ffn_hidden_size)


def parameters_per_rank(model: ModelConfig, attention: AttentionConfig, vocab_size: int, tensor_parallel: int) -> int:
    """Parameters that one tensor-parallel rank holds: matrices are split, gains are on every rank."""
    total = num_parameters(model, attention, vocab_size)
    embeddings = (1 if model.tie_embeddings else 2) * vocab_size * model.hidden_size
    matrices = embeddings + model.num_layers * _block_matrices(model)
    return total - matrices + matrices // tensor_parallel


def save_host_bytes(cfg: RunConfig, world_size: int, vocab_size: int) -> int:
    """Host memory that a rank keeps to write its share of a checkpoint from: fp32 weights and two Adam moments."""
    size = parameters_per_rank(cfg.model, cfg.attention, vocab_size, cfg.parallel.tensor_parallel_size)
    unsharded = cfg.parallel.zero_stage == 0 and cfg.training.dtype == "fp32"  # the first data-parallel rank writes all
    return 12 * (size if unsharded else -(-size * cfg.parallel.tensor_parallel_size // world_size))


def reduce_bucket_size(cfg: RunConfig, parameters: int) -> int:
    """deepspeed.zero_optimization.reduce_bucket_size, in elements: the YAML's, else DeepSpeed's default but no more
    than the parameters of the rank, since stages 2 and 3 allocate it whole."""
    given = cfg.deepspeed.get("zero_optimization", {}).get("reduce_bucket_size")
    return min(_REDUCE_BUCKET, parameters) if given is None else int(given)


def kept_for_backward(cfg: RunConfig, parameters: int) -> int:
    """Weights that ZeRO-3 gathers in forward and still has in backward, in elements: the last ones, which are needed
    again within stage3_max_reuse_distance elements (to the end and back)."""
    distance = cfg.deepspeed.get("zero_optimization", {}).get("stage3_max_reuse_distance", _REUSE_DISTANCE)
    return min(parameters, int(distance) // 2)


def overlaps(cfg: RunConfig) -> bool:
    """What parallel.tensor_parallel_overlap says, `auto` decided: whether micro-batches are taken in halves."""
    if cfg.parallel.tensor_parallel_overlap != "auto":
        return cfg.parallel.tensor_parallel_overlap == "on"
    tokens = cfg.data.micro_batch_size * cfg.data.seq_length // cfg.parallel.context_parallel_size
    return 6 * tokens * _block_matrices(cfg.model) >= _OVERLAP_FLOPS * cfg.parallel.tensor_parallel_size


def parts_of(tokens: int, tensor_parallel_size: int, overlap: bool) -> int:
    """In how many parts a rank's tokens go through the blocks: halves where each rank's shard of one is whole."""
    return 2 if overlap and tensor_parallel_size > 1 and tokens % (2 * tensor_parallel_size) == 0 else 1


def attention_calls(num_sequences: int, tokens: int, tensor_parallel_size: int, overlap: bool) -> int:
    """In how many parts they go through attention: the same where these are whole sequences, else all together."""
    parts = parts_of(tokens, tensor_parallel_size, overlap)
    return parts if num_sequences % parts == 0 else 1


def memory_per_rank(cfg: RunConfig, world_size: int, vocab_size: int) -> list[MemoryItem]:
    """Estimate of one rank's peak memory, itemised, in bytes; `vocab_size` is padded.

    What the rank always holds, and the largest of three moments: the loss over the last logits, the last block's
    backward, and the reduction of gradients. All follow what DeepSpeed 0.19 allocates for our settings and what
    autograd saves for our blocks, but for the workspace, a guess. Not counted: CUDA's context, NCCL and the slots
    of parallel/copies.py (1 to 3 GB), and fragmentation of the allocator.
    """
    size = parameters_per_rank(cfg.model, cfg.attention, vocab_size, cfg.parallel.tensor_parallel_size)
    ranks = world_size // cfg.parallel.tensor_parallel_size
    tokens = cfg.data.micro_batch_size * cfg.data.seq_length // cfg.parallel.context_parallel_size
    accumulates = max(cfg.tokens_per_step.named_tokens.values()) > token_multiple(
        cfg, data_parallel_size(cfg, world_size)
    )
    block = _Block(cfg)
    kept, running = block.activations(tokens), block.running(tokens)
    bucket, copies, left = _reduction(cfg, size, accumulates)
    moments = [
        [kept, *_loss(cfg, tokens, vocab_size, block)],
        [kept, *running, bucket],
        [*(item._replace(bytes=int(left * item.bytes)) for item in (kept, *running)), bucket, copies],
    ]
    largest = max(moments, key=lambda items: sum(item.bytes for item in items))
    return [item for item in (*_model_state(cfg, size, ranks, vocab_size, accumulates), *largest) if item.bytes]


def block_activation_bytes(cfg: RunConfig) -> int:
    """Bytes per token that autograd saves of one block, on one rank, without activation checkpointing."""
    return _Block(cfg).saved


def _model_state(cfg: RunConfig, size: int, ranks: int, vocab_size: int, accumulates: bool) -> list[MemoryItem]:
    """Weights, gradients and optimizer state of a rank with `size` parameters, while it holds all activations."""
    zero, dtype, stage = cfg.deepspeed.get("zero_optimization", {}), cfg.training.dtype, resolved_zero_stage(cfg)
    share, element = -(-size // ranks), _element(cfg)
    if stage == 0:
        return [
            MemoryItem("weights", 4 * size, "fp32"),
            MemoryItem("gradients", 4 * size, "fp32"),
            MemoryItem("optimizer", 8 * size, "two Adam moments in fp32; the weights are their own master copy"),
        ]
    optimizer = MemoryItem("optimizer", 12 * share, f"fp32 master copy and two Adam moments, 1/{ranks} of them")
    if stage == 3:
        largest = vocab_size * cfg.model.hidden_size // cfg.parallel.tensor_parallel_size
        ahead = int(zero.get("stage3_prefetch_bucket_size", PREFETCH_BUCKET))
        gathered = min(size, kept_for_backward(cfg, size) + max(largest, ahead))
        return [
            MemoryItem("weights", element * share, f"{dtype}, 1/{ranks} of them"),
            MemoryItem("gathered weights", element * gathered, "kept from forward to backward, and what is prefetched"),
            MemoryItem("gradients", 4 * share, f"fp32, 1/{ranks} of them"),
            MemoryItem("bucket", 4 * reduce_bucket_size(cfg, size), "fp32 gradients on their way, kept for good"),
            optimizer,
        ]
    if stage == 2:
        held = MemoryItem("gradients", 4 * share, f"fp32, 1/{ranks} of them")
    elif dtype == "bf16" and accumulates:
        held = MemoryItem("gradients", 6 * size, "bf16, and their fp32 sum over the accumulation")
    else:
        held = MemoryItem("gradients", 4 * size, "fp32")
    return [MemoryItem("weights", element * size, dtype), held, optimizer]


def _reduction(cfg: RunConfig, size: int, accumulates: bool) -> tuple[MemoryItem, MemoryItem, float]:
    """Gradients on their way to other ranks: the bucket held during backward, the copies made of a full one, and the
    share of the activations that is left when the first one is full.

    Stage 3 keeps its bucket for good (see _model_state). Stage 2 in bf16 flattens it, then converts to fp32. A bucket
    that holds all gradients is reduced after backward, as are those of stages 0 and 1; in bf16 that one flattens a copy
    only of what fits DeepSpeed's 5e8 elements, and without accumulation its bf16 gradients are only there once the
    activations are gone.
    """
    stage, sixteen_bit = resolved_zero_stage(cfg), cfg.training.dtype == "bf16"
    bucket = reduce_bucket_size(cfg, size)
    full = min(bucket, size)
    if stage == 0:
        held, copied = 0, 4 * min(size, _REDUCE_BUCKET)
    elif stage == 1:
        flat = (0 if accumulates else 2 * size) + (4 * size if size <= _REDUCE_BUCKET else 0)
        held, copied = (0, flat) if sixteen_bit else (4 * bucket, 0)
    elif stage == 2:
        held, copied = (2 * bucket, 6 * full) if sixteen_bit else (4 * bucket, 8 * full)
    else:
        held, copied = 0, 4 * full
    return (
        MemoryItem("bucket", held, "gradients on their way: deepspeed.zero_optimization.reduce_bucket_size"),
        MemoryItem("reduction", copied, "copies of the gradients that go to other ranks"),
        0.0 if stage < 2 else 1 - full / size,
    )


def _element(cfg: RunConfig) -> int:
    return 4 if cfg.training.dtype == "fp32" else 2


class _Block:
    """What autograd saves of one block, in bytes per token on one rank."""

    def __init__(self, cfg: RunConfig):
        model, split = cfg.model, cfg.parallel.tensor_parallel_size
        self.cfg = cfg
        self.element = _element(cfg)
        self.hidden = model.hidden_size
        self.sequence_split = split if cfg.parallel.sequence_parallel else 1
        self.compiled = cfg.training.compile != "off"
        self.heads = (model.num_attention_heads // split, model.num_key_value_heads // split)
        self.saved = self._norms() + self._qk_norm() + self._attention() + self._mlp(model.ffn_hidden_size // split)

    @property
    def recomputed(self) -> bool:
        return self.cfg.training.activation_checkpointing == "full"

    def activations(self, tokens: int) -> MemoryItem:
        """What all blocks keep of a micro-batch of `tokens` until backward."""
        layers = self.cfg.model.num_layers
        if self.recomputed:
            kept = tokens * self.element * self.hidden // self.sequence_split
            return MemoryItem("activations", layers * kept, "input of every block")
        what = "fused by torch.compile" if self.compiled else "not compiled: fp32 intermediates are kept"
        return MemoryItem(
            "activations", layers * tokens * self.saved, f"{self.saved:,} bytes per token and block, {what}"
        )

    def running(self, tokens: int) -> list[MemoryItem]:
        """What the block whose backward runs has beyond that."""
        saved = tokens * self.saved
        return [
            MemoryItem("recomputed", saved * self.recomputed, "activations of one block"),
            MemoryItem("workspace", saved, "gradients inside one block: about what it saved (a guess)"),
        ]

    def norm(self, width: int, groups: int) -> int:
        """RMSNorm of a width (in `groups` rows): its statistics, and what its input costs beyond its output."""
        return 4 * groups + (width * self.element if self.compiled else 8 * width)

    def _norms(self) -> int:
        """Two norms and their outputs, which the matmuls keep as they read them: gathered."""
        return 2 * (self.norm(self.hidden, 1) // self.sequence_split + self.element * self.hidden)

    def _qk_norm(self) -> int:
        if self.cfg.attention.qk_norm == "none":
            return 0
        return sum(self.norm(heads * self.cfg.model.head_dim, heads) for heads in self.heads)

    def _attention(self) -> int:
        """sage saves q and k as INT8 with a scale per token, v and o in 16 bits; the others all four in 16 bits."""
        query, key = (heads * self.cfg.model.head_dim for heads in self.heads)
        other = 4 * self.heads[0]  # log-sum-exp
        if self.cfg.parallel.context_parallel_size > 1:
            other += self.element * query  # the output a second time, behind the all-to-all
        if self.cfg.attention.backend == "sage":
            return query + key + 4 * sum(self.heads) + self.element * (key + query) + other
        return self.element * (2 * query + 2 * key) + other

    def _mlp(self, width: int) -> int:
        """gate, up and their product; silu(gate) as well when nothing recomputes it."""
        return (3 if self.compiled else 4) * self.element * width


def _loss(cfg: RunConfig, tokens: int, vocab_size: int, block: _Block) -> list[MemoryItem]:
    """Final norm, then the head's chunk of logits and the gradients it computes ahead of backward."""
    columns, stream = vocab_size // cfg.parallel.tensor_parallel_size, tokens * block.element * block.hidden
    parts = parts_of(tokens, cfg.parallel.tensor_parallel_size, overlaps(cfg))
    part = tokens // parts
    chunks = -(-part * columns // _CHUNK_LOGITS)
    chunk = -(-part // chunks)
    # A chunk's logits and their gradient; eager, the latter is made of three fp32 tensors and a mask.
    per_logit = 2 * block.element if block.compiled else block.element + 13
    norm = (tokens * block.norm(block.hidden, 1) + stream) // block.sequence_split
    gathered = stream if block.sequence_split > 1 else 0
    return [
        MemoryItem("logits", chunk * columns * per_logit, f"of {chunk:,} tokens at a time, and their gradients"),
        MemoryItem(
            "loss",
            norm + gathered + stream + (4 + (parts - 1) * block.element) * columns * block.hidden,
            "final norm, gradient of its output and (fp32) of the output projection",
        ),
    ]
