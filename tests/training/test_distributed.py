"""Two ranks over gloo: what went wrong without a word, or crashed, is refused in one sentence; the rest is right."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # makes the backend "fake" known
from harness import EAGER, compiled
from started_ranks import LIMIT_S, ROOT, SUPPORT, Found, run_ranks
from torch import Tensor, nn
from torch._functorch import partitioners
from torch.autograd.graph import get_gradient_edge
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import tencache_fx
from tencache_fx.errors import OptionError, UsageError
from tencache_fx.hardware.capacity import ranks_here
from tencache_fx.optim import AdamW

CLOSE = 4e-4  # what two steps of AdamW make of sums in another order
NEAR = 1e-4  # and four steps at a tenth of the rate


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    return run_ranks(tmp_path_factory.mktemp("ranks"), "quick")


@pytest.fixture(scope="module")
def reducers(ranks: list[dict[str, Found]]) -> list[Found]:
    return [found["reducers"] for found in ranks]


@pytest.fixture(scope="module")
def dtensors(ranks: list[dict[str, Found]]) -> list[Found]:
    return [found["dtensors"] for found in ranks]


@pytest.fixture(scope="module")
def shards(ranks: list[dict[str, Found]]) -> list[Found]:
    return [found["shards"] for found in ranks]


def test_a_reducer_and_updates_during_backward_are_refused_in_any_order(reducers):
    for found in reducers:
        refusals = {name: text for name, text in found["early"].items() if "compiled" in name}
        assert len(refusals) == 8
        for text in refusals.values():
            assert re.match(r"UsageError: (module\.)?0\.0\.weight would be updated during backward, before Distr", text)
        assert [found["early"][name] for name in found["early"] if name.endswith("changed by")] == [0.0] * 4


def test_what_a_reducer_ignores_is_updated_during_backward(reducers):
    assert all(found["ignored"]["changed by"] > 0 for found in reducers)


def test_behind_a_reducer_step_is_right(reducers):
    for found in reducers:
        assert all(0 <= found["late"][name] < CLOSE for name in ("wrapped first", "wrapped inside summon")), found


def test_a_reducer_around_what_is_offloaded_is_refused(reducers):
    for found in reducers:
        for name in ("itself", "what contains it", "a later one"):
            assert found["wrap"][name].startswith("UsageError: 0.0.weight is offloaded to host memory, where Distr")
        assert found["wrap"]["a part"].startswith("UsageError: 1.0.weight is offloaded")
        assert found["wrap"]["changed by"] == 0.0 < found["wrap"]["then trained by"]


def test_what_is_offloaded_is_not_sharded(dtensors):
    for found in (each["offloaded"] for each in dtensors):
        refusals = {name: text for name, text in found.items() if ", " in name}
        assert len(refusals) == 19
        for name, text in refusals.items():
            way, _, module = name.partition(", ")
            layer = "1.0" if module in ("a part", "what takes over") or way == "by rows" else "0.0"
            who = "fully_shard, FullyS" if way in ("fully_shard", "FullyShardedDataParallel") else "parallelize_module"
            start = f"UsageError: {layer}.weight is offloaded to host memory, where {who}"
            assert text.startswith(start), f"{name}: {text}"
        assert found["left as they are"] is True
        assert found["changed by"] == 0.0 < found["then trained by"]


def test_what_is_sharded_is_not_offloaded_and_no_optimizer_of_ours(dtensors):
    for found in (each["sharded"] for each in dtensors):
        for name, first in (
            ("fully_shard", "0.0.weight"),
            ("tensor parallel", "0.0.weight"),
            ("DTensor", "1.0.weight"),
        ):
            assert found[name].startswith(f"OptionError: {first} is a DTensor, as fully_shard"), found[name]
            assert found[f"optimizer of {name}"].startswith("OptionError: a parameter of size (192, 192) is a DTensor")
            assert found[f"{name} is as it was"] is True
        for name in ("FullyShardedDataParallel", "its module", "FullyShardedDataParallel with views"):
            assert re.match(r"OptionError: \S+ is this rank's part of what FullyShardedDataParallel has", found[name])
        assert found["replicate"].startswith("OptionError: replicate has been applied to the model, and does not find")
        assert found["homes"] == 0


@pytest.mark.parametrize("budget", ["budget", "no budget"])
def test_no_norm_is_taken_of_a_shard(shards, budget):
    for found in (each[budget] for each in shards):
        assert found.pop("gradients in host memory") == 2
        assert len(found) == 6
        for name, text in found.items():
            assert text.startswith("UsageError: a gradient of size (96, 192) is this rank's part"), f"{name}: {text}"


def test_shards_train_without_clipping_and_with_a_norm_taken_by_hand(shards):
    for found in shards:
        assert all(0 <= found["train"][name] < CLOSE for name in ("not clipped", "clipped by hand")), found["train"]


def test_blocks_train_in_a_tight_budget_as_one_process_would(ranks):
    for found in (each["training"] for each in ranks):
        assert len(found) == 4
        assert_trained(found)
        assert found["reduced by hand"]["in host memory"]


@pytest.mark.slow
def test_blocks_train_in_every_way_as_one_process_would(tmp_path):
    for found in (each["training"] for each in run_ranks(tmp_path, "slow")):
        assert len(found) == 41
        assert_trained(found)


def assert_trained(found: Found) -> None:
    """Fail for what came out otherwise than in one process, or was no trial: nothing had to leave the device."""
    failed = {name: each for name, each in found.items() if not 0 <= each["off by"] < NEAR or each["transfers"] == 0}
    assert not failed


@pytest.fixture
def early() -> Iterator[tuple[nn.Linear, AdamW]]:
    """A layer that is updated during backward."""
    tencache_fx.configure(host_budget="64MB", calibrate=False)
    model = tencache_fx.offload(nn.Sequential(nn.Linear(160, 160)), "cpu")
    yield model, AdamW(model.parameters(), lr=1e-2, step_in_backward=True)
    tencache_fx.configure(reset=True)
    tencache_fx.close()
    torch.compiler.reset()


def look(*_: object) -> None:
    """A hook of somebody else."""


@pytest.mark.parametrize("way", ["compiled", "uncompiled"])
def test_a_hook_that_would_find_no_gradient_is_refused_before_anything_runs(early, way):
    model, _ = early
    model[0].weight.register_post_accumulate_grad_hook(look)
    run = compiled(model, EAGER) if way == "compiled" else model
    with pytest.raises(UsageError, match=r"0.weight is updated during backward, and the hook look on it"):
        run(torch.ones(2, 160))


@pytest.mark.parametrize("way", ["compiled", "uncompiled"])
@pytest.mark.parametrize("place", ["parameter", "graph"])
def test_such_a_hook_is_refused_in_the_backward_too(early, way, place):
    model, _ = early
    run = compiled(model, EAGER | {"device_budget": 1 << 20}) if way == "compiled" else model
    run(torch.ones(2, 160)).square().mean().backward()
    assert model[0].weight.grad is None, "updated during backward, and from the next one on where the gradient leaves"
    with tencache_fx.summon(model, write=False):
        before = model[0].weight.detach().clone()
    loss = run(torch.ones(2, 160)).square().mean()
    node = get_gradient_edge(model[0].weight).node
    hooked = model[0].weight.register_post_accumulate_grad_hook if place == "parameter" else node.register_hook
    seen: list[Tensor] = []
    handle = hooked(lambda *_: seen.append(model[0].weight.grad))
    match = "the hook .*<lambda> on it" if place == "parameter" else "a hook on its AccumulateGrad node"
    with pytest.raises(UsageError, match=f"0.weight is updated during backward, and {match}"):
        loss.backward()
    handle.remove()
    with tencache_fx.summon(model, write=False):
        assert torch.equal(model[0].weight, before)
    model.zero_grad()
    run(torch.ones(2, 160)).square().mean().backward()
    with tencache_fx.summon(model, write=False):
        assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("act", [get_model_state_dict, lambda model: set_model_state_dict(model, model.state_dict())])
def test_who_reads_a_model_as_sharding_does_is_told_what_to_save(early, act):
    model, _ = early
    with pytest.raises(UsageError, match=r"0.weight is offloaded .* take model.state_dict\(\) and optimizer"):
        act(model)


def test_ranks_of_a_host_share_what_auto_gives(monkeypatch, tmp_path):
    host, disk = 100 << 30, 1000 << 30
    space = {"total_bytes": disk, "available_bytes": host}
    monkeypatch.setattr("tencache_fx.options.host_space", lambda: tencache_fx.hardware.capacity.Space(**space))
    monkeypatch.setattr("tencache_fx.options.disk_space", lambda _: tencache_fx.hardware.capacity.Space(**space))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)

    def near(most: int) -> int:
        return most - most // 32  # so that the next start may have a little less

    def budgets(own: int = 0) -> tuple[int, int]:
        found = tencache_fx.options.Options.resolve(
            {"spill_dir": tmp_path}, device=torch.device("cpu"), own_host_bytes=own, own_disk_bytes=own
        )
        return found.host_budget, found.spill_budget

    assert budgets() == (near(host * 80 // 100), near(host * 90 // 100))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    share = host // 4
    assert budgets() == (near(share * 80 // 100), near(share * 90 // 100))
    space["available_bytes"] = host - 4 * (1 << 30)  # each of the four has one GiB by now
    assert budgets(1 << 30) == (near(share * 80 // 100), near(share * 90 // 100)), "what a rank has got is its own"


def test_ranks_of_a_group_share_a_host_if_nobody_says_otherwise(ranks, monkeypatch):
    assert [found["budgets"]["shares"]["ranks here"] for found in ranks] == [2, 2]
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert ranks_here() == 1
    dist.init_process_group("fake", store=dist.HashStore(), rank=3, world_size=64)
    try:
        assert ranks_here() == 1, "the others of a fake group are nowhere"
        monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
        assert ranks_here() == 64
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
        assert ranks_here() == 8
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_rank_splits_graphs_without_asking_others(monkeypatch, compiler):
    """They would wait for each other: how often a graph is split depends on a rank's own budget."""
    asked = []
    monkeypatch.setattr(partitioners, "_sync_decision_cross_ranks", lambda graph, saved: asked.append(graph) or saved)
    run = compiled(lambda x: x.sin().exp(), EAGER | {"device_budget": 1 << 20, "compiler": compiler})
    with torch._functorch.config.patch(_sync_decision_cross_ranks=True):
        run(torch.ones(64, 64, requires_grad=True)).sum().backward()
    torch.compiler.reset()
    assert not asked


@pytest.mark.slow
def test_a_rank_that_raises_ends_all(tmp_path):
    """Its process ends without waiting for anybody, and so do the others', long before the group's timeout."""
    (tmp_path / "one.py").write_text(
        "import os, rank_training\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "budget = ('100MB', '3MB')[dist.get_rank()]\n"
        "rank_training.replicated('wrap blocks', options={'scope': os.environ['SCOPE'], 'device_budget': budget})\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "one.py"]
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(SUPPORT), *sys.path])}
    for scope in ("region", "step"):
        given = os.environ | settings | {"SCOPE": scope}
        ended = subprocess.run(command, env=given, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
        assert ended.returncode != 0
        assert "BudgetError: " in ended.stderr, ended.stderr[-3000:]


@pytest.mark.parametrize("text", ["0", "two", "-1", ""])
def test_a_number_of_ranks_that_is_none_is_refused(monkeypatch, text):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    with pytest.raises(OptionError, match=f"LOCAL_WORLD_SIZE='{text}' is no number of ranks"):
        ranks_here()
