"""Time training steps of SageTrain's model beside the same model in plain PyTorch, in one process on one GPU.

    python3 benchmarks/step.py --shape 1b --ours sdpa,scores,scores+fp8
    python3 benchmarks/step.py --shape 8x4096 --ours sdpa,scores,scores+fp8,scores+int8
    python3 benchmarks/step.py --seq-length 16384 --window 4096 --ours scores+int8 --peers bf16
    python3 benchmarks/step.py --seq-length 16384 --documents 700 --ours flash,sdpa,scores --peers ""

A step is forward and backward of some micro-batches of random tokens, whole causal sequences, followed by AdamW
(torch's fused one) with fp32 master weights for the bf16 parameters. Both sides do the same. A name of --ours is an
attention backend or recipe. Linear layers are in 16 bits, or as given after the plus: linear.precision,
keep_layers_below (fp8:8000000). Behind another plus comes linear.head. Plain PyTorch is what a careful user
writes by hand: torch.compile over the whole model, FlashAttention-4 if it is installed (else SDPA, cuDNN first), and
linear layers in bf16 or by torchao's convert_to_float8_training, without the output projection. With --documents,
attention stays within documents whose lengths are drawn from a log-normal distribution (sigma 1) around that median;
plain PyTorch has no such rows.

Before anything is timed, all of them take a few steps on one sequence, and their losses must agree. Then all are in
memory at once, those of one side with the same weights and optimizer, and take their steps in turn: a GPU at its power
limit is slower the longer it works. To see what one of them takes of memory, run it alone. MFU is a share of the 16-bit
peak for all of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from peer import Peer, convert
from sagekernels.lowbit import HEADS, LOW_BIT
from sagetrain.config.schema import SIXTEEN_BITS, AttentionConfig, LinearConfig, ModelConfig
from sagetrain.config.sections.model import WindowsConfig
from sagetrain.costs.accounting import flops_per_token
from sagetrain.model.compile import compile_blocks
from sagetrain.model.selection import attention_functions, matmuls_of
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.topology import ParallelGroups
from sagetrain.training.writers import memory_gib, peak_flops

SHAPES = {
    "24x1024": ModelConfig(num_layers=24, hidden_size=1024, ffn_hidden_size=2816, num_attention_heads=16),
    "325m": ModelConfig(
        num_layers=20, hidden_size=1024, ffn_hidden_size=3072, num_attention_heads=16, tie_embeddings=True
    ),
    "1b": ModelConfig(
        num_layers=20, hidden_size=2048, ffn_hidden_size=5632, num_attention_heads=16, num_key_value_heads=4
    ),
    "8x4096": ModelConfig(
        num_layers=8, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32, num_key_value_heads=8
    ),
    "tiny": ModelConfig(
        num_layers=2, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, num_key_value_heads=2
    ),
}
VOCAB = 32000
ATTENTION = {  # These are the names of --ours.
    **{name: AttentionConfig(backend=name) for name in ("sdpa", "flash", "sage", "reference")},
    **{name: AttentionConfig(backend="sage", recipe=name) for name in ("fine", "paper", "scores")},
}
PEERS = ("bf16", "tensorwise", "rowwise")
CHECKED_STEPS, TIMED_STEPS = 8, 3
TOLERANCE = {False: 0.03, True: 0.1}
"""Largest distance of the losses of those steps from the first contender's, in units of what its loss falls, without
and with linear layers in 8 bits. On the tiny shape 16 bits are within 0.002 and 8 bits within 0.012; without gradient
through q, k, v it is 0.04."""


# -- contenders ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Contender:
    """A model, with the way to its loss."""

    model: nn.Module
    compiled: Callable[[], Callable[..., Tensor]]
    """Compile the model, and return the call that gives the loss."""
    updated: Callable[[], object] = lambda: None
    """Call this before a step, because the weights have changed."""


@dataclasses.dataclass(frozen=True)
class Case:
    """The task that all contenders compute."""

    shape: ModelConfig
    seq_length: int
    device: torch.device
    peer_attention: str

    def build(self, name: str) -> Contender:
        """Build `sagetrain scores+fp8+fp8`, `plain` or `plain + torchao tensorwise`. Raises ImportError if a
        package is not installed."""
        side, _, what = name.partition(" ")
        return self._ours(what) if side == "sagetrain" else self._peer(what.removeprefix("+ torchao "))

    def _ours(self, what: str) -> Contender:
        name, *linear = what.split("+")
        asked = SIXTEEN_BITS
        if linear:
            precision, *below = linear[0].split(":")
            head = linear[1] if linear[1:] else "bf16"
            asked = LinearConfig(precision=precision, keep_layers_below=int(*below), head=head)
        model = self._transformer(ATTENTION[name], asked)

        def compiled() -> Callable[..., Tensor]:
            compile_blocks(model)
            return model

        return Contender(model, compiled, model.keep_weights)

    def _peer(self, recipe: str) -> Contender:
        peer = Peer(self.shape, self.peer_attention, self.seq_length, VOCAB).to(self.device)
        for parameter in peer.parameters():  # The rotary tables stay in float32.
            parameter.data = parameter.data.bfloat16()
        peer.take_weights(self._transformer(AttentionConfig(backend="sdpa"), SIXTEEN_BITS))
        if recipe:
            convert(peer, recipe, emulate=self.device.type != "cuda")
        return Contender(peer, lambda: torch.compile(peer))

    def _transformer(self, attention: AttentionConfig, linear: LinearConfig) -> Transformer:
        groups, place = ParallelGroups.single(), {"dtype": torch.bfloat16, "device": self.device}
        matmuls, _ = matmuls_of(linear, self.shape, tensor_parallel_size=1, **place)
        functions = attention_functions(attention, self.shape, **place)
        return Transformer(
            self.shape, attention, vocab_size=VOCAB, groups=groups, functions=functions, matmuls=matmuls, **place
        )


class MasterAdamW:
    """Fused AdamW on fp32 copies of 16-bit parameters."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.masters = [p.detach().float() for p in parameters]
        fused = parameters[0].is_cuda
        # There is no warm-up. At 1e-4 the losses of a wide model would swing by more than the precisions differ.
        lr = min(1e-4, 0.032 / min(p.shape[-1] for p in parameters if p.dim() == 2))
        self.optimizer = torch.optim.AdamW(self.masters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)

    def lend(self, model: nn.Module) -> None:
        """Let another model have these parameters in place of its own."""
        lent = dict(zip(model.parameters(), self.parameters, strict=True))
        for module in model.modules():
            for name, own in list(module.named_parameters(recurse=False)):
                setattr(module, name, lent[own])

    @torch.no_grad()
    def step(self) -> None:
        # There are no activations now, so gradients in fp32 are not what the most memory is taken for.
        gradients = [torch.empty_like(master) for master in self.masters]
        torch._foreach_copy_(gradients, [p.grad for p in self.parameters])
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient
        self.optimizer.step()
        torch._foreach_copy_(self.parameters, self.masters)
        for tensor in (*self.parameters, *self.masters):
            tensor.grad = None


