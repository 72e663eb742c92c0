"""Weights from safetensors files: as a plain load has them, or refused in one sentence."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from weights import save_weights

import tencache_fx
from tencache_fx.errors import OptionError
from tencache_fx.model_state.parameter_store import find_offloaded
from tencache_fx.model_state.weight_files import WeightFiles


class Net(nn.Module):
    """A tied pair, a norm with buffers, one that is not saved, and a small head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(192, 192, bias=False)
        self.norm = nn.BatchNorm1d(192)
        self.second = nn.Linear(192, 192, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(192, 3, dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def all_closed(no_leaks: None) -> None:
    yield
    tencache_fx.close()


def values() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    found = {name: torch.randn(value.shape).to(value.dtype) for name, value in Net().state_dict().items()}
    found["norm.num_batches_tracked"] = torch.tensor(7)
    found["second.weight"] = found["first.weight"]
    return found


@pytest.mark.parametrize("on_meta", [True, False])
@pytest.mark.parametrize("how", ["file", "folder", "list", "index"])
def test_values_are_those_of_a_plain_load(tmp_path: Path, how: str, on_meta: bool) -> None:  # noqa: FBT001
    saved = values()
    del saved["first.weight"]  # known by its other name
    saved["unknown"] = torch.zeros(3)
    names = list(saved)
    if how == "file":
        where: object = str(save_weights(tmp_path / "model.safetensors", saved))
    else:
        parts = {"a.safetensors": names[:2], "b.safetensors": names[2:]}
        where = [save_weights(tmp_path / part, {k: saved[k] for k in some}) for part, some in parts.items()]
        index = {"weight_map": {name: part for part, some in parts.items() for name in some}}
        if how == "folder":
            where = tmp_path
        elif how == "index":
            where = tmp_path / "model.safetensors.index.json"
            where.write_text(json.dumps(index))
            save_weights(tmp_path / "other.safetensors", saved)  # which the index does not name
    with torch.device("meta" if on_meta else "cpu"):
        model = Net()
    model = tencache_fx.offload(model, "cpu", weights=where)
    assert model.first.weight is model.second.weight
    assert find_offloaded(model.first.weight) is not None
    found = model.state_dict()
    assert found.keys() == Net().state_dict().keys()
    assert all(
        torch.equal(value, values()[name]) and value.dtype == values()[name].dtype for name, value in found.items()
    )


def test_what_the_package_writes_is_read(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    saved = {
        "a": torch.randn(3, 5),
        "b": torch.randn(4).to(torch.bfloat16),
        "c": torch.randn(2, 2).to(torch.float8_e5m2),
    }
    safetensors.save_file(saved, tmp_path / "x.safetensors", metadata={"format": "pt"})
    files = WeightFiles(tmp_path)
    for name, value in saved.items():
        found = torch.empty_like(value.t() if value.dim() == 2 else value).copy_(
            value.t() if value.dim() == 2 else value
        )
        found = torch.empty_like(value)
        files.slices[name].fill(found)
        assert torch.equal(found.view(torch.uint8), value.view(torch.uint8))
    files.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda saved: saved.pop("head.bias"), r"head\.bias of the model's 5 parameters.*not among the 8 tensors of "),
        (lambda saved: saved.pop("norm.running_mean"), r"norm\.running_mean of the model's"),
        (
            lambda saved: saved.update({"head.bias": torch.zeros(4)}),
            r"head\.bias is \(4,\) of float32 in .*\(3,\) of bf",
        ),
        (lambda saved: saved.update({"head.bias": torch.zeros(3)}), r"head\.bias is \(3,\) of float32 in .*convert"),
        (lambda saved: saved.clear(), r"first\.weight, norm\.weight, norm\.bias and 5 more of the model's"),
    ],
)
def test_missing_and_other_tensors_are_refused(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    saved = values()
    change(saved)
    path = save_weights(tmp_path / "x.safetensors", saved)
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(OptionError, match=message):
        tencache_fx.offload(model, weights=path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def _raw(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "it has 0 bytes"),
        (struct.pack("<Q", 1 << 60) + b"{}", "its header would have 1152921504606846976 bytes"),
        (struct.pack("<Q", 2) + b"[[", "its header cannot be read"),
        (_raw([1]), "its header cannot be read"),
        (
            _raw({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234"),
            "its place is 0 to 8 of 4 bytes",
        ),
        (_raw({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"), "a has 8 bytes"),
        (_raw({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 4]}}, b"1234"), "no whole safetensors file"),
        (_raw({"a": {"dtype": "F32"}}), "its header cannot be read"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, raw: bytes, message: str) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(raw)
    with pytest.raises(OptionError, match=rf"bad\.safetensors is no whole safetensors file.*{message}|{message}"):
        tencache_fx.offload(Net(), weights=path)


def test_bad_places_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be opened"):
        WeightFiles(tmp_path / "none.safetensors")
    with pytest.raises(OptionError, match="no safetensors files in"):
        WeightFiles(tmp_path)
    index = tmp_path / "a.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(OptionError, match="is no index of safetensors files"):
        WeightFiles(tmp_path)
    (tmp_path / "b.safetensors.index.json").write_text("{}")
    with pytest.raises(OptionError, match="has 2 index files"):
        WeightFiles(tmp_path)
    one = [save_weights(tmp_path / f"{k}.safetensors", {"a": torch.zeros(1)}) for k in range(2)]
    with pytest.raises(OptionError, match="a is in .*name one of them"):
        WeightFiles(one)


def test_other_uses_are_refused(tmp_path: Path) -> None:
    path = save_weights(tmp_path / "x.safetensors", values())
    with pytest.raises(OptionError, match="weights= reads whole parameters, and shard= spreads them"):
        tencache_fx.offload(Net(), shard=True, weights=path)
    model = tencache_fx.offload(Net())
    with pytest.raises(OptionError, match=r"first\.weight is offloaded already; give weights= the first time"):
        tencache_fx.offload(model, weights=path)
