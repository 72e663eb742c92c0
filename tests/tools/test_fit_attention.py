"""Which kernels of attention a forecast for a GPU counts, traced on a CPU."""

import contextlib
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import tencache_fx
from tencache_fx.errors import UsageError
from tencache_fx.fitting.gpu_attention import AS_214, attention_of_gpu
from tencache_fx.reporting.dump import read_regions

TOKENS, HEADS, WIDTH = 16, 4, 8
CUDNN, FLASH, EFFICIENT = (f"_scaled_dot_product_{name}_attention" for name in ("cudnn", "flash", "efficient"))
OP_BY_OP = "bmm"

Mask = Callable[[], Tensor | None]


def no_mask() -> None:
    return None


def of_rows() -> Tensor:
    """Return a mask whose last dimension is expanded: what is not masked is so for a whole row."""
    return torch.ones(1, 1, TOKENS, 1, dtype=torch.bool).expand(2, 1, TOKENS, TOKENS)


def of_columns() -> Tensor:
    return torch.ones(2, 1, 1, TOKENS, dtype=torch.bool).expand(2, 1, TOKENS, TOKENS)


def of_three_dimensions() -> Tensor:
    return torch.ones(HEADS, TOKENS, TOKENS, dtype=torch.bool)


class Attention(nn.Module):
    """It projects, and attends to itself, with fewer heads of keys and values if these are `groups`."""

    def __init__(
        self, mask: Mask = no_mask, *, width: int = WIDTH, groups: int = HEADS, checkpoints: bool = False, **given: Any
    ) -> None:
        super().__init__()
        self.project = nn.Linear(HEADS * WIDTH, (HEADS + 2 * groups) * width)
        self.mask, self.checkpoints, self.given = mask, checkpoints, given
        self.heads, self.width = (HEADS, groups, groups), width

    def attend(self, x: Tensor) -> Tensor:
        projected = self.project(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
        return scaled_dot_product_attention(*projected.split(self.heads, 1), attn_mask=self.mask(), **self.given)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.attend, x, use_reentrant=False) if self.checkpoints else self.attend(x)


class Biased(Attention):
    """It attends with a trained bias for each pair of tokens."""

    def __init__(self) -> None:
        super().__init__(lambda: self.bias)
        self.bias = nn.Parameter(torch.zeros(1, HEADS, TOKENS, TOKENS))


class Within(Attention):
    """It attends within `sdpa_kernel`."""

    def __init__(self, *kernels: SDPBackend, ranked: bool = False, **given: Any) -> None:
        super().__init__(**given)
        self.kernels, self.ranked = list(kernels), ranked

    def attend(self, x: Tensor) -> Tensor:
        with sdpa_kernel(self.kernels, set_priority=self.ranked):
            return super().attend(x)


