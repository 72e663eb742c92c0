"""Whatever torch.compile trains is trained in a tight budget, with the same numbers and no graph break more."""

import pytest
import torch
from families import FAMILIES, Family, family
from matrix import EAGER, INDUCTOR, Row, make_row, peak_of, train_offloaded

from tencache_fx.planning.plan import TransferKind

NO_REGION = ("lstm-untraced",)  # torch leaves recurrent modules alone by default: nothing is compiled

# Constants in the graph, attention over patches, convolutions.
QUICK = ("falcon", "vit-timm", "convnext")


def needs(each: Family) -> Family:
    """Return `each`; the test is skipped where its library is not installed."""
    pytest.importorskip(each.library)
    return each


def check(row: Row, *, promise: float = 0.75, noise: float = 0.02) -> None:
    """Check a row; of what the plan promises to save, `promise` must be, but for `noise` in what is held without."""
    assert not row.differences
    assert row.ours.graph_breaks == row.theirs.graph_breaks
    assert row.ours.graphs == row.theirs.graphs
    assert len(row.ours.regions) == row.theirs.graphs, "each graph has a plan"
    assert bool(row.ours.regions) == (row.family.name not in NO_REGION)
    if not row.ours.regions:
        return
    assert row.transfers + row.recomputed > 0 or row.asked
    assert max(record.plan.forecast.peak_bytes for record in row.ours.regions) <= row.budget_bytes
    # As much less is held as the plan says: what kernels take for themselves is there with and without it.
    promised = max(peak_of(record.problem) for record in row.free.regions) - row.budget_bytes
    assert row.theirs.peak_bytes - row.ours.peak_bytes >= promise * promised - noise * row.theirs.peak_bytes


@pytest.mark.parametrize(
    "name",
    [pytest.param(each.name, marks=() if each.name in QUICK else pytest.mark.slow) for each in FAMILIES],
)
def test_training_is_bitwise_equal_on_the_same_graphs(name: str) -> None:
    check(make_row(needs(family(name)), EAGER))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [each.name for each in FAMILIES])
def test_training_on_a_gpu_is_equal_within_rounding(name: str) -> None:
    check(make_row(needs(family(name)), EAGER, device=torch.device("cuda")), promise=0.67, noise=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "t5", "swin"])
def test_training_with_inductor_is_equal_within_rounding(name: str) -> None:
    # Not those of whose fused code nothing may be offloaded, or which holds more than the budget leaves for it.
    row = make_row(needs(family(name)), INDUCTOR, share=0.5)
    assert not row.differences
    assert row.ours.graph_breaks == row.theirs.graph_breaks
    assert row.transfers + row.recomputed > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "budget"),
    [
        ("gpt2", "4.2MB"),
        ("llama-wide", "2.1MB"),
        ("mixtral", "3.8MB"),
        ("falcon", "2.4MB"),
        ("bert-wide", "2.5MB"),
        ("t5-wide", "7.1MB"),
        ("vit-wide", "1.4MB"),
    ],
)
def test_offloaded_parameters(name: str, budget: str) -> None:
    """The same losses with parameters, gradients and AdamW's state in host memory as with all of it on the device."""
    each = needs(family(name))
    (plain, _), (ours, regions) = train_offloaded(each, None), train_offloaded(each, budget)
    assert any(transfer.kind is not TransferKind.SWAP for record in regions for transfer in record.plan.transfers)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    assert ours[-1] < ours[0]
