"""A Llama-style decoder: tokens -> mean loss, or logits.

The residual stream is [tokens, hidden], with the sequences of the micro-batch one after the other. Every layer but
attention works on single tokens, and shards along the sequence are contiguous in this shape.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from sagekernels.matmul import measured
from sagetrain.config.arithmetic import attention_calls, parts_of, recomputed_blocks
from sagetrain.config.layer_specs import Reach, layers
from sagetrain.config.schema import AttentionConfig, ModelConfig, Recomputation
from sagetrain.model import walks
from sagetrain.model.activation_offload import ActivationOffload
from sagetrain.model.attention import Attention
from sagetrain.model.backends import AttentionFunction, TokenLayout, token_layout
from sagetrain.model.block import Block
from sagetrain.model.chunk_layouts import with_chunks
from sagetrain.model.chunks import ModelChunk, whole
from sagetrain.model.delta_net import DeltaNet
from sagetrain.model.head import Head
from sagetrain.model.initialization import initialize
from sagetrain.model.norm import NoNorm, RMSNorm, complete, normalize
from sagetrain.model.rotary import rotary_tables
from sagetrain.model.tensors import TensorSpec, tensors
from sagetrain.model.walks import Half
from sagetrain.parallel import copies
from sagetrain.parallel.collectives import Region
from sagetrain.parallel.cross_entropy import OwnLoss
from sagetrain.parallel.layers import VocabParallelEmbedding, keep_weights, linear_layers
from sagetrain.parallel.topology import ParallelGroups

Layouts = Mapping[Reach, Sequence[TokenLayout]]
"""The layouts of the parts of a micro-batch, for each kind of attention."""

Gradients = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""A function that runs a micro-batch forward and backward, and returns the gradients of its loss with respect to the
leaves that it is given. Nothing else gets a gradient."""