class ManyHeads(nn.Module):
    """torch's own module of attention."""

    def __init__(self, *, need_weights: bool, width: int = WIDTH, dropout: float = 0.0, causal: bool = False) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(HEADS * width, HEADS, dropout=dropout, batch_first=True)
        self.need_weights, self.causal = need_weights, causal

    def forward(self, x: Tensor) -> Tensor:
        x = x.repeat_interleave(self.attention.embed_dim // x.shape[-1], -1)
        mask = nn.Transformer.generate_square_subsequent_mask(TOKENS, dtype=x.dtype) if self.causal else None
        result: Tensor = self.attention(x, x, x, need_weights=self.need_weights, attn_mask=mask, is_causal=self.causal)[
            0
        ]
        return result


OPTIONS = {"compiler": "eager", "calibrate": False, "recompute": "none", "host_budget": "1GiB"}


def counted(
    model: nn.Module, folder: Path, dtype: torch.dtype = torch.bfloat16, tokens: int = TOKENS, **target: str
) -> dict[str, int]:
    """Return how long each op takes that a forecast counts."""
    torch.compiler.reset()
    x = torch.randn(2, tokens, HEADS * WIDTH, dtype=dtype)
    tencache_fx.fit(model.to(dtype), x, dump_dir=str(folder), **target, **OPTIONS)
    (record,) = read_regions(folder)
    return {op.name: op.duration_ns for op in record.problem.ops}


def ops_of(model: nn.Module, folder: Path, profile: str = "h200", dtype: torch.dtype = torch.bfloat16) -> list[str]:
    """Return the names of the ops that a forecast for a GPU counts."""
    return list(counted(model, folder, dtype, device_profile=profile))


def kernels_of(ops: list[str]) -> set[str]:
    """Return which ways to compute attention are among ops."""
    kernels = (CUDNN, FLASH, EFFICIENT, OP_BY_OP)
    return {kernel for kernel in kernels if any(re.fullmatch(rf"{kernel}(_\d+)?", op) for op in ops)}


def traced_kernels() -> set[str]:
    """Return which ways to compute attention this thread traces."""
    with FakeTensorMode():
        q = torch.randn(2, HEADS, TOKENS, WIDTH, dtype=torch.float16)
        traced = make_fx(lambda x: scaled_dot_product_attention(x, x, x))(q)
    return kernels_of([node.name for node in traced.graph.nodes])


DROPS = {"dropout_p": 0.1}
CASES: dict[str, tuple[Callable[[], nn.Module], str, str]] = {  # a model, and what runs on a Hopper and on an Ampere
    "no mask": (Attention, CUDNN, FLASH),
    "dropout": (lambda: Attention(**DROPS), FLASH if AS_214 else CUDNN, FLASH),
    "dropout in sixteenths": (lambda: Attention(dropout_p=0.125), CUDNN, FLASH),
    "dropout with a mask": (lambda: Attention(of_columns, **DROPS), EFFICIENT if AS_214 else CUDNN, EFFICIENT),
    "causal": (lambda: Attention(is_causal=True), CUDNN, FLASH),
    "a mask": (lambda: Attention(of_columns), CUDNN, EFFICIENT),
    "a causal mask": (lambda: Attention(of_columns, is_causal=True), CUDNN, EFFICIENT),
    "a mask out of order": (lambda: Attention(of_rows), OP_BY_OP, OP_BY_OP),
    "a mask of three dimensions": (lambda: Attention(of_three_dimensions), EFFICIENT, EFFICIENT),
    "a trained mask": (Biased, EFFICIENT, EFFICIENT),
    "groups": (lambda: Attention(groups=2, enable_gqa=True), CUDNN, FLASH),
    "groups with a mask": (
        lambda: Attention(of_columns, groups=2, enable_gqa=True),
        CUDNN,
        EFFICIENT if AS_214 else OP_BY_OP,
    ),
    "one head of keys": (
        lambda: Attention(groups=1),
        *((CUDNN, FLASH) if AS_214 else (OP_BY_OP, OP_BY_OP)),
    ),
    "heads of 256": (lambda: Attention(width=256), CUDNN if AS_214 else FLASH, FLASH),
    "heads of 192": (lambda: Attention(width=192), FLASH, FLASH),
    "heads of 272": (lambda: Attention(width=272), EFFICIENT, EFFICIENT),
    "heads of 20": (lambda: Attention(width=20), FLASH, FLASH),
    "heads of 20 with a mask": (lambda: Attention(of_columns, width=20), OP_BY_OP, OP_BY_OP),
    "heads of 300": (lambda: Attention(width=300), OP_BY_OP, OP_BY_OP),
    "only flash": (lambda: Within(SDPBackend.FLASH_ATTENTION), FLASH, FLASH),
    "only op by op": (lambda: Within(SDPBackend.MATH), OP_BY_OP, OP_BY_OP),
    "a rank of kernels": (
        lambda: Within(SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, ranked=True),
        EFFICIENT,
        EFFICIENT,
    ),
    "the module": (lambda: ManyHeads(need_weights=False, dropout=0.125), CUDNN, FLASH),
    "the module, causal": (lambda: ManyHeads(need_weights=False, causal=True), CUDNN, FLASH),
    "the module with weights": (lambda: ManyHeads(need_weights=True, dropout=0.125), OP_BY_OP, OP_BY_OP),
}


@pytest.mark.parametrize("profile", ["h200", "a100-80gb"])
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_s_own_kernel_is_counted(name: str, profile: str, tmp_path: Path) -> None:
    make, *kernels = CASES[name]
    assert kernels_of(ops_of(make(), tmp_path, profile)) == {kernels[profile != "h200"]}


@pytest.mark.parametrize(("mask", "kernel"), [(no_mask, EFFICIENT), (of_columns, EFFICIENT), (of_rows, OP_BY_OP)])
def test_full_precision_has_one_kernel(mask: Mask, kernel: str, tmp_path: Path) -> None:
    assert kernels_of(ops_of(Attention(mask), tmp_path, dtype=torch.float32)) == {kernel}


@pytest.mark.parametrize(
    ("width", "dropout", "kernel"), [(192, 0.0, FLASH), (200, 0.0, EFFICIENT), (256, 0.0, FLASH), (256, 0.1, EFFICIENT)]
)
def test_a_backward_that_has_no_room_on_a_small_gpu_is_another_kernel_s(
    width: int, dropout: float, kernel: str, tmp_path: Path
) -> None:
    model = Attention(width=width, dropout_p=dropout)
    assert kernels_of(ops_of(model, tmp_path, "rtx4090")) == {kernel}


def test_deterministic_algorithms_leave_cudnn_out(tmp_path: Path) -> None:
    torch.use_deterministic_algorithms(mode=True)
    try:
        assert kernels_of(ops_of(Attention(), tmp_path)) == {FLASH}
    finally:
        torch.use_deterministic_algorithms(mode=False)


def test_kernels_that_are_allowed_and_fit_nothing_are_an_error_as_on_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no kernel of attention .*bfloat16 on a GPU; allow SDPBackend.MATH"):
        ops_of(Within(SDPBackend.FLASH_ATTENTION, mask=of_columns), tmp_path)


def test_a_cpu_s_own_kernel_is_counted_on_a_cpu(tmp_path: Path) -> None:
    for index in range(2):
        assert kernels_of(ops_of(Attention(of_rows), tmp_path / f"gpu{index}")) == {OP_BY_OP}
        ops = counted(Attention(of_rows), tmp_path / f"cpu{index}", device="cpu")
        assert any(op.startswith("_scaled_dot_product_flash_attention_for_cpu") for op in ops)


@pytest.mark.parametrize("sizes", [(2, HEADS), (HEADS,), ()])
def test_a_gpu_s_kernels_are_for_fakes_only(sizes: tuple[int, ...]) -> None:
    q = torch.randn(*sizes, TOKENS, WIDTH)
    for given in ({}, {"attn_mask": of_rows()[0, 0]}, {"is_causal": True}):
        expected = scaled_dot_product_attention(q, q, q, **given)
        with attention_of_gpu((9, 0)):
            assert scaled_dot_product_attention(q, q, q, **given).equal(expected)


def test_other_threads_compile_for_the_cpu_meanwhile() -> None:
    model, x = Attention(), torch.randn(2, TOKENS, HEADS * WIDTH)
    with ThreadPoolExecutor(1) as other:
        with attention_of_gpu((9, 0)):
            compiled = other.submit(torch.compile(model, backend="aot_eager"), x)
            with pytest.raises(TimeoutError):  # they wait, as for any other thread that compiles
                compiled.result(0.2)
        assert torch.allclose(compiled.result(), model(x), atol=1e-6)


def test_other_threads_trace_for_the_cpu_meanwhile() -> None:
    with attention_of_gpu((9, 0)), ThreadPoolExecutor(1) as other:
        assert (traced_kernels(), other.submit(traced_kernels).result()) == ({CUDNN}, set())


def test_threads_trace_for_one_gpu_each() -> None:
    both = threading.Barrier(2, timeout=0.3)

    def kernels(capability: tuple[int, int]) -> set[str]:
        with attention_of_gpu(capability):
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait()
            return traced_kernels()

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(kernels, [(9, 0), (7, 5)])) == [{CUDNN}, {EFFICIENT}]


def test_attention_that_is_checkpointed_takes_as_long(tmp_path: Path) -> None:
    """Before torch 2.14 it is an argument of the op that draws by a kept state."""
    times_ns = []
    for checkpoints in (False, True):
        ops = counted(
            Attention(checkpoints=checkpoints),
            tmp_path / str(checkpoints),
            device_profile="h200",
            tokens=4096,
        )
        times_ns.append([ns for name, ns in ops.items() if re.search("attention(_[0-9]+)?$|rng_state", name)])
    ((once_ns,), again_ns) = times_ns
    assert once_ns > 10_000
    assert again_ns == pytest.approx([once_ns] * len(again_ns), rel=0.3)  # what it waits for besides, is not alike


def test_what_attention_op_by_op_takes_is_counted(tmp_path: Path) -> None:
    counts = [len(ops_of(Attention(mask, **DROPS), tmp_path / mask.__name__)) for mask in (of_columns, of_rows)]
    assert counts[1] > counts[0] + 10
