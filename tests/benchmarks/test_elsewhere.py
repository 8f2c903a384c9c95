"""benchmarks/elsewhere.py imitates a GeForce card on a Hopper GPU: it issues each tensor-core instruction several
times."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from sagekernels import mma, nvrtc
from sagekernels.int8_matmul import GROUP, TILES, _int8_product_kernel

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import elsewhere

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def product() -> str:
    """Return PTX for compute capability 8.0 of a kernel with INT8 products."""
    portable = TILES["portable"]
    tile = {"BLOCK_M": portable.block_m, "BLOCK_N": portable.block_n, "BLOCK_K": portable.block_k}
    constants = {**tile, "GROUP": GROUP, "A_ROWS": 1, "B_ROWS": 1, "DESCRIBED": False}
    types = {"A": "*i8", "B": "*i8", "OUT": "*bf16", "A_SCALE": "*fp32", "B_SCALE": "*fp32"}
    names = _int8_product_kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    fixed = {(names.index(n),): value for n, value in constants.items()}
    source = ASTSource(_int8_product_kernel, signature, fixed, {})
    return compile(source, target=GPUTarget("cuda", 80, 32), options={"num_warps": portable.num_warps}).asm["ptx"]


def machine_code(ptx: str, folder: Path) -> Counter:
    """Assemble PTX for Hopper and count its instructions by name."""
    (folder / "kernel.ptx").write_text(ptx)
    cubin = folder / "kernel.cubin"
    subprocess.run([BIN / "ptxas", "--gpu-name=sm_90a", folder / "kernel.ptx", "-o", cubin], check=True)
    text = subprocess.run([BIN / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout
    return Counter(re.findall(r"\*/\s+(?:@!?U?P\w+\s+)?([A-Z]+)", text))


def test_tensor_core_instructions_are_repeated_and_remain(tmp_path):
    ptx = product()
    plain = machine_code(ptx, tmp_path)["IMMA"]
    assert plain > 0
    slow = machine_code(elsewhere.throttled(ptx, {"s32": 2.5, "f16": 9, "f32": 9}), tmp_path)["IMMA"]
    assert slow == int(2.5 * plain)


def test_sums_are_counted_by_their_type():
    line = "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r1, %r2}, {%r3, %r4, %r5, %r6}, {%r7, %r8}, {%r1, %r2};"
    other = line.replace("f16.f16.f16.f16", "f32.f16.f16.f32")
    text = elsewhere.throttled(f".entry k()\n{{\n{line}\n{other}\nret;\n}}", {"s32": 1, "f16": 2, "f32": 4})
    assert text.count(".f16.f16.f16.f16 {%idle") == 1 and text.count(".f32.f16.f16.f32 {%idle") == 3
    assert text.index("%ctaid.z") < text.index("mma.sync") and text.index("trap") < text.index("ret;")


@pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC, which comes with torch's CUDA wheels")
def test_a_throttled_cuda_kernel_repeats_each_product(monkeypatch, tmp_path):
    monkeypatch.setenv("SAGEKERNELS_CACHE", str(tmp_path))
    sources = {
        "mma_forward.cu": mma.forward_defines(64, True, False, False, True),
        "mma_prepare.cu": {"HEAD_DIM": 64, "FP16": 0, "HALF_SUMS": 1},
    }
    plain = {name: nvrtc.compiled(name, defines, "compute_80").decode() for name, defines in sources.items()}
    with elsewhere.throttling({"s32": 2.5, "f16": 2.0, "f32": 4.5}):
        slow = {name: nvrtc.compiled(name, defines, "compute_80").decode() for name, defines in sources.items()}
        assert mma.schedule(128, mma.shared_memory_of(torch.device("cuda", 0))) == (1, 1)
    counted, expected = (
        Counter(found[1] for found in elsewhere.MMA.finditer(texts["mma_forward.cu"])) for texts in (slow, plain)
    )
    assert counted == {"s32": 2.5 * expected["s32"], "f16": 2 * expected["f16"]} and expected.total() > 0
    assert slow["mma_prepare.cu"] == plain["mma_prepare.cu"]


@pytest.mark.parametrize("mask", ["causal", "full", "documents"])
def test_every_package_computes_the_same_recipe(mask):
    """The recipe is that of other GPUs, not that of the GPU at hand."""
    package = SimpleNamespace(sage_attention=lambda *_, **how: how)
    (shape,) = elsewhere.shapes(mask, [4096], 64)
    assert (shape.causal, bool(shape.documents)) == (mask != "full", mask == "documents")
    for backend in ("triton", "mma"):
        how = elsewhere.Candidate("now", package, None, backend=backend).attend(shape, None, None, None, "documents")
        assert how == {"causal": shape.causal, "cu_seqlens": "documents", "recipe": "fine", "backend": backend}
