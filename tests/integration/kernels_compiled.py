"""Run by test_engine_kernels.py: compiles each kernel for a Hopper GPU, as it is started there."""

from __future__ import annotations

import re
import subprocess
import tempfile

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from workers.engine.gpu import triton_kernels as kernels
from workers.engine.gpu.launch import TILES

_DIVISIBLE = ("outputs", "inputs")
"""by 16 in every model; Triton notices when a kernel is started"""
HOPPER = GPUTarget("cuda", 90, 32)


def compile_(name: str, types: str, constants: dict[str, object], note: str = "", **options: int) -> None:
    """`types`: of the arguments before the constants; n stands for one that there isn't."""
    function = getattr(kernels, name)
    given = dict(zip(function.arg_names, types.split(), strict=False))
    absent = {argument: None for argument, kind in given.items() if kind == "n"}
    signature = {argument: "constexpr" if kind == "n" else kind for argument, kind in given.items()}
    signature |= dict.fromkeys(constants, "constexpr")
    whole = {at for at, (argument, kind) in enumerate(given.items()) if kind[0] == "*" or argument in _DIVISIBLE}
    aligned = {(at,): [["tt.divisibility", 16]] for at in sorted(whole)}
    source = ASTSource(function, signature=signature, constexprs={**absent, **constants}, attrs=aligned)
    made = triton.compile(source, target=HOPPER, options={**options, "enable_fp_fusion": False})
    ptx = made.asm["ptx"]
    instructions = " ".join(sorted(set(re.findall(r"wgmma\.mma_async\S+", ptx))))
    copies = len(re.findall(r"cp\.async\.c", ptx))
    print(
        f"{name} {note}: {made.metadata.shared} bytes shared, {stack_bytes(made.asm['cubin'])} spilled,"
        f" {copies} copies ahead, {instructions}"
    )


def stack_bytes(code: bytes) -> int:
    """What a thread keeps in memory because registers don't suffice."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        dumped = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        )
    return max(map(int, re.findall(r"STACK:(\d+)", dumped.stdout)))


if __name__ == "__main__":
    for tiles in TILES:
        blocks = {"BLOCK_OUTPUTS": tiles.outputs, "BLOCK_ROWS": tiles.rows, "BLOCK_INPUTS": tiles.inputs}
        for kind, scale, scaled in (("*bf16", "n", False), ("*i8", "*fp32", True)):
            compile_(
                "linear",
                f"*bf16 {kind} {scale} n *bf16 i32 i32 i32",
                {"SCALED": scaled, "BIASED": False, "EVEN": True, **blocks},
                f"{kind} {tiles.rows}",
                num_warps=tiles.warps,
                num_stages=tiles.stages,
            )
    compile_("norm", "*fp32 *bf16 *fp32 *bf16 fp32", {"WIDTH": 4096, "BLOCK": 4096, "ADDS": True}, num_warps=4)
    heads = {"QUERIES": 32, "KEYS": 8, "HALF": 64, "BLOCK": 64, "NORMED": True}
    compile_("place", "*bf16 *fp32 *fp32 *fp32 *fp32 *i32 *i32 *bf16 *bf16 *bf16 fp32", heads, num_warps=1)
    compile_("gate", "*bf16 *bf16", {"INNER": 14336, "BLOCK": 1024}, num_warps=4)
