"""Llama-style decoder: tokens -> mean loss, or logits.

The residual stream is [tokens, hidden]: the sequences of the micro-batch one after the other, because every layer but
attention works on single tokens, and because shards along the sequence are then contiguous.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from sagetrain.config.schema import AttentionConfig, ModelConfig
from sagetrain.model import schedule
from sagetrain.model.accounting import attention_calls, parts_of
from sagetrain.model.attention import Attention
from sagetrain.model.backends import AttentionFunction, TokenLayout, attention_function, token_layout
from sagetrain.model.mlp import MLP
from sagetrain.model.norm import RMSNorm, enter_gains, normalize
from sagetrain.model.rotary import rotary_tables
from sagetrain.model.schedule import Half, Part, Stage, Stretch, idle
from sagetrain.model.selection import resolve_backend
from sagetrain.model.tensors import TensorSpec, tensors
from sagetrain.parallel import copies
from sagetrain.parallel.collectives import Pending, finish_enter, finish_leave, gather_from_region
from sagetrain.parallel.cross_entropy import linear_cross_entropy, linear_token_losses
from sagetrain.parallel.host import cores_of_rank
from sagetrain.parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    keep_weights,
    materialize,
    shard,
)
from sagetrain.parallel.matmul import Matmul, linear
from sagetrain.parallel.rng import named_generator
from sagetrain.parallel.topology import ParallelGroups

# The two halves of a micro-batch keep out of each other's way only in the order in which the model calls them.
ORDERED = {
    "reorder_for_peak_memory": False,
    "score_fusion_memory_threshold": 2**16,  # bytes: a gain that both halves read is no reason to fuse their norms
    # What a collective reads may not be written before it is finished, in the next graph maybe.
    "allow_buffer_reuse": False,
    "inplace_buffers": False,
}
"""torch.compile's options under tensor parallelism."""

UNCHECKED = {"size_asserts": False, "alignment_asserts": False}
"""torch.compile's options where weights stay: no look at sizes and strides of all inputs and buffers at every call.
Guards have looked at the inputs. (A weight that ZeRO-3 has taken away by the backward pass would pass them.)"""


_GRAPHS = 256
"""Of one function, at most: torch's own limit for all that it makes of one."""


