"""Training steps of a model as CUDA graphs: its forward and backward passes are recorded once, and replayed."""

from __future__ import annotations

import functools
import os
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from . import graphs, observe
from .graphs import Pool, Record, Recording, hooks_of, leave_default_stream, rehearsal

# Calls like a recorded one come first: kernels are compiled, tuned and loaded in them.
_PASSES = 2
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel", "DeepSpeedEngine")


def graphed(model: nn.Module, *, kept: int = 4) -> nn.Module:
    """Let a model on one GPU replay its forward and backward passes from CUDA graphs while it trains.

    Where the host needs longer to launch kernels than the GPU to run them, as with one short sequence at a time, this
    is several times as fast, and the numbers are the same. The third call with the same shapes is recorded. Calls with
    other shapes, in evaluation or without gradients run as before. Code that asks whether it is being recorded hears
    yes from the first call on: transformers then gives "sdpa" a mask, and PyTorch takes another kernel for it.

    Under `torch.autocast` the backward pass is that of a loop that calls `backward` outside of it, as PyTorch advises.

    The loss is what the model returns, or its `loss`, or the only scalar of what it returns that has a gradient.
    Gradients flow from there alone: all other results are detached. Each result is in memory that the next call
    overwrites. The backward pass of a call comes before the next call.

    Args:
        model: the model, on one GPU. Its `forward` is replaced. Compile its blocks before, and wrap it neither before
            nor after.
        kept: the number of shapes that are recorded. Each keeps the memory of its results.

    Returns:
        The model.

    Raises:
        ValueError: the model is wrapped, sharded, already graphed, or not on one GPU.
    """
    places = {parameter.device for parameter in model.parameters()}
    if len(places) != 1 or next(iter(places)).type != "cuda":
        found = ", ".join(sorted(map(str, places))) or "nowhere"
        raise ValueError(f"graphed: the parameters must be on one GPU, and they are on {found}; move the model before")
    _graph(model, Pool().record, kept)
    leave_default_stream()
    return model


def _graph(model: nn.Module, record: Record, kept: int) -> None:
    """Replace the forward function of a model. `record` records what a function launches."""
    if isinstance(model.forward, _Graphed):
        raise ValueError("graphed: this model is graphed already")
    kinds = {kind.__name__ for kind in type(model).__mro__}
    if wrapper := next((name for name in _WRAPPERS if name in kinds), None):
        raise ValueError(f"graphed: {wrapper} reduces gradients by hooks, which no replay runs; it takes a plain model")
    if sharded := [name for name, each in model.named_parameters() if hasattr(each, "to_local")]:
        raise ValueError(f"graphed: {sharded[0]} is sharded, and the hooks that gather it would run in no replay")
    model.forward = _Graphed(model, record, kept)  # type: ignore[method-assign]


class _Program:
    """The calls with inputs of the same shapes."""

    def __init__(self) -> None:
        self.passes = 0
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        """The results of the model one after the other, in the memory of the recording."""
        self.form: TreeSpec
        self.place = 0
        """The place of the loss among the outputs."""
        self.scale: Tensor
        """The gradient of the loss."""
        self.forward: Recording | None = None
        self.backward: Recording
        self.given: list[tuple[nn.Parameter, Tensor]] = []
        """The parameters that get a gradient, and the memory that it has in recordings."""


