"""The ordered list of backends decides which one runs a call, in both directions, on every kind of GPU. No GPU is
needed."""

import re
import threading

import pytest
import torch

from kernel_inputs import call_of
from runs import ROOT
from sagekernels import (
    backends,
    default_recipe,
    hopper,
    hopper_backward,
    hopper_forward,
    mma,
    nvrtc,
    quantize_keys,
    sage_attention,
)
from sagekernels.backends import BACKENDS, HOPPER, MMA, NAMED, TRITON, TWIN, serving
from sagekernels.call import RECIPES, Backend, BackwardCall
from sagekernels.reference import twin_backward, twin_forward
from sagekernels.testing import Shape, random_inputs, results_of

CPU = torch.device("cpu")
SHAPE = Shape(1, 70, 70, 2, 1, 64)


@pytest.fixture
def runs(monkeypatch):
    """The backends that ran, in order. Every one of them computes what the twin computes."""
    ran = []

    def recorded(backend: Backend) -> Backend:
        def forward(call):
            ran.append(f"{backend.name} forward")
            return twin_forward(call)

        def backward(call):
            ran.append(f"{backend.name} backward")
            return twin_backward(call)

        return backend._replace(forward=forward, backward=backward)

    named = {name: recorded(backend) for name, backend in NAMED.items()}
    monkeypatch.setattr(backends, "NAMED", named)
    monkeypatch.setattr(backends, "TRITON", named["triton"])
    monkeypatch.setattr(backends, "BACKENDS", tuple(named[backend.name] for backend in BACKENDS))
    monkeypatch.setattr(backends, "_failed", set())
    return ran


def run(monkeypatch, capability, shape=SHAPE, dtype=torch.bfloat16, **options):
    """Run both passes as on a GPU of this compute capability."""
    monkeypatch.setattr(backends, "capability", lambda device: capability)
    return results_of(sage_attention, *random_inputs(shape, dtype=dtype), **options)


@pytest.mark.parametrize(("capability", "expected"), [
    ((0, 0), "twin"), ((8, 0), "mma"), ((8, 7), "triton"), ((8, 9), "mma"), ((9, 0), "hopper"), ((10, 0), "triton"),
    ((12, 0), "mma"),
])  # fmt: skip
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_call_goes_to_the_first_backend_that_takes_it(monkeypatch, runs, capability, expected, recipe):
    if expected in ("hopper", "mma") and recipe not in ("fine", "scores"):
        expected = "triton"
    run(monkeypatch, capability, recipe=recipe)
    assert runs == [f"{expected} forward", f"{expected} backward"]


@pytest.mark.parametrize("name", [None, "hopper", "mma"])
def test_calls_without_a_cuda_kernel_are_portable(monkeypatch, runs, name):
    run(monkeypatch, (9, 0), Shape(1, 70, 70, 2, 1, 80), backend=name)
    assert runs == ["triton forward", "triton backward"]


@pytest.mark.parametrize(("shape", "options"), [
    (Shape(1, 70, 133, 4, 2, 128), {"causal": False}), (Shape(1, 70, 70, 2, 1, 64, documents=(30, 40)), {}),
])  # fmt: skip
def test_both_passes_ask_the_same_backend(monkeypatch, runs, shape, options):
    """The backward pass has no q and no k. Its answer follows from dO and V."""
    for dtype in (torch.bfloat16, torch.float16):
        run(monkeypatch, (9, 0), shape, dtype, cu_seqlens=shape.cu_seqlens(), **options)
    assert runs == ["hopper forward", "hopper backward"] * 2


def test_a_backend_by_name_serves_its_own_gpus_alone(monkeypatch, runs):
    for capability, name in (((8, 0), "hopper"), ((0, 0), "mma"), ((10, 0), "mma"), ((0, 0), "triton")):
        run(monkeypatch, capability, recipe="fine", backend=name)
    run(monkeypatch, (9, 0), recipe="fine", backend="twin")
    assert runs == ["triton forward", "triton backward"] * 4 + ["twin forward", "twin backward"]