@contextmanager
def changed(attributes: Mapping[tuple[Any, str], object]) -> Iterator[None]:
    """Attributes, (whose, name), as these values for a while."""

    def put(values: Mapping[tuple[Any, str], object]) -> None:
        for (owner, name), value in values.items():
            setattr(owner, name, value)

    before = {(owner, name): getattr(owner, name) for owner, name in attributes}
    try:
        put(attributes)
        yield
    finally:
        put(before)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), as stages for schedule.py to walk.

    A stage takes the residual stream x and y, which the stage before made, and returns them for the next one.

        normalize   x + y, normalized       finishes the sum of y over the ranks, starts to gather
        project     q, k, v
        attend      softmax(q k^T) v
        out         added to x next         starts the sum
        normalize   x + y, normalized
        gate_up     silu(gate) * up
        down        added to x next         starts the sum
    """

    def __init__(
        self,
        model: ModelConfig,
        qk_norm: str,
        function: AttentionFunction,
        groups: ParallelGroups,
        *,
        matmuls: Mapping[str, Matmul],
        sequence_parallel: bool,
        selective: bool = False,
        dtype: torch.dtype,
        device: torch.device | None,
    ) -> None:
        super().__init__()
        self.groups = groups
        self.sequence_parallel = sequence_parallel
        self.selective = selective
        """Whether, alone, it keeps the dear for its backward pass and recomputes the cheap."""
        norm = {"split_input": sequence_parallel, "dtype": dtype, "device": device}
        layer = {"matmuls": matmuls, "sequence_parallel": sequence_parallel, "dtype": dtype, "device": device}
        self.attention_norm = RMSNorm(model.hidden_size, model.norm_eps, groups, **norm)
        self.attention = Attention(model, qk_norm, function, groups, **layer)
        self.mlp_norm = RMSNorm(model.hidden_size, model.norm_eps, groups, **norm)
        self.mlp = MLP(model, groups, **layer)
        self._read_by(matmuls)

    def _read_by(self, matmuls: Mapping[str, Matmul]) -> None:
        if self.sequence_parallel and self.groups.tp_size > 1:
            # Of layers in fewer bits alone: another reader is another graph, for the last block's next norm as well.
            self.attention_norm.reader, self.mlp_norm.reader = matmuls.get("qkv"), matmuls.get("gate_up")

    @property
    def linear_layers(self) -> dict[str, ColumnParallelLinear | RowParallelLinear]:
        """By name."""
        attention, mlp = self.attention, self.mlp
        return {"qkv": attention.qkv, "out": attention.out, "gate_up": mlp.gate_up, "down": mlp.down}

    @property
    def matmuls(self) -> dict[str, Matmul]:
        """How its linear layers multiply that do not in the dtype of their operands, by name. It may be set."""
        return {name: layer.matmul for name, layer in self.linear_layers.items() if type(layer.matmul) is not Matmul}

    @matmuls.setter
    def matmuls(self, matmuls: Mapping[str, Matmul]) -> None:
        for name, layer in self.linear_layers.items():
            layer.matmul, layer.kept = matmuls.get(name) or layer.in_dtype, ()
        self._read_by(matmuls)

    def stages(self) -> Stretch:
        """All of them, in their order."""
        before = self.normalize(self.attention_norm), self.project
        after = self.out, self.normalize(self.mlp_norm), self.gate_up, self.down
        return before, self.attend, after

    def normalize(self, norm: RMSNorm) -> Stage:
        """The stage that adds y to x and normalizes that, with a norm of this block or of the next one."""

        def stage(x: Tensor, y: Tensor | Pending | None, part: Part) -> Half:
            *_, gains = part
            return normalize(x, y, norm, gains.get(norm), self.groups, self.sequence_parallel)

        return stage

    def project(self, x: Tensor, y: Tensor | Pending, part: Part) -> Half:
        _, cos, sin, gains = part
        return x, self.attention.project(y, cos, sin, gains)

    def attend(self, x: Tensor, qkv: Sequence[Tensor], part: Part) -> Half:
        layout, *_ = part
        return x, self.attention(*qkv, layout)

    def out(self, x: Tensor, o: Tensor, part: Part) -> Half:
        return x, self.attention.out(o)

    def gate_up(self, x: Tensor, y: Tensor | Pending, part: Part) -> Half:
        return x, self.mlp(y)

    def down(self, x: Tensor, y: Tensor, part: Part) -> Half:
        return x, self.mlp.down(y)

    def forward(
        self, layouts: Sequence[TokenLayout], next_norm: RMSNorm | None, *halves: Half | Tensor
    ) -> Sequence[Half] | tuple[Tensor, ...]:
        """Two halves, or the whole as one, through the stretch of stages that ends with next_norm, with the layout of
        each half, or of all. Without next_norm through this block alone, and only residual streams come in and go out,
        all summed up: what activation checkpointing keeps should be little, and not be on its way, and ZeRO-3's hooks
        see when backward comes and goes by arguments and results that are tensors.
        """
        if self.selective and next_norm is None and torch.is_grad_enabled():
            return schedule.selective(self._walk, layouts, None, *halves)
        return self._walk(layouts, next_norm, *halves)

    def _walk(
        self, layouts: Sequence[TokenLayout], next_norm: RMSNorm | None, *halves: Half | Tensor
    ) -> Sequence[Half] | tuple[Tensor, ...]:
        norms = self.attention_norm, self.attention.q_norm, self.attention.k_norm, self.mlp_norm, next_norm
        parts = schedule.split(layouts, enter_gains(*norms, parts=len(halves)))
        before, attend, after = self.stages()
        if next_norm is None:
            stretch = (idle, *before), attend, (*after, idle)
            halves = [(x, None) for x in halves]
        else:
            stretch = before, attend, (*after, self.normalize(next_norm))
        if len(halves) == 1:
            halves = (schedule.whole(stretch, *halves, *parts),)
        else:
            halves = schedule.staggered(stretch, halves, parts, attend_together=len(layouts) == 1)
        if next_norm is not None:
            return halves
        return tuple(x + finish_leave(y, self.groups, self.sequence_parallel) for x, y in halves)


class Head(nn.Module):
    """Output projection and loss, the vocabulary spread over the tensor-parallel group.

    Tied embeddings: the one Parameter is registered here and in the embedding, so that each module owns the weight
    that its forward reads. ZeRO-3 gathers exactly what the running module owns.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        groups: ParallelGroups,
        *,
        sequence_parallel: bool,
        known: int | None = None,
        matmul: Matmul | None = None,
    ) -> None:
        super().__init__()
        self.matmul = matmul or Matmul()
        self.weight = weight
        self.known = known
        self.groups = groups
        self.sequence_parallel = sequence_parallel
        self.compiled = False

    def forward(
        self,
        x_TD: Tensor,
        labels_T: Tensor | None,
        divisor: float | None = None,
        by_token: bool = False,
        every: int = 1,
    ) -> Tensor:
        """[tokens, hidden], of start_enter -> loss, as of linear_cross_entropy, or fp32 [tokens] by token; without
        labels -> logits [tokens / every, vocab], of the last of so many tokens each."""
        x_TD = finish_enter(x_TD, self.groups, self.sequence_parallel)
        if labels_T is None:
            x_TD = x_TD[every - 1 :: every]
            return gather_from_region(linear(x_TD, [self.weight], self.matmul)[0], self.groups)
        how = {"matmul": self.matmul, "compiled": self.compiled, "known": self.known}
        if by_token:
            return linear_token_losses(x_TD, self.weight, labels_T, self.groups, **how)
        return linear_cross_entropy(x_TD, self.weight, labels_T, self.groups, divisor=divisor, **how)