def gradients(loss: Callable[[], Tensor], leaves: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the gradients of a loss. With the first argument bound it is a `Gradients`."""
    return torch.autograd.grad(loss(), leaves)


@contextmanager
def changed(attributes: Mapping[tuple[Any, str], object]) -> Iterator[None]:
    """Let attributes, keyed by owner and name, have these values for a while."""
    before = {(owner, name): getattr(owner, name) for owner, name in attributes}
    try:
        for (owner, name), value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name), value in before.items():
            setattr(owner, name, value)


class Transformer(nn.Module):
    """The whole model: embedding, blocks, final norm and head. On a pipeline stage it is the stage's part of them.
    Raises ValueError if tensor_parallel_size does not divide a dimension, or together with context_parallel_size it
    does not divide the heads.

    A stage's parameters have the names and the initial values that they have in the whole model. Stages but the first
    have no `embedding`, and stages but the last have neither `final_norm` nor `head`. With tied embeddings, the last
    stage has a copy of the embedding, which its head reads.

    Args:
        attention: the section that says where q and k are normalized.
        functions: the attention function of each layer (selection.attention_functions).
        matmuls: the Matmul of linear layers, keyed by name for each block and for the end (selection.matmuls_of). A
            layer without an entry multiplies in dtype. None: all layers do.
        vocab_size: the rows of the embedding, padded so that the tensor-parallel size divides it.
        known: the number of rows that are tokens; the other rows have no part in the loss. None: all rows are tokens.
        groups: this rank's place in the layout.
        sequence_parallel: shard residual stream and norms along the sequence.
        overlap: under tensor parallelism, take the tokens in two halves.
        activation_checkpointing: "full" recomputes every block in the backward pass, and a number that many blocks.
            "selective" recomputes all of every block but matmuls and attention, "attention" all but attention.
        seed: the seed of the initial weights (initialization.py). None: parameters stay on the meta device, for the
            caller to replace.
        partition: called with every parameter as soon as it has its values, before the next one takes memory. Engines
            keep a part of it (engines/build_engine.partitioner).
        loss: a user's loss in the place of the cross-entropy, or None.
        chunks: the ranges of blocks that this stage of a pipeline has, in the order of the model. None: the whole model
            is here. `functions` and `matmuls` are those of all layers in either case.
    """

    def __init__(
        self,
        model: ModelConfig,
        attention: AttentionConfig,
        *,
        vocab_size: int,
        known: int | None = None,
        groups: ParallelGroups,
        functions: Sequence[AttentionFunction],
        matmuls: Sequence[Mapping[str, Any]] | None = None,
        sequence_parallel: bool = False,
        overlap: bool = True,
        activation_checkpointing: Recomputation = "none",
        seed: int | None = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        partition: Callable[[TensorSpec, nn.Parameter], None] | None = None,
        loss: OwnLoss | None = None,
        chunks: Sequence[ModelChunk] | None = None,
    ) -> None:
        super().__init__()
        self.config = model
        self.chunks = tuple(chunks or [whole(model.num_layers)])
        first, last = self.chunks[0].first, self.chunks[-1].last
        self.groups, self.known = groups, known
        # Memory comes with the values.
        self.region = Region(groups, sequence_parallel, dtype, torch.device("meta"))
        self.overlap = overlap
        self.activation_checkpointing: Recomputation = activation_checkpointing
        self.own_loss: bool = loss is not None
        """Whether the loss is a user's function. All stages of a pipeline say the same."""
        device = torch.device("cpu" if device is None else device)
        gemma = model.conventions == "gemma"
        *of_blocks, of_end = [{}] * (model.num_layers + 1) if matmuls is None else matmuls
        if sequence_parallel and groups.tp_size > 1 and device.type == "cuda":
            assert groups.tp_group is not None
            # The connection comes before anything is compiled, because it decides which operators are called.
            if refusal := copies.connect(groups.tp_group):
                how = "tensor-parallel collectives go through NCCL, which slows the matmuls beside them"
                warnings.warn(f"{how}: {refusal}", stacklevel=2)
        embedding = VocabParallelEmbedding(vocab_size, model.hidden_size, self.region, scaled=gemma)
        if first or (last and model.tie_embeddings):
            self.embedding = embedding
        self.share = torch.ones((), device=device)
        """The factor with which a micro-batch's loss enters the loss of a step, of which engines make a mean over
        replicas. What balances experts, and is no part of the loss that is returned, has the same factor. Engines write
        it between steps."""
        self.blocks = nn.ModuleList()
        """The blocks that are here, by their numbers in the whole model."""
        self.layers = layers(model, attention.qk_norm)
        """The layers of the whole model."""
        for number, (layer, function, own) in enumerate(zip(self.layers, functions, of_blocks, strict=True)):
            if any(number in chunk.blocks for chunk in self.chunks):
                block = Block(
                    layer,
                    function,
                    self.region,
                    matmuls=own,
                    dear=walks.dear_of(activation_checkpointing),
                    share=self.share,
                    vocab_size=vocab_size,
                )
                self.blocks.add_module(str(number), block)
        if last:
            self.final_norm = RMSNorm(
                model.hidden_size, model.norm_eps, self.region, split_input=sequence_parallel, of_one=gemma
            )
            weight = embedding.weight
            if not model.tie_embeddings:
                weight = nn.Parameter(torch.empty_like(weight))
            low = of_end.get("head")
            self.head = Head(weight, self.region, known=known, matmul=low, loss=loss)
        self.every_spec: dict[str, TensorSpec] = {spec.name: spec for spec in tensors(model, attention, vocab_size)}
        """The entry of every tensor of the whole model in the list of tensors, by name."""
        self.specs: dict[str, TensorSpec] = {name: self.every_spec[name] for name, _ in self.named_parameters()}
        """The entry of every parameter that is here, in the order of the parameters."""
        missing = self.every_spec.keys() - self.specs if first and last else ()
        assert not missing, f"tensors without a parameter: {missing}"
        self.watch_blocks: Callable[[int, Tensor], None] | None = None
        """A function that is called with each block's number and its output [tokens, hidden] on this rank. In
        overlapped halves it gets the first half's output, whose sum is complete by then."""
        self.offload: ActivationOffload | None = None
        """If set, what blocks that go one by one keep for the backward pass is in the host's memory meanwhile."""
        self.without_hooks: Callable[..., Any] | None = None
        """If set, this function is called with each block and its inputs in the place of the block, whose hooks do not
        run then."""
        self.compiled = False
        """If set, compile.compile_blocks has compiled the blocks with inductor."""
        self.normalize = normalize
        """The function that runs the norms outside of blocks. compile.compile_blocks compiles it."""
        if seed is not None:
            pairs = ((self.specs[name], parameter) for name, parameter in self.named_parameters())
            initialize(pairs, model, groups, seed, device, partition)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        divisor: Tensor | float | None = None,
        by_token: bool = False,
        last: bool = False,
        chunk: ModelChunk | None = None,
        streams: Sequence[Tensor] = (),
    ) -> Tensor | tuple[Tensor, ...]:
        """Return the mean loss over this rank's tokens, or the cross-entropy of each token, or their logits.

        Under context parallelism, this rank's tokens are a slice [B, S / cp] of every sequence
        (data.batch.Batch.inputs cuts it). The loss of the sequences is then the mean over the context-parallel ranks.

        Args:
            tokens: int64 [B, S (/ cp)].
            labels: int64 [B, S (/ cp)], the token that follows each token. None: return logits.
            positions: int64 [B, S (/ cp)] for the rotary embedding (default: 0..S-1 in each sequence).
            cu_seqlens: int32 [documents + 1] over the flattened [B * S] tokens: attention stays within a document.
                Documents do not span sequences, and documents of length zero may pad the end. None: attention stays
                within each sequence.
            max_seqlen: the most tokens that a document has, if known.
            divisor: divides the sum of the loss over the tokens whose labels are not negative. None: every token
                counts, and the loss is their mean. A loss by sequence does not use it.
            by_token: with labels, return the cross-entropy of each token without a gradient. It is 0 where the label is
                negative.
            last: without labels, return the logits of the last token of each sequence alone. The logits of the other
                tokens then take neither time nor memory. It needs whole sequences and a model without overlap.
            chunk: one of `chunks`, through which the tokens go. None: the whole model.
            streams: the residual streams that come to a chunk that is not the first one.

        Returns:
            The residual streams behind `chunk`, a tuple of tensors, if it is not the last one. Otherwise an
            fp32 scalar, fp32 [B, S (/ cp)] by token, or logits [B, S (/ cp), vocab] in the model's dtype ([B, 1, vocab]
            for the last tokens). They are the same on all tensor-parallel ranks.
        """
        chunk = chunk or self.chunks[0]
        parts = parts_of(tokens.numel(), self.groups.tp_size, self.overlap)
        layouts = self._layouts(tokens, positions, cu_seqlens, max_seqlen)
        if chunk.first:
            halves = [self._embed(part) for part in tokens.flatten().chunk(parts)]
        else:
            halves = [Half(stream, None) for stream in streams]
        walked = self.through(chunk.blocks, layouts, halves)
        if not chunk.last:
            return tuple(stream for stream, _ in walked)
        if labels is None:
            every = tokens.shape[1] if last else 1
            logits = torch.cat([self.head([y], None, every=every) for _, y in walked])
            return logits.view(len(tokens), -1, logits.shape[-1])
        pairs = zip(walked, labels.flatten().chunk(parts), strict=True)
        if by_token:
            return torch.cat([self.head([y], part, by_token=True) for (_, y), part in pairs]).view(tokens.shape)
        if self.head.by_sequence:  # Every sequence counts, so the divisor of the tokens has no part in the mean.
            return cast(Tensor, self.head([y for _, y in walked], labels))
        # The mean of the parts is then the whole sum over the divisor.
        own = None if divisor is None else divisor / parts
        return torch.stack([self.head([y], part, own) for (_, y), part in pairs]).mean()

    def stream_shapes(self, tokens: int) -> list[tuple[int, int]]:
        """Return the shapes of the residual streams of a micro-batch of this many tokens on this rank."""
        parts = parts_of(tokens, self.groups.tp_size, self.overlap)
        rows = tokens // parts // (self.groups.tp_size if self.region.sharded else 1)
        return [(rows, self.config.hidden_size)] * parts

    def through(self, blocks: range, layouts: Layouts, halves: Sequence[Half]) -> Sequence[Half]:
        """Take the halves of a micro-batch, or the whole as one, through a range of blocks and the norm behind them.
        That norm belongs to the next block, or is the final one. Behind the blocks of a chunk that is not the last one
        there is no norm.

        Args:
            blocks: the numbers of the blocks.
            layouts: the layout of each half, or of all tokens, for each kind of attention.
            halves: residual streams, not normalized yet, each with the tensor that is to be added to it, or None.

        Returns:
            Normalized halves. Their streams, with nothing to be added, are the input of a range behind this one.
        """
        norms = {number: self._norm_of(number) for number in range(blocks.start, blocks.stop + 1)}
        last_norm = norms[blocks.stop]
        alone = range(blocks.start, max(blocks.start, min(self._alone(), blocks.stop)))
        if alone:
            halves = [Half(x, None) for x in self._recomputed(alone, layouts, halves)]
            blocks = range(alone.stop, blocks.stop)
        if not blocks:
            return [self._normalized(half, last_norm) for half in halves]
        first, *others = halves
        halves = [self._normalized(first, norms[blocks.start]), *others]  # the second half is one step behind
        for number in blocks:
            # Blocks of one kind share a graph, whatever kind of block is before them.
            halves = [Half(x, measured(y, self._block(number).measures)) for x, y in halves]
            halves = self._call_of(number)(layouts[self.layers[number].attention.reach], norms[number + 1], *halves)
            self._seen(number, halves[0].stream)
        first, *others = [Half(x, measured(y, False)) for x, y in halves]
        return [first, *(self._normalized(half, last_norm) for half in others)]

    def _block(self, number: int) -> Block:
        return cast(Block, self.blocks.get_submodule(str(number)))

    def _call_of(self, number: int) -> Callable[..., Any]:
        """Return the function that takes streams through a block."""
        block, call = self._block(number), self.without_hooks
        return block if call is None else partial(call, block)

    def _norm_of(self, number: int) -> RMSNorm | NoNorm | Literal["stream"]:
        """Return the norm of the block with this number, or the final one. "stream": another stage has it."""
        if any(number in chunk.blocks for chunk in self.chunks):
            return self._block(number).attention_norm
        last = self.chunks[-1]
        return self.final_norm if last.last and number == last.blocks.stop else "stream"

    def _normalized(self, half: Half, norm: RMSNorm | NoNorm | Literal["stream"]) -> Half:
        if norm == "stream":
            x, y = half
            return half if y is None else Half(x + complete(y, self.region), None)
        return Half(*self.normalize(*half, norm, None, self.region))

    @property
    def recomputed_blocks(self) -> int:
        """The number of blocks, from the first on, that the backward pass recomputes as wholes."""
        return recomputed_blocks(self.activation_checkpointing, self.config.num_layers)

    def _alone(self) -> int:
        """Return the number of blocks, from the first on, that tokens go through one by one."""
        if self.activation_checkpointing in walks.DEAR and torch.is_grad_enabled():
            return self.config.num_layers
        return self.recomputed_blocks if torch.is_grad_enabled() else 0

    def _recomputed(self, blocks: range, layouts: Layouts, halves: Sequence[Half]) -> tuple[Tensor, ...]:
        """Take residual streams through every block by itself, with activation checkpointing."""
        return walks.recomputed(
            [(number, self._call_of(number), layouts[self.layers[number].attention.reach]) for number in blocks],
            tuple(x if y is None else x + complete(y, self.region) for x, y in halves),
            again=self.recomputed_blocks if torch.is_grad_enabled() else 0,
            # With two halves, a recomputed block starts a collective of the other half again and has to finish it, so
            # it is recomputed to the end, as a compiled block is anyway.
            stop_early=len(halves) == 1,
            seen=self._seen,
            offload=self.offload and self.offload.begun(self.blocks, layouts.values()),
        )

    def _seen(self, block: int, stream: Tensor) -> None:
        """Let a watcher see a stream, outside of compiled graphs: all blocks share one, watched or not."""
        if self.watch_blocks:
            self.watch_blocks(block, stream.detach())

    def _embed(self, tokens: Tensor) -> Half:
        y = self.embedding(tokens)
        like = y if self.groups.tp_size == 1 else y[1]
        # The zeros want a gradient, like every other residual stream, so that one graph serves all blocks.
        return Half(torch.zeros_like(like).requires_grad_(torch.is_grad_enabled()), y)

    @property
    def numbers(self) -> list[int]:
        """The numbers of the blocks that are here."""
        return [int(name) for name, _ in self.blocks.named_children()]

    @property
    def every_attention(self) -> list[Attention | DeltaNet | None]:
        """The attention layers of the whole model. None: another pipeline stage has the layer."""
        own = dict(zip(self.numbers, self.attention_layers, strict=True))
        return [own.get(number) for number in range(self.config.num_layers)]

    @property
    def attention_layers(self) -> list[Attention | DeltaNet]:
        return [cast(Block, block).attention for block in self.blocks]

    @property
    def functions(self) -> list[AttentionFunction]:
        """The functions of the attention layers. They may be set, for a while or for good."""
        return [layer.function for layer in self.attention_layers]

    @functions.setter
    def functions(self, functions: Iterable[AttentionFunction]) -> None:
        for layer, function in zip(self.attention_layers, functions, strict=True):
            layer.function = function

    def keep_weights(self) -> None:
        """Make the tensors that linear layers keep of their weights (layers.keep_weights). Call it at first, and
        whenever the weights have changed."""
        keep_weights(self)

    @property
    def matmuls(self) -> list[dict[str, Any]]:
        """The Matmul of the linear layers of each block that is here, and of the end, as given to the constructor. They
        may be set, for a while or for good. Layers then keep nothing of the weights until keep_weights is called."""
        of_end = self.head.matmuls if self.chunks[-1].last else {}
        return [*(cast(Block, block).matmuls for block in self.blocks), of_end]

    @matmuls.setter
    def matmuls(self, matmuls: Iterable[Mapping[str, Any]]) -> None:
        *of_blocks, of_end = matmuls
        for block, own in zip(self.blocks, of_blocks, strict=True):
            cast(Block, block).matmuls = own
        if self.chunks[-1].last:
            self.head.matmuls = of_end

    @property
    def quantized(self) -> bool:
        """Whether any layer quantizes anything: attention, or a linear layer."""
        return any(function.quantized for function in self.functions) or any(self.matmuls)

    @contextmanager
    def exact(self, attention: AttentionFunction) -> Iterator[None]:
        """Compute without quantization for a while. Attention layers that quantize get this function, and linear layers
        multiply in the dtype of their operands."""
        changes: dict[tuple[Any, str], object] = {(layer, "matmul"): layer.in_dtype for layer in linear_layers(self)}
        changes |= {(layer, "function"): attention for layer in self.attention_layers if layer.function.quantized}
        for block in cast(Iterable[Block], self.blocks):
            changes |= {(norm, "reader"): None for norm in (block.attention_norm, block.mlp_norm)}
        with changed(changes):
            yield

    def use_16_bits(self) -> None:
        """Let all linear layers multiply in the dtype of their operands from now on."""
        self.matmuls = [{}] * len(self.matmuls)

    def _layouts(
        self, tokens: Tensor, positions: Tensor | None, cu_seqlens: Tensor | None, max_seqlen: int | None
    ) -> Layouts:
        """Return the layout of the tokens of each call of attention, for each kind of attention that is here."""
        num_sequences, length = tokens.shape
        if positions is None:
            every = torch.arange(length * self.groups.cp_size, device=tokens.device)
            positions = self.groups.own_tokens(every.unsqueeze(0)).expand(num_sequences, -1)
        parts = attention_calls(num_sequences, tokens.numel(), self.groups.tp_size, self.overlap)
        num_sequences //= parts
        num_tokens = num_sequences * length * self.groups.cp_size
        layouts: dict[Reach, list[TokenLayout]] = {self.layers[number].attention.reach: [] for number in self.numbers}
        for part, own_positions in enumerate(positions.chunk(parts)):
            own = cu_seqlens
            if cu_seqlens is not None:  # documents of other parts have length zero
                own = (cu_seqlens - part * num_tokens).clamp(0, num_tokens)
                if self.compiled:
                    # Without the mark, every number of documents would get a graph of its own.
                    torch._dynamo.maybe_mark_dynamic(own, 0)
            for (window, rope), found in layouts.items():
                wanted = {function.wants(window is not None) for function in self.functions}
                wanted |= {"bounds"} if self.groups.gather_size > 1 else set()  # Those of a chunk are made of them.
                tables = rotary_tables(own_positions.flatten(), self.config.head_dim, *rope)
                layout = token_layout(wanted, num_sequences, num_tokens, *tables, own, max_seqlen, window)
                if self.config.value_embeddings:
                    layout = layout._replace(tokens=tokens.chunk(parts)[part].flatten())
                share = self.groups.gather_rank, self.groups.gather_size
                found.append(with_chunks(layout, wanted, num_tokens // num_sequences, *share))
        return layouts