def test_a_name_reaches_kernels_of_every_gpu_that_they_serve(monkeypatch, runs):
    """On Hopper, too, a name reaches such kernels, although Hopper's own ones stand before them in the list."""
    assert [backend.name for backend in BACKENDS] == ["hopper", "mma", "triton", "twin"]
    for capability in mma.CAPABILITIES:
        run(monkeypatch, capability, recipe="fine", backend="mma")
    assert runs == ["mma forward", "mma backward"] * len(mma.CAPABILITIES)


def test_a_new_backend_is_one_line_in_the_list(monkeypatch, runs):
    """The backend gets the calls of its GPU that it takes, and its recipe becomes the default there. Nothing else
    changes."""
    blackwell = Backend(
        "blackwell",
        serves=lambda capability: capability[0] == 10,
        head_dims=frozenset({128}),
        takes=lambda call: call.recipe == "scores",
        forward=lambda call: runs.append("blackwell forward") or twin_forward(call),
        backward=lambda call: runs.append("blackwell backward") or twin_backward(call),
        fastest="scores",
    )
    monkeypatch.setattr(backends, "BACKENDS", (blackwell, *backends.BACKENDS))
    monkeypatch.setattr(backends, "capability", lambda device: (10, 0))
    assert default_recipe(CPU) == "scores"
    assert serving((10, 0), 128) is blackwell and serving((10, 0), 64).name == "triton"
    for head_dim, recipe in ((128, "scores"), (128, "fine"), (64, "scores")):
        run(monkeypatch, (10, 0), Shape(1, 70, 70, 1, 1, head_dim), recipe=recipe)
    assert runs == ["blackwell forward", "blackwell backward", *["triton forward", "triton backward"] * 2]


@pytest.mark.parametrize(("module", "backend", "own", "recipe", "deterministic", "expected"), [
    (hopper, HOPPER, "hopper_backward", "scores", False, "own"),
    (hopper, HOPPER, "hopper_backward", "scores", True, "own"),
    (hopper, HOPPER, "hopper_backward", "fine", False, "portable"), (mma, MMA, "mma_backward", "fine", False, "own"),
    (mma, MMA, "mma_backward", "fine", True, "portable"), (mma, MMA, "mma_backward", "scores", False, "portable"),
])  # fmt: skip
def test_gradients_without_a_cuda_kernel(monkeypatch, module, backend, own, recipe, deterministic, expected):
    monkeypatch.setattr(module, own, lambda call: "own")
    monkeypatch.setattr(module, "triton_backward", lambda call: "portable")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    shape = Shape(1, 64, 64, 1, 1, 64)
    q, k, v, do = random_inputs(shape)
    call = call_of(shape, q, k, v, recipe)
    assert backend.takes(call) and backend.backward(call.backward(do, *twin_forward(call))) == expected


def test_without_nvrtc_the_list_goes_on_after_a_warning_each(monkeypatch, runs):
    monkeypatch.setattr(nvrtc, "_libraries", lambda: ["libnvrtc_that_nobody_has.so"])
    *compiled, triton, twin = backends.BACKENDS
    broken = [backend._replace(forward=lambda call: nvrtc._nvrtc.__wrapped__()) for backend in compiled]
    monkeypatch.setattr(backends, "BACKENDS", (*broken, triton, twin))
    monkeypatch.setattr(backends, "NAMED", backends.NAMED | {backend.name: backend for backend in broken})
    with pytest.raises(nvrtc.CompilationError, match="was not found"):
        run(monkeypatch, (9, 0), backend="hopper")
    with pytest.warns(RuntimeWarning, match="does without its .* kernels, slower ones take over: NVRTC was") as warned:
        first, second = (run(monkeypatch, (9, 0)) for _ in range(2))
    assert len(warned) == 2 and runs == ["triton forward", "triton backward"] * 2
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(nvrtc.CompilationError):  # A backend by name still raises an error.
        run(monkeypatch, (9, 0), backend="hopper")


def test_an_error_of_a_kernel_is_an_error(monkeypatch, runs):
    broken = backends.BACKENDS[0]._replace(forward=lambda call: 1 / 0)
    monkeypatch.setattr(backends, "BACKENDS", (broken, *backends.BACKENDS[1:]))
    with pytest.raises(ZeroDivisionError):
        run(monkeypatch, (9, 0))
    assert not runs and not backends._failed