class Transformer(nn.Module):
    """The model.

    Args:
        model: its shape.
        attention: backend and QK-norm.
        functions: of attention, one for each layer; default: what the backend names, in all of them.
        matmuls: how linear layers multiply, by name for each block (selection.matmuls_of); others, or None: in dtype.
        vocab_size: rows of the embedding, padded so that the tensor-parallel size divides it.
        known: of these rows, those that are tokens; others have no part in the loss. None: all are.
        groups: this rank's place in the layout.
        sequence_parallel: shard residual stream and norms along the sequence.
        overlap: under tensor parallelism, take the tokens in two halves.
        activation_checkpointing: "full" recomputes every block in the backward pass, "selective" all of it but matmuls
            and attention.
        seed: of the initialization, which depends on nothing else: no layout, no device. None: parameters are left on
            the meta device, for others to be put in their places.
        dtype: of parameters and residual stream.
        partition: given every parameter as soon as it has its values, before the next one takes memory: ZeRO 3 keeps a
            part of it (engines/deepspeed.py).

    Raises:
        ValueError: a dimension that tensor_parallel_size does not divide, heads that it does not divide together with
            context_parallel_size, an odd head_dim, or an attention backend that cannot run here.
    """

    def __init__(
        self,
        model: ModelConfig,
        attention: AttentionConfig,
        *,
        vocab_size: int,
        known: int | None = None,
        groups: ParallelGroups,
        functions: Sequence[AttentionFunction] | None = None,
        matmuls: Sequence[Mapping[str, Matmul]] | None = None,
        sequence_parallel: bool = False,
        overlap: bool = True,
        activation_checkpointing: Literal["none", "selective", "full"] = "none",
        seed: int | None = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        partition: Callable[[nn.Parameter], None] | None = None,
    ) -> None:
        super().__init__()
        self.config = model
        self.groups = groups
        self.sequence_parallel = sequence_parallel
        self.overlap = overlap
        self.activation_checkpointing = activation_checkpointing
        device = torch.device("cpu" if device is None else device)
        place = {"dtype": dtype, "device": torch.device("meta")}  # memory comes with the values
        if functions is None:
            backend, _ = resolve_backend(attention, model, device=device, dtype=dtype)
            functions = [attention_function(backend, attention, device)] * model.num_layers
        matmuls = [{}] * model.num_layers if matmuls is None else matmuls
        if sequence_parallel and groups.tp_size > 1 and device.type == "cuda":
            copies.connect(groups.tp_group)  # before anything is compiled: that decides which operators are called
        self.embedding = VocabParallelEmbedding(
            vocab_size, model.hidden_size, groups, sequence_parallel=sequence_parallel, **place
        )
        self.blocks = nn.ModuleList(
            Block(
                model,
                attention.qk_norm,
                function,
                groups,
                matmuls=own,
                sequence_parallel=sequence_parallel,
                selective=activation_checkpointing == "selective",
                **place,
            )
            for _, function, own in zip(range(model.num_layers), functions, matmuls, strict=True)
        )
        self.final_norm = RMSNorm(model.hidden_size, model.norm_eps, groups, split_input=sequence_parallel, **place)
        head_weight = self.embedding.weight
        if not model.tie_embeddings:
            head_weight = nn.Parameter(torch.empty_like(head_weight))
        self.head = Head(head_weight, groups, sequence_parallel=sequence_parallel, known=known)
        listed = {spec.name: spec for spec in tensors(model, attention, vocab_size)}
        self.specs: dict[str, TensorSpec] = {name: listed.pop(name) for name, _ in self.named_parameters()}
        """The entry of every parameter in the list of tensors, in the order of the parameters."""
        assert not listed, f"tensors without a parameter: {[*listed]}"
        self.whole_blocks = partition is not None and activation_checkpointing == "selective"
        """Whether a block computes with its own parameters alone: under ZeRO-3 a compiled one has to, and one
        that is in part computed again: gathers inside would be in that part, and differ from pass to pass."""
        self.watch_blocks: Callable[[int, Tensor], None] | None = None
        """Given each block's number and its output [tokens, hidden] as this rank has it, in overlapped halves the first
        half's, whose sum is complete by then."""
        self._normalize = normalize
        if seed is not None:
            self._initialize(seed, device, partition)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        divisor: float | None = None,
        by_token: bool = False,
        last: bool = False,
    ) -> Tensor:
        """Mean loss over this rank's tokens, or the loss of each, or their logits.

        Under context parallelism these are a slice [B, S / cp] of every sequence (data.loader.Batch.inputs cuts it);
        the loss of the sequences is then the mean over the context-parallel ranks.

        Args:
            tokens: int64 [B, S (/ cp)].
            labels: int64 [B, S (/ cp)], the token that follows each token. None: return logits.
            positions: int64 [B, S (/ cp)] for the rotary embedding (default: 0..S-1 in each sequence).
            cu_seqlens: int32 [documents + 1] over the flattened [B * S] tokens: attention stays within a document.
                Documents do not span sequences; zero-length ones may pad the end. None: within each sequence.
            max_seqlen: no document has more tokens, if known.
            divisor: the loss is the sum over the tokens whose labels are not negative, divided by this. None: every
                token counts, and the loss is their mean.
            by_token: with labels, the loss of each token and no gradient; 0 where the label is negative.
            last: without labels, the logits of the last token of each sequence alone, for which the others' take
                neither time nor memory. Of whole sequences, in a model without overlap.

        Returns:
            fp32 scalar, fp32 [B, S (/ cp)] by token, or logits [B, S (/ cp), vocab] in the model's dtype, [B, 1, vocab]
            of the last tokens; the same on all tensor-parallel ranks.
        """
        flat = tokens.flatten()
        parts = parts_of(len(flat), self.groups.tp_size, self.overlap)
        layouts = self._layouts(tokens, positions, cu_seqlens, max_seqlen)
        halves = [self._embed(part) for part in flat.chunk(parts)]
        region = self.groups, self.sequence_parallel
        recompute = self.activation_checkpointing != "none" and torch.is_grad_enabled()
        if recompute or self.whole_blocks:
            streams = tuple(x + finish_leave(y, *region) for x, y in halves)
            # A collective of the other half that is started once more has to be finished once more: recomputed to the
            # end, as a compiled block is anyway. (Its ZeRO-3 hook, at the very end, would give the weights back too
            # early, and so would that of `down`, which only another half behind it would gather again.)
            stop_early = parts == 1 or self.whole_blocks
            again = recompute and self.activation_checkpointing == "full"
            how = {"again": again, "stop_early": stop_early, "seen": self._seen}
            streams = schedule.recomputed(self.blocks, layouts, streams, **how)
            halves = [self._normalize(x, None, self.final_norm, None, *region) for x in streams]
        else:
            norms = [*(block.attention_norm for block in self.blocks), self.final_norm]
            halves[0] = self._normalize(*halves[0], norms[0], None, *region)
            for number, (block, next_norm) in enumerate(zip(self.blocks, norms[1:], strict=True)):
                halves = block(layouts, next_norm, *halves)
                self._seen(number, halves[0][0])
            first, *others = halves
            halves = [first, *(self._normalize(*half, norms[-1], None, *region) for half in others)]
        if labels is None:
            every = tokens.shape[1] if last else 1
            return torch.cat([self.head(y, None, every=every) for _, y in halves]).unflatten(0, (len(tokens), -1))
        pairs = zip(halves, labels.flatten().chunk(parts), strict=True)
        if by_token:
            return torch.cat([self.head(y, part, by_token=True) for (_, y), part in pairs]).unflatten(0, tokens.shape)
        own = None if divisor is None else divisor / parts  # the mean of the parts is then the whole sum over it
        return torch.stack([self.head(y, part, own) for (_, y), part in pairs]).mean()

    def _seen(self, block: int, stream: Tensor) -> None:
        """Outside of what is compiled: one graph for all blocks, and no other where they are watched."""
        if self.watch_blocks:
            self.watch_blocks(block, stream.detach())

    def _embed(self, tokens: Tensor) -> Half:
        y = self.embedding(tokens)
        like = y if self.groups.tp_size == 1 else y[1]
        # Zeros that want a gradient, like every other residual stream: one graph serves all blocks.
        return torch.zeros_like(like).requires_grad_(torch.is_grad_enabled()), y

    @property
    def attention_layers(self) -> list[Attention]:
        return [cast(Block, block).attention for block in self.blocks]

    @property
    def functions(self) -> list[AttentionFunction]:
        """Those of the attention layers. They may be set, to others for a while, say."""
        return [layer.function for layer in self.attention_layers]

    @functions.setter
    def functions(self, functions: Iterable[AttentionFunction]) -> None:
        for layer, function in zip(self.attention_layers, functions, strict=True):
            layer.function = function

    def compile_blocks(
        self, backend: str = "inductor", *, whole: bool = False, later: Iterable[AttentionFunction] = ()
    ) -> None:
        """torch.compile every block (one graph for all that have the same attention function and the same matmul), the
        norms outside of them and the loss kernels.

        whole: leave the hooks of modules outside of the graphs. ZeRO-3 gathers weights in them, then (Engine) those of
        a block together, so blocks run alone (`whole_blocks`) and the final norm is not compiled.
        later: functions that layers may get while training.
        """
        options: dict[str, bool | int] | None = None
        if backend == "inductor":
            options = {**({} if whole else UNCHECKED), **(ORDERED if self.groups.tp_size > 1 else {})}
        # By default torch makes 8, then ends the run. Rungs of a ladder, linear layers in 8 and 16 bits, what the next
        # block's norm gathers, documents and their largest lengths, with gradients and without: all multiply.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _GRAPHS)
        traceable = all(function.traceable for function in (*later, *self.functions))
        how = {"fullgraph": traceable, "backend": backend, "options": options}
        self.whole_blocks = whole
        for block in self.blocks:
            if whole:
                block.forward = torch.compile(block.forward, **how)
            else:
                block.compile(**how)
        if not whole:
            self._normalize = torch.compile(normalize, fullgraph=True, backend=backend, options=options)
        self.head.compiled = backend == "inductor"

    def keep_weights(self) -> None:
        """Make what linear layers keep of their weights (layers.keep_weights): at first, and whenever these changed."""
        keep_weights(self)

    @property
    def matmuls(self) -> list[dict[str, Matmul]]:
        """As given to the constructor. They may be set, to others for a while, say, and keep nothing of the weights
        until keep_weights is called."""
        return [cast(Block, block).matmuls for block in self.blocks]

    @matmuls.setter
    def matmuls(self, matmuls: Iterable[Mapping[str, Matmul]]) -> None:
        for block, own in zip(self.blocks, matmuls, strict=True):
            cast(Block, block).matmuls = own

    @property
    def quantized(self) -> bool:
        """Whether any layer quantizes anything: attention, or a linear layer."""
        return any(function.quantized for function in self.functions) or any(self.matmuls)

    @contextmanager
    def exact(self, attention: AttentionFunction) -> Iterator[None]:
        """Without quantization for a while: attention layers that quantize have this function, and linear layers
        multiply in the dtype of their operands."""
        changes: dict[tuple[Any, str], object] = {
            (layer, "function"): attention for layer in self.attention_layers if layer.function.quantized
        }
        for block in cast(Iterable[Block], self.blocks):
            changes |= {(layer, "matmul"): layer.in_dtype for layer in block.linear_layers.values()}
            changes |= {(norm, "reader"): None for norm in (block.attention_norm, block.mlp_norm)}
        with changed(changes):
            yield

    def use_16_bits(self) -> None:
        """Let all linear layers multiply in the dtype of their operands from now on."""
        self.matmuls = [{}] * len(self.blocks)

    def _layouts(
        self, tokens: Tensor, positions: Tensor | None, cu_seqlens: Tensor | None, max_seqlen: int | None
    ) -> list[TokenLayout]:
        """One for each call of attention."""
        num_sequences, length = tokens.shape
        if positions is None:
            first = self.groups.cp_rank * length
            positions = torch.arange(first, first + length, device=tokens.device).expand(num_sequences, -1)
        parts = attention_calls(num_sequences, tokens.numel(), self.groups.tp_size, self.overlap)
        num_sequences //= parts
        num_tokens = num_sequences * length * self.groups.cp_size
        wanted, layouts = {function.documents for function in self.functions}, []
        for part, own_positions in enumerate(positions.chunk(parts)):
            rope = self.config.head_dim, self.config.rope_theta, self.config.rope_scaling
            cos, sin = rotary_tables(own_positions.flatten(), *rope)
            own = cu_seqlens
            if cu_seqlens is not None:  # documents of other parts have length zero
                own = (cu_seqlens - part * num_tokens).clamp(0, num_tokens)
                if self.head.compiled:
                    # One graph for any number of documents, not one for each.
                    torch._dynamo.maybe_mark_dynamic(own, 0)
            layouts.append(token_layout(wanted, num_sequences, num_tokens, cos, sin, own, max_seqlen))
        return layouts

    @torch.no_grad()
    def _initialize(self, seed: int, device: torch.device, partition: Callable[[nn.Parameter], None] | None) -> None:
        """Gains are 1; weights are normal with init_std, over sqrt(2 num_layers) into the residual stream.

        Every weight is drawn in full from a generator named after it, then sliced; several at a time, since one
        generator keeps one core busy. One after the other they go to the device.
        """

        @torch.no_grad()
        def draw(spec: TensorSpec, parameter: nn.Parameter) -> Tensor:
            if spec.is_gain:
                return torch.ones_like(parameter, device="cpu")
            std = self.config.init_std
            if spec.into_stream:
                std /= (2 * self.config.num_layers) ** 0.5
            full = torch.empty(spec.shape).normal_(0, std, generator=named_generator(seed, spec.name))
            return torch.empty_like(parameter, device="cpu").copy_(shard(full, spec.dim, self.groups))

        def place(parameter: nn.Parameter, drawn: Future[Tensor]) -> None:
            materialize(parameter, drawn.result().to(device))
            if partition is not None:
                partition(parameter)

        workers = min(8, cores_of_rank())
        waiting: deque[tuple[nn.Parameter, Future[Tensor]]] = deque()
        with ThreadPoolExecutor(workers) as pool:
            for name, parameter in self.named_parameters():
                if len(waiting) > workers:  # no more of the model than that in host memory
                    place(*waiting.popleft())
                waiting.append((parameter, pool.submit(draw, self.specs[name], parameter)))
            for pair in waiting:
                place(*pair)
