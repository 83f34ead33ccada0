"""Stand-ins for compiled code that has no CPU build, installed before SGLang is imported.

Measured with SGLang 0.5.23 on an AVX2 machine, December 2026: importing its servers needs names of
`sgl_kernel`; running Qwen2-VL, Qwen2.5-VL and Qwen3-VL with the `torch_native` attention backend
calls none of them.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

import torch

# Declared when SGLang's modules are imported, to give them shapes for torch.compile.
_SGL_KERNEL_SCHEMAS = (
    "fused_sigmoid_mul_cpu(Tensor(a!) x, Tensor y) -> ()",
    "fused_qk_gemma_rmsnorm_cpu(Tensor q, Tensor k, Tensor qw, Tensor kw, float eps) "
    "-> (Tensor, Tensor)",
    "fused_qk_gemma_rmsnorm_with_gate_cpu(Tensor q, Tensor k, Tensor qw, Tensor kw, float eps) "
    "-> (Tensor, Tensor, Tensor)",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu(Tensor x, Tensor y, int a, int b, int c, int d)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
# torchvision registers shapes for these two whether or not its compiled operators were loaded.
_TORCHVISION_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[torch.library.Library] = []
"""Kept: a schema lives only as long as the library object that declared it."""


def install() -> bool:
    """Install what is missing. Returns False, having done nothing, where CUDA is available."""
    if torch.cuda.is_available():
        return False
    if importlib.util.find_spec("sgl_kernel") is None:
        sys.modules["sgl_kernel"] = _sgl_kernel()
        _declare("sgl_kernel", _SGL_KERNEL_SCHEMAS)
    _declare("torchvision", _TORCHVISION_SCHEMAS)
    return True


def _declare(namespace: str, schemas: tuple[str, ...]) -> None:
    """Declare the operators of `namespace` that are not there; calling one then raises."""
    library = torch.library.Library(namespace, "FRAGMENT")
    for schema in schemas:
        name = schema.split("(", 1)[0]
        if not hasattr(getattr(torch.ops, namespace), name):
            library.define(schema)
    _libraries.append(library)


def _sgl_kernel() -> ModuleType:
    """A module in which every public `*_cpu` name is a function that raises when called."""
    module = ModuleType("sgl_kernel", "Stand-in of EPD: SGLang's kernels have no CPU build.")
    module.__spec__ = ModuleSpec("sgl_kernel", None)

    def stand_in(name: str) -> Any:
        if not name.endswith("_cpu"):
            raise AttributeError(f"module 'sgl_kernel' (EPD's stand-in) has no attribute {name!r}")

        def missing(*args: object, **kwargs: object) -> NoReturn:
            raise NotImplementedError(
                f"sgl_kernel.{name} has no CPU build: this model cannot run on a CPU here"
            )

        return missing

    module.__dict__["__getattr__"] = stand_in
    return module