def test_the_list_alone_imports_the_kernels_of_a_gpu():
    """Only the list and the backend's own parts import a module of a backend."""
    folders = ("sagetrain", "benchmarks", "kernels/sagekernels")
    users = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for line in re.findall(r"^ *(?:from|import) .*", path.read_text(), re.MULTILINE):
            users |= {(path.stem, name) for name in re.findall(r"\b(hopper|mma)(?:_forward|_backward)?\b", line)}
    assert {(user, name) for user, name in users if not user.startswith(name)} == {
        ("backends", "hopper"), ("backends", "mma")
    }  # fmt: skip


def test_the_last_backend_takes_everything_without_a_gpu():
    assert BACKENDS[-1] is TWIN and TWIN.serves((0, 0)) and not TRITON.serves((0, 0)) and not HOPPER.serves((0, 0))


class Launches:
    """A kernel that computes nothing."""

    def __getitem__(self, grid):
        return lambda *arguments, **options: None

    def launch(self, *arguments):
        pass


@pytest.mark.parametrize(("bounds", "sinks", "half"), [(False, False, False), (True, True, False), (True, False, True)])
def test_what_is_begun_is_what_calls_load(monkeypatch, bounds, sinks, half):
    """A start compiles the CUDA kernels of both passes in threads, with the macros under which calls ask for them where
    heads of Q have heads of K of their own."""
    begun, loaded = [], []
    monkeypatch.setattr(nvrtc, "begin", lambda *program: begun.append(program))
    for module in (hopper_forward, quantize_keys, hopper_backward):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    for module in (hopper_forward, quantize_keys):
        monkeypatch.setattr(module, "load", lambda source, _, *how: loaded.append((source, *how)) or Launches())
    monkeypatch.setattr(nvrtc, "load", lambda source, _, *how: loaded.append((source, *how)) or Launches())
    for module in (hopper_forward, nvrtc):
        monkeypatch.setattr(module, "tensor_map", lambda *_: None)
    monkeypatch.setattr(hopper_forward, "sink_scores", lambda *_: torch.zeros(2) if sinks else None)
    for name in ("_prepare_queries_kernel", "_finish_dq_kernel"):
        monkeypatch.setattr(hopper_backward, name, Launches())
    shape = Shape(1, 200, 200, 2, 2, 128, documents=(120, 80) * bounds, sinks=sinks)
    q, k, v, do = random_inputs(shape, dtype=torch.float16 if half else torch.bfloat16, device=CPU)
    call = call_of(shape, q, k, v, "scores", sinks=torch.zeros(2) if sinks else None)
    o, saved = HOPPER.forward(call)
    HOPPER.backward(BackwardCall(do, v, o, saved, call.bounds, True, call.scale, "scores", None))
    HOPPER.begin(128, True, bounds, sinks, half)
    assert sorted(map(str, begun)) == sorted(map(str, loaded)) and len(begun) == 3


def test_a_kernel_is_compiled_once_beside_python(monkeypatch):
    """The thread that has begun a program compiles it, and whoever asks for it hears of its errors."""
    threads = []

    def compiled(source, defines, architecture):
        threads.append(threading.current_thread())
        return {"right.cu": b"cubin"}[source]

    monkeypatch.setattr(nvrtc, "_compiled", compiled)
    for source in ("right.cu", "right.cu", "wrong.cu"):
        nvrtc.begin(source, {"A": 1, "B": 2}, "sm_90a")
    assert nvrtc.compiled("right.cu", {"B": 2, "A": 1}, "sm_90a") == b"cubin"
    with pytest.raises(KeyError, match=r"wrong\.cu"):
        nvrtc.compiled("wrong.cu", {"A": 1, "B": 2}, "sm_90a")
    assert len(threads) == 2 and threading.current_thread() not in threads
    assert nvrtc.compiled("right.cu", {}, "sm_90a") == b"cubin" and threads[2] is threading.current_thread()
