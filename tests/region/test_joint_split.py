"""A joint graph is split several times: each time as if it were the first."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from harness import train
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.utils.checkpoint import checkpoint
from zoo import CASES, WIDTH, Case, vectors

from tencache_fx.passes.op_kinds import is_pointwise
from tencache_fx.region.graph_copy import copy_joint
from tencache_fx.region.joint_split import Joint, split_joint


class Checkpointed(nn.Module):
    """Two blocks with dropout that the backward computes again, next to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.5)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[:2]:
            x = checkpoint(block, x, use_reentrant=False)
        return self.blocks[2](x).square().mean()


class Overwriting(nn.Module):
    """Reads an input in the backward that the forward writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x) * self.seen.exp()
        self.seen.add_(1)
        return torch.tanh(out).sum()


MORE = (
    # lstm-default is what torch leaves to eager; a graph is the same however many backwards come before an update.
    *(case for case in CASES if case.name != "lstm-default" and case.accumulate == 1),
    Case(name="checkpointed", build=Checkpointed, batch=vectors),
    Case(name="overwriting", build=Overwriting, batch=vectors),
)


def listing(halves: Sequence[fx.GraphModule]) -> list[tuple[str, ...]]:
    """Return both graphs, node by node, with what was decided of each."""
    return [
        tuple(str(each) for each in (n.name, n.op, n.target, n.args, n.kwargs, n.meta.get("recompute")))
        for half in halves
        for n in half.graph.nodes
    ]


@pytest.mark.parametrize("case", MORE, ids=lambda case: case.name)
def test_a_joint_graph_is_split_again_as_if_for_the_first_time(case: Case) -> None:
    found: list[bool] = []

    def partition(joint: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        """Split what was traced once by each way to choose what is computed again."""
        for_none = copy_joint(joint)
        split_twice(for_none, inputs, "none", **kwargs)
        return split_twice(joint, inputs, "auto", **kwargs)

    def split_twice(joint: fx.GraphModule, inputs: Sequence[Any], recompute: str, **kwargs: Any) -> Any:
        def split(graph: fx.GraphModule, again: frozenset[str] = frozenset()) -> list[tuple[str, ...]]:
            return listing(split_joint(Joint.prepare(graph, inputs, recompute=recompute, **kwargs), again=again))

        untouched = copy_joint(joint), copy_joint(joint)
        task = Joint.prepare(joint, inputs, recompute=recompute, **kwargs)
        first = split_joint(task)
        for node in (node for half in first for node in half.graph.nodes):
            node.meta["mark"] = True  # as a plan for these graphs leaves its own
        nodes = first[0].graph.nodes
        again = frozenset(n.name for n in nodes if is_pointwise(n) and "recompute" not in n.meta and _is_returned(n))
        more = listing(split_joint(task, again=again))
        found.append(more != listing(first))
        assert more == split(untouched[0], again)
        last = split_joint(task)
        assert not any("mark" in node.meta for half in last for node in half.graph.nodes)
        assert listing(last) == listing(first) == split(untouched[1])
        return last

    def run(gm: fx.GraphModule, _inputs: Sequence[Any]) -> Any:
        def call(args: list[Any]) -> Any:
            return fx.Interpreter(gm).run(*args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    backend = aot_autograd(fw_compiler=run, bw_compiler=run, partition_fn=partition, decompositions=select_decomp_table)
    torch.compiler.reset()
    train(case, lambda model: torch.compile(model, backend=backend), 1, optimizer=False)
    assert found
    if case.name == "checkpointed":
        assert all(found)  # else nothing would have been told apart


def _is_returned(node: fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)
