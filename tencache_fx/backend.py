"""`torch.compile(model, backend="tencache")`: the entry point. `region/compilation.py` tells the way from here.

tencache()         torch.compile hands over one captured region, and nested ones are inlined in it
RegionSource       the region as it was handed over, with its options
Pieces             if it is to be split at equal layers: calls a region for each form of them
Variants           the function that torch calls: a region for each set of inputs that `offload` was given
Region             compiles it, and again if more device memory is held beside it than the plan was made for
compile_region()   joint graph -> forward and backward -> plan -> rewritten graphs -> code: a `CompiledRegion`
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from tencache_fx import compat
from tencache_fx.model_state import parameter_ops as _parameter_kernels  # noqa: F401  (registers the ops' kernels)
from tencache_fx.options import Options
from tencache_fx.passes.nested_regions import inline_nested_regions
from tencache_fx.region.compiled_region import Compiled
from tencache_fx.region.pieces import compile_region_or_pieces
from tencache_fx.region.registry import REGIONS
from tencache_fx.region.source import RegionSource
from tencache_fx.runtime import op_kernels as _kernels  # noqa: F401  (registers the ops' kernels)
from tencache_fx.runtime.engine_registry import RankStage, usage
from tencache_fx.tensors import main_device


@RankStage("the compilation of a region")
def tencache(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, object] | None = None,
    mode: str | None = None,
) -> Compiled:
    """Compile one region of a model so that it runs within its memory budgets: a `torch.compile` backend.

    Raises `OptionError` for options it cannot use, `BudgetError` if no plan fits, both before anything runs.
    """
    device = main_device((*example_inputs, *(node.meta.get("example_value") for node in gm.graph.nodes)))
    own = usage(device)
    resolved = Options.resolve(options, device=device, own_host_bytes=own.host_bytes, own_disk_bytes=own.disk_bytes)
    settings = compat.inductor_settings(mode, dict(resolved.inductor))
    inline_nested_regions(gm)
    source = RegionSource(
        index=REGIONS.next_index(),
        graph=gm,
        options=resolved,
        device=device,
        settings=settings,
        own=frozenset(options or ()),
    )
    return compile_region_or_pieces(source, example_inputs)


tencache.reset = compat.forget_callers  # type: ignore[attr-defined]  # torch.compiler.reset() calls it