@dataclasses.dataclass(frozen=True)
class Microbatch:
    """Random tokens [batch, tokens], the labels that follow them, and the documents that attention stays within."""

    tokens: Tensor
    labels: Tensor
    cu_seqlens: Tensor | None = None
    """int32 [documents + 1] over the flattened tokens. None: attention sees whole sequences."""

    @classmethod
    def draw(cls, sequences: int, length: int, documents: int, device: torch.device) -> Microbatch:
        """Draw a micro-batch; `documents` is the median length of a document, 0 for whole sequences."""
        text = torch.randint(0, VOCAB, (sequences, length + 1), generator=torch.Generator().manual_seed(0)).to(device)
        tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        if not documents:
            return cls(tokens, labels)
        ends, random = [0], torch.Generator().manual_seed(1)
        while ends[-1] < tokens.numel():
            drawn = max(1, round(documents * torch.randn((), generator=random).exp().item()))
            # No document spans two sequences.
            ends.append(min(ends[-1] + drawn, (ends[-1] // length + 1) * length))
        return cls(tokens, labels, torch.tensor(ends, dtype=torch.int32, device=device))

    def loss(self, model: Callable[..., Tensor]) -> Tensor:
        if self.cu_seqlens is None:
            return model(self.tokens, self.labels)
        return model(self.tokens, self.labels, cu_seqlens=self.cu_seqlens, max_seqlen=self.tokens.shape[1])


def make_step(
    contender: Contender, loss_of: Callable[..., Tensor], batch: Microbatch, accumulation: int, optimizer: MasterAdamW
) -> Callable[[], Tensor]:
    """Return a function that takes one optimizer step and returns the loss of its last micro-batch."""

    def step() -> Tensor:
        contender.updated()
        for _ in range(accumulation):
            loss = batch.loss(loss_of)
            loss.backward()
        optimizer.step()
        return loss

    return step


# -- measuring -----------------------------------------------------------------------------------------------------


def check(case: Case, names: Sequence[str], batch: Microbatch) -> list[str]:
    """Return those of `names` that are installed here. Raises SystemExit if their losses do not agree. Nothing is
    compiled."""
    first, present, expected = "", [], []
    for name in names:
        try:
            contender = case.build(name)
        except ImportError as error:
            print(f"{name}: not installed ({error})", flush=True)
            continue
        optimizer = MasterAdamW(list(contender.model.parameters()))
        step = make_step(contender, contender.model, batch, 1, optimizer)
        losses = [step().item() for _ in range(CHECKED_STEPS)]
        del contender, optimizer, step
        free()
        first, expected = first or name, expected or losses
        print(f"{name:34s} losses {'  '.join(f'{loss:.4f}' for loss in losses)}", flush=True)
        apart = max(abs(loss - other) for loss, other in zip(losses, expected, strict=True))
        allowed = TOLERANCE["+" in name or "+" in first] * (expected[0] - expected[-1])
        if not apart <= allowed:
            raise SystemExit(f"{name}: its losses are {apart:.4f} from those of {first}, more than {allowed:.4f}")
        present.append(name)
    return present


def in_turn(steps: Mapping[str, Callable[[], Tensor]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Return the median milliseconds of each contender's steps in each round. In a round each of them takes one step
    untimed and TIMED_STEPS timed, and another one is the first in the next round."""
    names, found = list(steps), {name: [] for name in steps}
    for turn in range(rounds):
        at = turn % len(names)
        for name in names[at:] + names[:at]:
            _, *times = [milliseconds(steps[name], device) for _ in range(1 + TIMED_STEPS)]
            found[name].append(statistics.median(times))
            print(f"round {turn + 1}: {name:34s} {found[name][-1]:9.2f} ms", flush=True)
    return found


def milliseconds(step: Callable[[], Tensor], device: torch.device) -> float:
    """Return the time of a step."""
    _synchronize(device)
    start = time.perf_counter()
    step()
    _synchronize(device)
    return 1e3 * (time.perf_counter() - start)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def free() -> None:
    """Release the memory of what is no longer used, compiled code too."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def print_profile(name: str, step: Callable[[], object], rows: int) -> None:
    """Print the kernels of a step that take most time."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    print(f"\nkernels of one step, {name}:")
    events = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)
    print(f"  {sum(e.self_device_time_total for e in events) / 1e3:8.3f} ms in {sum(e.count for e in events)} kernels")
    for event in events[:rows]:
        print(f"  {event.self_device_time_total / 1e3:8.3f} ms {event.count:5d} x  {event.key[:110]}")


def flash_attention_4() -> bool:
    """Whether FlashAttention-4 is installed, and there is a GPU to run it."""
    try:
        from flash_attn.cute import flash_attn_func  # noqa: F401
    except ImportError:
        return False
    return torch.cuda.is_available()


def ours(text: str) -> list[str]:
    """Parse the names of --ours. Raises ArgumentTypeError for an unknown one."""
    names = [name for name in text.split(",") if name]
    for name in names:
        attention, plus, linear = name.partition("+")
        linear, in_8_bits, head = linear.partition("+")
        precision, colon, below = linear.partition(":")
        if attention not in ATTENTION:
            raise argparse.ArgumentTypeError(f"{name}: {attention!r} is no attention; there are {', '.join(ATTENTION)}")
        if plus and (precision not in LOW_BIT or (colon and not below.isdecimal())):
            ways = " or ".join(LOW_BIT)
            raise argparse.ArgumentTypeError(f"{name}: behind the plus come linear layers, in {ways}, and :WEIGHTS, "
                                             "below which a layer stays in 16 bits")  # fmt: skip
        if in_8_bits and head not in HEADS:
            raise argparse.ArgumentTypeError(f"{name}: the output projection is in {' or '.join(HEADS)}")
    return names


def peers(text: str) -> list[str]:
    """Parse the names of --peers. Raises ArgumentTypeError for an unknown one."""
    names = [name for name in text.split(",") if name]
    if unknown := [name for name in names if name not in PEERS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: linear layers of plain PyTorch are {', '.join(PEERS)}")
    return names


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of a micro-batch")
    parser.add_argument("--documents", type=int, default=0, help="median length of documents; 0: whole sequences")
    parser.add_argument("--window", type=int, help="tokens that a query sees in three of four layers, as in OLMo 3")
    parser.add_argument("--kv-heads", type=int, help="key and value heads, in place of the shape's")
    parser.add_argument("--accumulation", type=int, default=4, help="micro-batches of a step")
    parser.add_argument(
        "--ours", type=ours, default="sdpa,scores", help="what SageTrain runs with, separated by commas"
    )
    parser.add_argument("--peers", type=peers, default=",".join(PEERS), help="linear layers of plain PyTorch, the same")
    parser.add_argument("--repeats", type=int, default=4, help=f"rounds, in which each takes {TIMED_STEPS} timed steps")
    parser.add_argument("--compile", choices=["on", "off"], default="on")
    parser.add_argument("--profile", type=int, default=0, help="list this many kernels of each")
    arguments = parser.parse_args(words)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape, length = SHAPES[arguments.shape], arguments.seq_length
    if arguments.kv_heads:
        shape = shape.model_copy(update={"num_key_value_heads": arguments.kv_heads})
    if arguments.window:
        shape = shape.model_copy(update={"windows": WindowsConfig(tokens=arguments.window)})
    if arguments.documents and arguments.peers:
        parser.error('--documents: plain PyTorch takes whole sequences; add --peers ""')
    attention = "FlashAttention-4" if flash_attention_4() else "SDPA"
    case = Case(shape, length, device, attention)
    sequences = arguments.tokens // length
    batch = Microbatch.draw(sequences, length, arguments.documents, device)
    names = [f"sagetrain {name}" for name in arguments.ours]
    names += [f"plain + torchao {name}".removesuffix(" + torchao bf16") for name in arguments.peers]
    place = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(f"{arguments.shape} on {place}, torch {torch.__version__}: {arguments.accumulation} micro-batches of "
          f"{sequences} x {length} tokens, {shape.num_key_value_heads} key heads, "
          + (f"windows of {arguments.window} tokens in 3 of 4 layers, " if arguments.window else "")
          + (f"{len(batch.cu_seqlens) - 1} documents; " if batch.cu_seqlens is not None else "whole sequences; ")
          + f"attention of plain PyTorch: {attention}", flush=True)  # fmt: skip

    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    peak, flops = peak_flops(device), flops_per_token(shape, VOCAB, length)
    with sdpa_kernel(backends, set_priority=True) if device.type == "cuda" else nullcontext():
        # The check is not compiled and so takes more memory than what is timed.
        present = check(case, names, Microbatch.draw(1, min(length, 16384), arguments.documents, device))
        steps: dict[str, Callable[[], Tensor]] = {}
        optimizers: dict[str, MasterAdamW] = {}
        for name in present:
            contender, side = case.build(name), name.split()[0]
            if side in optimizers:
                optimizers[side].lend(contender.model)
            else:
                optimizers[side] = MasterAdamW(list(contender.model.parameters()))
            loss_of = contender.compiled() if arguments.compile == "on" else contender.model
            steps[name] = make_step(contender, loss_of, batch, arguments.accumulation, optimizers[side])
            for _ in range(2):
                steps[name]()
        times, rates = in_turn(steps, arguments.repeats, device), {}
        for name in present:
            ms = statistics.median(times[name])
            rates[name] = arguments.accumulation * batch.tokens.numel() / ms * 1e3
            mfu = f"{rates[name] * flops / peak:.3f}" if peak else "-"
            print(f"{name:34s} {ms:9.2f} ms  {rates[name]:9.0f} tokens/s  MFU {mfu}")
        print(f"memory of all together: {memory_gib(device):.1f} GiB")
        for peer in (name for name in rates if name.startswith("plain")):
            for name in (name for name in rates if not name.startswith("plain")):
                ratios = " ".join(f"{a / b:.3f}" for a, b in zip(times[peer], times[name], strict=True))
                print(f"{name}: {rates[name] / rates[peer]:.3f} x {peer}, by rounds {ratios}")
        for name in present if arguments.profile else ():
            print_profile(name, steps[name], arguments.profile)


if __name__ == "__main__":
    main()
