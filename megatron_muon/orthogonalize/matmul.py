"""The matrix products of Newton-Schulz, and their rounding, in one place.

A product accumulates in fp32, takes its linear term in the same pass and rounds once.
The matmul of CUDA does that by itself, and in bf16 that of a CPU with bf16
instructions. (Where CUDA cuts a product along its inner dim, the process chooses
whether the sums may be added in 16 bits:
``torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction`` and its fp16
counterpart.) Elsewhere the operands are held and multiplied in fp32, where they are
exact: without such instructions torch's kernels are tens of times slower.

Products in fp32 are never TF32 or bf16, even where the process allows that for its
others, as some container images do: the Gram iteration's restarts are known for fp32
only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_muon.orthogonalize import triton_operations
from megatron_muon.orthogonalize.iteration import KERNEL_ROWS, fits_kernel, panels
from megatron_muon.orthogonalize.numerics import Device, Numerics, has_kernel
from megatron_muon.presence import MuonError
from megatron_muon.settings.coefficients import NsDtype, Triple
from megatron_muon.settings.config import MuonConfig

TORCH_DTYPE: dict[NsDtype, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
# (left, right, linear, beta, alpha, out)
SymmetricKernel = Callable[
    [Tensor, Tensor, Tensor | None, float, float, Tensor | None], Tensor
]
# fp16 ends at 6e-8, and is coarse below 6e-5. A matrix of norm 128 keeps entries of
# 5e-10 of its norm. Sums of its square stay below fp16's 65,504, so that parts of them
# may be added in fp16.
_FP16_NORM = 128.0
_TRIAL = 512  # inner elements of the trial product, whose sums are then below 256
# Hopper: every release that has the kernel supports it from there on
_KERNEL_CAPABILITY = (9, 0)


def scale_of(ns_dtype: NsDtype) -> float:
    """The power of two by which an iterate is multiplied where it is held in a
    dtype.
    """
    return _FP16_NORM if ns_dtype == "fp16" else 1.0


class KernelError(MuonError, RuntimeError):
    """A kernel of symmetric products does not work; quotes its error, names the way
    out.
    """

    @classmethod
    def of(cls, error: Exception, library: str = "quack-kernels") -> KernelError:
        """The error that quotes the library's ``error``."""
        return cls(
            f"the kernel of {library} for the symmetric products of Newton-Schulz "
            f"fails: {type(error).__name__}: {error}. Install a release of {library} "
            "that fits this GPU and torch, or give --muon-symmetric-products torch: "
            "torch's matmul takes its place"
        )


