"""Sparse gradients: tensors without a storage of their own, which no plan moves."""

import pytest
import torch
from harness import EAGER, INDUCTOR, Options, faulty_engine
from torch import Tensor, nn

ROWS, WIDTH = 256, 64


class Looked(nn.Module):
    """A table that only the rows looked up have a gradient for, and layers whose activations can leave meanwhile."""

    def __init__(self, table: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = table(1000, WIDTH, sparse=True)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, *indices: Tensor) -> Tensor:
        x = self.table(*indices)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


@pytest.mark.parametrize("options", [EAGER, INDUCTOR], ids=["eager", "inductor"])
@pytest.mark.parametrize(("table", "dynamic"), [(nn.Embedding, False), (nn.EmbeddingBag, True)])
@pytest.mark.parametrize("budget", [None, 800_000])
def test_a_sparse_gradient_is_that_of_torch(
    options: Options,
    table: type[nn.Module],
    budget: int | None,
    dynamic: bool,  # noqa: FBT001
) -> None:
    truth, mine = Looked(table), Looked(table)
    with faulty_engine() as engine:
        asked = {**options, "device_budget": budget, "recompute": "none"}
        run = torch.compile(mine, backend="tencache", dynamic=dynamic, options=asked)
        for step in range(2):
            indices = (torch.randint(1000, (ROWS,), generator=torch.Generator().manual_seed(step)),)
            indices += (torch.arange(ROWS),) if table is nn.EmbeddingBag else ()
            truth(*indices).backward()
            run(*indices).backward()
        assert (engine.stats.take()["offloads"] > 0) is (budget is not None)
    assert mine.table.weight.grad.is_sparse
    for got, want in zip(mine.parameters(), truth.parameters(), strict=True):
        torch.testing.assert_close(got.grad.to_dense(), want.grad.to_dense(), rtol=1e-4, atol=1e-7)