class _Graphed:
    """The forward function of a graphed model."""

    def __init__(self, model: nn.Module, record: Record, kept: int) -> None:
        self._model, self._record, self._kept = model, record, kept
        self._run: Callable[..., Any] = model.forward
        # A library that looks at the arguments of the model sees those of the model.
        functools.update_wrapper(self, self._run)
        self._programs: dict[Any, _Program] = {}
        self._gradients: dict[nn.Parameter, Tensor] = {}
        # A loss needs an ancestor that has a gradient.
        self._root = torch.zeros((), requires_grad=True)
        self.turn = 0
        """The number of replays."""
        self.refusal = ""
        """The reason why nothing is recorded any more."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, form = tree_flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if (
            self.refusal
            or not (self._model.training and torch.is_grad_enabled())
            or any(x.requires_grad for x in tensors)
            or observe.listening()
            or torch.compiler.is_compiling()
        ):
            return self._run(*args, **kwargs)
        key = (
            form,
            *((x.shape, x.dtype, x.device) if isinstance(x, Tensor) else x for x in leaves),
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
            torch.are_deterministic_algorithms_enabled(),
        )
        try:
            program = self._programs.pop(key, None) or _Program()
        except TypeError:  # An argument has no hash.
            return self._run(*args, **kwargs)
        if len(self._programs) >= self._kept:
            del self._programs[next(iter(self._programs))]
        self._programs[key] = program
        if program.forward is None:
            if program.passes < _PASSES:
                program.passes += 1
                with rehearsal():
                    return self._run(*args, **kwargs)
            self._make(program, leaves, form)
            if self.refusal:
                return self._run(*args, **kwargs)
        return self._replay(program, leaves)

    def _replay(self, program: _Program, leaves: list[Any]) -> Any:
        for ours, given in zip(program.inputs, leaves, strict=True):
            if isinstance(given, Tensor):
                ours.copy_(given, non_blocking=True)
        assert program.forward is not None
        program.forward.replay()
        self.turn += 1
        outputs = list(program.outputs)
        outputs[program.place] = _Loss.apply(self._root, self, program)  # type: ignore[no-untyped-call]
        return tree_unflatten(outputs, program.form)

    def backward(self, program: _Program, scale: Tensor) -> None:
        """Replay the backward pass of the last call, and add its gradients to those of the parameters."""
        if fresh := [ours for parameter, ours in program.given if parameter.grad is None]:
            torch._foreach_zero_(fresh)
        for parameter, ours in program.given:
            if parameter.grad is not None and parameter.grad is not ours:
                ours.copy_(parameter.grad)
            parameter.grad = ours
        program.scale.copy_(scale)
        program.backward.replay()

    def _make(self, program: _Program, leaves: list[Any], form: TreeSpec) -> None:
        """Record a program, or refuse to record anything from now on."""
        before = {parameter: parameter.grad for parameter in self._model.parameters() if parameter.requires_grad}
        # Weights that autocast has cast before would never be cast again.
        torch.clear_autocast_cache()
        try:
            self.refusal = _hooks_of(self._model)
            if not self.refusal:
                self._record_both(program, leaves, form, before)
        except Exception as error:  # noqa: BLE001 - Whatever it is, the model runs without recordings as well.
            self.refusal = f"{type(error).__name__}: {error}".partition("\n")[0] + _line_of(error)
        finally:
            torch.clear_autocast_cache()
            for parameter, gradient in before.items():
                parameter.grad = gradient
        if self.refusal:
            self._programs.clear()
            self._gradients.clear()
            warnings.warn(f"graphed: the host launches each call from now on: {self.refusal}", stacklevel=4)

    def _record_both(
        self, program: _Program, leaves: list[Any], form: TreeSpec, before: dict[nn.Parameter, Tensor | None]
    ) -> None:
        program.inputs = [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]
        args, kwargs = tree_unflatten(program.inputs, form)
        made: list[Any] = []
        forward = self._record(lambda: made.append(self._run(*args, **kwargs)))
        outputs, program.form = tree_flatten(made[0])
        program.place = _place_of_loss(made.pop(), outputs)
        loss = outputs[program.place]
        program.scale = torch.ones_like(loss)
        for parameter in before:
            # Memory that a gradient has already had may be that of another recording.
            if parameter not in self._gradients:
                self._gradients[parameter] = torch.zeros_like(parameter)
            parameter.grad = self._gradients[parameter]
        versions = {parameter: ours._version for parameter, ours in self._gradients.items()}
        # The backward pass of a loop runs outside of autocast, which would round what a model computes in fp32.
        with torch.autocast(loss.device.type, enabled=False):
            program.backward = self._record(lambda: loss.backward(program.scale))
        program.given = [(p, ours) for p, ours in self._gradients.items() if ours._version > versions[p]]
        program.outputs = [x.detach() if isinstance(x, Tensor) else x for x in outputs]
        program.forward = forward


class _Loss(torch.autograd.Function):
    """The loss of a replay, whose backward pass is a replay too."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, graphed: _Graphed, program: _Program) -> Tensor:
        ctx.graphed, ctx.program, ctx.turn = graphed, program, graphed.turn
        loss: Tensor = program.outputs[program.place]
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[None, None, None]:
        if ctx.turn != ctx.graphed.turn:
            raise RuntimeError(
                "graphed: the model was called again before this backward pass, and a replay has overwritten what it "
                "needs. Call backward before the next forward pass, and once"
            )
        ctx.turn = -1
        ctx.graphed.backward(ctx.program, scale)
        return None, None, None


def _place_of_loss(result: Any, outputs: list[Any]) -> int:
    """Return the place of the loss among the tensors of what a model returned. Raises ValueError if there is none."""
    named = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", None)
    scalars = [x for x in outputs if isinstance(x, Tensor) and x.requires_grad and x.dim() == 0]
    found = [x for x in scalars if x is named] or scalars
    if len(found) != 1:
        raise ValueError(f"the model must return one loss, a scalar, and returned {len(found)}: let it return its loss")
    return next(place for place, x in enumerate(outputs) if x is found[0])


def _line_of(error: Exception) -> str:
    """Return the line that did what cannot be recorded, the last one outside of torch: " (file.py:7: code)", or "" if
    there is none but ours."""
    ours, library = (__file__, graphs.__file__), os.path.dirname(torch.__file__) + os.sep
    frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename not in ours]
    found = next((each for each in reversed(frames) if not each.filename.startswith(library)), None)
    return f" ({os.path.basename(found.filename)}:{found.lineno}: {found.line})" if found else ""


def _hooks_of(model: nn.Module) -> str:
    """Return "", or that a model has hooks, which would run in no replay, or may have those of a wrapper."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return "there are several ranks, whose gradients a wrapper may reduce by hooks, which would run in no replay"
    if found := hooks_of(model.named_modules()):
        return f"{found}, which would run in no replay"
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return f"{name} has hooks of its gradient, which would run in no replay"
    return ""