@dataclass(frozen=True, slots=True)
class Products:
    """Products on one device, each rounded."""

    dtype: torch.dtype  # the dtype of iterates, to which products are rounded
    # the dtype to which the Gram iteration's square matrices are rounded
    squares: torch.dtype
    held: torch.dtype  # the dtype in which matrices are held and multiplied
    # an iterate X is held as scale·X, a power of two; squares are not
    scale: float = 1.0
    folded: bool = False  # see Numerics
    # symmetric products are made in panels up to the diagonal, and mirrored
    blocked: bool = False
    # another symmetric product than torch's matmul, and the device that it is for
    kernel: SymmetricKernel | None = None
    device: Device = "cuda"

    def enter(self, x: Tensor) -> Tensor:
        """``scale``·X in fp32, rounded to ``dtype`` and held in ``held``."""
        return x.to(self.dtype).to(self.held)

    def unscale(self, *, is_last: bool) -> float:
        """The factor of a product that makes an iterate: the last one is not scaled."""
        return 1.0 / self.scale if is_last else 1.0

    def rounded(self, x: Tensor) -> Tensor:
        """Round a product to ``dtype`` in place, unless the product has done so
        itself.
        """
        return x if self.dtype == self.held else x.copy_(x.to(self.dtype))

    def of_squares(self) -> Products:
        """The same products, rounded to ``squares``."""
        return replace(self, dtype=self.squares)

    def plain(self) -> Products:
        """The same products without panels; a library's kernel stays in use."""
        return replace(self, blocked=False) if self.blocked else self

    def product(
        self,
        left: Tensor,
        right: Tensor,
        linear: Tensor | None = None,
        *,
        beta: float = 1.0,
        alpha: float = 1.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """``beta·linear + alpha·left@right``, of matrices or of batches of them."""
        is_batch = left.dim() == 3
        added = torch.baddbmm if is_batch else torch.addmm
        if linear is not None:
            made = added(linear, left, right, beta=beta, alpha=alpha, out=out)
        elif alpha == 1.0:
            made = (torch.bmm if is_batch else torch.mm)(left, right, out=out)
        else:
            if out is None:
                out = left.new_empty((*left.shape[:-1], right.size(-1)))
            # With beta 0 torch neither reads nor copies the linear term.
            made = added(out, left, right, beta=0.0, alpha=alpha, out=out)
        return made if self.dtype is self.held else self.rounded(made)

    def folds(self, steps: Sequence[Triple]) -> bool:
        """Whether the Gram iteration's steps have their linear terms on a diagonal,
        too.

        Where c is 0, P is R itself, and H would be a copy of it.
        """
        return self.folded and all(c != 0 for _, _, c in steps)

    def fold(self, square: Tensor, beta: float, alpha: float) -> float | None:
        """Where ``folded``, add ``beta/alpha`` to S's diagonal, for beta·X + alpha·SX.

        Returns:
            beta, where ``times`` has to add that term itself; None where S has it.
        """
        if not self.folded:
            return beta
        square.diagonal(dim1=-2, dim2=-1).add_(beta / alpha)
        self.rounded(square)
        return None

    def times(
        self,
        square: Tensor,
        x: Tensor,
        *,
        beta: float | None = None,
        alpha: float = 1.0,
        is_tall: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """``beta·X + alpha·SX``, or XS where it ``is_tall``; beta None: no linear term.

        ``out``, not ``x``, takes the result.
        """
        left, right = (x, square) if is_tall else (square, x)
        linear = None if beta is None else x
        return self.product(left, right, linear, beta=beta or 0.0, alpha=alpha, out=out)

    def short_square(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """XXᵀ, or XᵀX where X is tall, of an iterate; not scaled."""
        is_tall = x.size(-2) > x.size(-1)
        return self.square(x.mT if is_tall else x, out=out)

    def square(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """XXᵀ of an iterate; not scaled."""
        return self.symmetric(x, x.mT, alpha=self.scale**-2, out=out)

    def symmetric(
        self,
        left: Tensor,
        right: Tensor,
        linear: Tensor | None = None,
        *,
        beta: float = 1.0,
        alpha: float = 1.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """``product`` where the result and ``linear`` are known to be symmetric."""
        size, inner = left.shape[-2:]
        if self.kernel is not None and fits_kernel(size, inner, self.device):
            return self.rounded(self.kernel(left, right, linear, beta, alpha, out))
        in_panels = panels(left.size(0)) if self.blocked and left.dim() == 2 else ()
        if len(in_panels) < 2:
            return self.product(left, right, linear, beta=beta, alpha=alpha, out=out)
        out = left.new_empty(left.size(0), left.size(0)) if out is None else out
        for start, stop in in_panels:  # up to the diagonal, then mirrored
            panel = out[start:stop, :stop]
            within = None if linear is None else linear[start:stop, :stop]
            self.product(
                left[start:stop],
                right[:, :stop],
                within,
                beta=beta,
                alpha=alpha,
                out=panel,
            )
            out[:start, start:stop].copy_(out[start:stop, :start].mT)
        return out

    def power_sum(
        self, square: Tensor, b: float, c: float, out: Tensor | None = None
    ) -> tuple[Tensor, float]:
        """P and α with αP = bA + cA² of a symmetric A.

        Where c is 0, no product is made: P is A itself, and α is b.
        """
        if c == 0:
            return square, b
        return self.symmetric(square, square, square, beta=b, alpha=c, out=out), 1.0


@cache
def multiplies_bf16() -> bool:
    """Whether this CPU has bf16 instructions (AVX512_BF16, AMX) and torch's kernels use
    them.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    # since torch 2.5
    has_avx512_bf16 = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    # the public way, later still
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    if capabilities is None:
        return has_avx512_bf16 is not None and bool(has_avx512_bf16())
    return any(capabilities().get(name, False) for name in ("avx512_bf16", "amx_bf16"))


def plan_device(device: torch.device, config: MuonConfig) -> Device:
    """The kind of a device, for plans; all but CPUs count as CUDA's. Errors:
    ``symmetric_kernel``'s.
    """
    if device.type != "cpu":
        if symmetric_kernel(device, config) is None:
            return "cuda"
        return "cuda_triton" if _library(config) == "triton" else "cuda_symmetric"
    return "cpu_bf16" if multiplies_bf16() else "cpu"


def numerics_on(device: torch.device, config: MuonConfig) -> Numerics:
    """What settings mean on a device; see ``plan_device``."""
    return Numerics(config, plan_device(device, config))


def products_on(device: torch.device, numerics: Numerics) -> Products:
    """The products that a device has."""
    held = TORCH_DTYPE[numerics.held]
    return Products(
        TORCH_DTYPE[numerics.dtype],
        squares=held,
        held=held,
        scale=scale_of(numerics.dtype),
        folded=numerics.folded,
        blocked=not numerics.on_gpu,
        kernel=(
            symmetric_kernel(device, numerics.config)
            if has_kernel(numerics.products)
            else None
        ),
        device=numerics.products,
    )


@contextmanager
def sums_in_fp32(device: torch.device) -> Iterator[None]:
    """A context in which products are added up in fp32, whatever the process allows
    elsewhere.

    Products in fp32 are made in fp32, and those of a GPU in fp16 are not accumulated in
    fp16. The host reads its options when it starts a product, and waits for no GPU.
    """
    cuda = torch.backends.cuda.matmul
    with ExitStack() as undo:
        # torch 2.7
        if device.type == "cuda" and getattr(cuda, "allow_fp16_accumulation", False):
            undo.callback(setattr, cuda, "allow_fp16_accumulation", True)
            cuda.allow_fp16_accumulation = False
        undo.enter_context(fp32_products("highest"))
        own = _options_by_device().get(device.type)
        if own is not None:
            own.fp32_precision = "ieee"
        yield


@contextmanager
def fp32_products(precision: str) -> Iterator[None]:
    """A context in which torch's old option of products in fp32 has this value.

    Since 2.9 torch has one for each backend beside the old one for all
    (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1, which NVIDIA's containers set), and some of its
    products raise where the two differ. So does reading the old one.
    """
    try:
        before = torch.get_float32_matmul_precision()
        is_set = before == precision
    except RuntimeError:
        before = _unreadable_precision()
        is_set = False
    with ExitStack() as undo:
        for option in _options_by_device().values():
            undo.callback(setattr, option, "fp32_precision", option.fp32_precision)
        if not is_set:
            undo.callback(torch.set_float32_matmul_precision, before)
            torch.set_float32_matmul_precision(precision)
        yield


def _unreadable_precision() -> str:
    """torch's old option where the new ones contradict it, as far as allow_tf32
    tells.
    """
    cuda = torch.backends.cuda.matmul
    try:
        allows_tf32 = cuda.allow_tf32
    except RuntimeError:  # it contradicts CUDA's
        allows_tf32 = cuda.fp32_precision != "tf32"
    return "high" if allows_tf32 else "highest"


def _options_by_device() -> dict[str, Any]:
    """torch's newer options of products in fp32; none before 2.9."""
    backends: dict[str, Any] = {
        "cpu": torch.backends.mkldnn,
        "cuda": torch.backends.cuda,
    }
    return {
        name: backend.matmul
        for name, backend in backends.items()
        if hasattr(getattr(backend, "matmul", None), "fp32_precision")
    }


def try_products(device: torch.device, numerics: Numerics) -> None:
    """Make products with the kernel, if any, beside torch's; a KernelError if it does
    not work.

    The operands are -1, 0 and 1, so that no sum is above 256, which bf16 has. They have
    the fewest rows that the kernel takes, in whole squares of 512.
    """
    products = products_on(device, numerics)
    if products.kernel is None:
        return
    library = _library(numerics.config)
    try:
        squares = -(-KERNEL_ROWS[products.device] // _TRIAL)
        numbers = torch.arange(_TRIAL, device=device)
        kinds = torch.outer(numbers, numbers).remainder(5)
        square = (kinds == 1).to(products.held) - (kinds == 4).to(products.held)
        x = square.repeat(squares, 1)
        linear = x.repeat(1, squares)
        plain = replace(products, kernel=None)
        differ = [
            bool((products.symmetric(*operands) != plain.symmetric(*operands)).any())
            for operands in ((x, x.mT), (x, x.mT.contiguous(), linear))
        ]
    except Exception as error:  # of any type: the library has a compiler of its own
        raise KernelError.of(error, library) from error
    if any(differ):
        wrong = ArithmeticError("a product of -1, 0 and 1 is wrong")
        raise KernelError.of(wrong, library)


def describe_products(numerics: Numerics) -> str:
    """The log's words for the library that makes the symmetric products."""
    if has_kernel(numerics.products):
        least = KERNEL_ROWS[numerics.products]
        return f"{_library(numerics.config)} from {least:,} rows on"
    if numerics.on_gpu or numerics.iteration == "standard":
        return "torch, plain matmul"
    of_gram = " in the Gram iteration" if numerics.iteration == "auto" else ""
    return f"torch, in panels up to the diagonal{of_gram}"


def symmetric_kernel(
    device: torch.device, config: MuonConfig
) -> SymmetricKernel | None:
    """The kernel of symmetric products that a device has with these settings.

    Raises:
        KernelError: it cannot be imported.
    """
    if device.type != "cuda" or config.symmetric_products == "torch":
        return None
    if config.symmetric_products == "triton":
        return _triton()
    kernel = _quack()
    if kernel is None or torch.cuda.get_device_capability(device) < _KERNEL_CAPABILITY:
        return None
    return kernel


def _library(config: MuonConfig) -> str:
    return "triton" if config.symmetric_products == "triton" else "quack-kernels"


def _triton() -> SymmetricKernel:
    if not triton_operations.has_triton():
        raise KernelError.of(ImportError("triton is not installed"), "triton")
    from megatron_muon.orthogonalize.symmetric import symmetric_product

    return symmetric_product


@cache
def _quack() -> SymmetricKernel | None:
    """quack-kernels' symmetric product (Hopper, Blackwell; bf16, fp16), where it is
    installed.
    """
    try:
        from quack.gemm_interface import gemm_symmetric
    except ImportError:
        return None
    except Exception as error:  # as in try_products
        raise KernelError.of(error) from error

    def kernel(
        left: Tensor,
        right: Tensor,
        linear: Tensor | None,
        beta: float,
        alpha: float,
        out: Tensor | None,
    ) -> Tensor:
        alone = left.dim() == 2  # gemm_symmetric takes only batches
        tensors = (left, right, linear, out)
        a, b, c, d = (x if x is None or not alone else x[None] for x in tensors)
        made: Tensor = gemm_symmetric(a, b, C=c, out=d, alpha=alpha, beta=beta)
        return made[0] if alone else made

    return kernel
