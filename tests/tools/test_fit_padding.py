"""Which matrix products a forecast for a GPU pads, as Inductor does there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tencache_fx
from tencache_fx.fitting.gpu_padding import padding_of_gpu
from tencache_fx.hardware.profiles import PROFILES, workspace_bytes
from tencache_fx.reporting.dump import read_regions

GIVEN = {"calibrate": False, "recompute": "none", "host_budget": "1TiB"}
WIDE = 1024


def ops_of(
    width: int, folder: Path, *, bias: bool = False, rows: int = 4096, dtype: torch.dtype = torch.bfloat16, **more: Any
) -> list[str]:
    """Return the names of the ops of a layer that is `width` wide, as a forecast counts them."""
    torch.compiler.reset()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDE, width, bias=bias, dtype=dtype), nn.Tanh())
        x = torch.randn(rows, WIDE, dtype=dtype)
    target = {"device_profile": "h200"} | more
    tencache_fx.fit(model, x, dump_dir=str(folder), **target, **GIVEN)
    (record,) = read_regions(folder)
    return [op.name for op in record.problem.ops]


def is_padded(ops: list[str]) -> bool:
    return any(op.startswith("constant_pad_nd") for op in ops)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("width", "odd"), [(50_257, True), (50_304, False)])
def test_products_with_odd_sizes_are_padded(width: int, tmp_path: Path, *, odd: bool, bias: bool) -> None:
    assert is_padded(ops_of(width, tmp_path, bias=bias)) is odd


def test_products_are_not_padded_where_inductor_would_not(tmp_path: Path) -> None:
    given = {
        "odd rows alone": ops_of(4096, tmp_path / "rows", rows=4097),
        "little work": ops_of(50_257, tmp_path / "little", rows=16),
        "the setting": ops_of(50_257, tmp_path / "setting", inductor={"shape_padding": False}),
        "full precision": ops_of(50_257, tmp_path / "full", dtype=torch.float32),
        "without Inductor": ops_of(50_257, tmp_path / "eager", compiler="eager"),
        "a CPU": ops_of(50_257, tmp_path / "cpu", device_profile=None, device="cpu"),
    }
    assert [name for name, ops in given.items() if is_padded(ops)] == []


def test_what_is_padded_is_the_same_product() -> None:
    def product(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return torch.addmm(c, a, b, alpha=2.0, beta=0.5) @ (a.t() @ a)

    torch.compiler.reset()
    sizes = (1024, 1019), (1019, 1019), (1019,)
    a, b, c = (torch.randn(*size, dtype=torch.bfloat16) / 32 for size in sizes)
    with padding_of_gpu(PROFILES["a100-40gb"].roofline):
        made = torch.compile(product)(a, b, c)
    assert torch.allclose(made, product(a, b, c), rtol=0.1, atol=0.05)


@pytest.mark.parametrize("profile", ["h200", "rtx3090"])
def test_workspaces_are_those_that_the_environment_sets(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> int:
        torch.compiler.reset()
        model = nn.Linear(64, 64)
        fitted = tencache_fx.fit(model, torch.randn(8, 64), device_profile=profile, compiler="eager", **GIVEN)
        return fitted.all_on_device_bytes

    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    by_default = found()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    major = PROFILES[profile].compute_capability[0]
    assert by_default - found() == workspace_bytes(major) - 2 * 16 * 8 * 1024
