"""Everything that touches torch's own compiler entry points, and all that differs between torch 2.11 and 2.15."""

import contextlib
import functools
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._dynamo import convert_frame
from torch._dynamo.utils import calculate_time_spent, counters, get_metrics_context
from torch._functorch import config as functorch_config
from torch._inductor import config, list_mode_options
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes import post_grad
from torch._inductor.graph import GraphLowering
from torch._inductor.pattern_matcher import compute_mutation_region_ids
from torch._inductor.utils import BoxedBool
from torch.fx.graph import _BoxedCodeGen

from tencache_fx.errors import OptionError
from tencache_fx.kept_code import Foresee, KeptCode, loaded_codes
from tencache_fx.ops import arguments_of
from tencache_fx.option_values import nearest
from tencache_fx.stages import STAGES

log = logging.getLogger("tencache_fx")
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
"""The version of torch: (2, 14), say."""
Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
Lower = Callable[..., Any]

PLANNED: Mapping[str, Any] = MappingProxyType(
    {
        "reorder_for_peak_memory": False,  # it knows of no copies
        "reorder_for_locality": False,  # nor does this, which moves ops of an inference graph to their first reader
        "allow_buffer_reuse": False,  # the plan counts on the bytes of a dead buffer
        "triton.cudagraphs": False,  # copies are issued by the host, at each run anew
        "use_post_grad_passes": True,  # the order is pinned there
    }
)
"""The Inductor settings of every graph with a plan, whatever was asked for."""

COMPILER_ERRORS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError, OSError)
"""What compilers were seen to raise where they fail; torch's own errors are RuntimeErrors."""

_ALONE: dict[str, Any] = {"_sync_decision_cross_ranks": False}  # how often a graph is split is each rank's own affair

_OURS = ("custom_partitioner_fn", "post_grad_custom_post_pass")


def inductor_settings(mode: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Inductor settings behind `torch.compile(mode=...)`, and over them the option `inductor`.

    Raises `OptionError` for a mode or setting that torch does not know, a value of another type, and for the two hooks
    that planning needs for itself, which may also be set in Inductor's own config.
    """
    modes, known = list_mode_options(), config.get_config_copy()
    if mode is not None and mode not in modes:
        raise OptionError(f"mode={mode!r} is unknown;{nearest(mode, modes)} the modes are: {', '.join(modes)}.")
    for name, value in given.items():
        if name not in known and name != "force_disable_caches":  # torch's own list leaves this one out
            raise OptionError(
                f"inductor setting {name} is unknown;{nearest(name, known)} torch._inductor.list_options() returns all."
            )
        kind = config.get_type(name)  # type: ignore[attr-defined]
        if kind in (bool, int, float, str) and not isinstance(value, (int, float) if kind is float else kind):
            raise OptionError(f"inductor setting {name}={value!r} is a {type(value).__name__}; give a {kind.__name__}.")
    settings = {**(modes[mode] if mode else {}), **given}
    for name in _OURS:
        if settings.get(name, known[name]) is not None:
            raise OptionError(
                f"the Inductor hook {name} is taken by tencache, which writes the plan with it; set it to None, "
                "or compile this model with backend='inductor'."
            )
    return settings


def overruled(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return those of `settings`, as "name=value", that a graph with a plan is compiled without."""
    return tuple(
        f"{name}={settings[name]}" for name in sorted(PLANNED) if settings.get(name, PLANNED[name]) != PLANNED[name]
    )


class _Partitioner(CustomPartitionerFn):
    """Inductor's hook for a partitioner, and its `key`: what it does to a joint graph follows from that alone."""

    def __init__(self, partition: Partition, key: str | None) -> None:
        self._partition, self._key = partition, key

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        return self._partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> Any | None:
        """Return the key, for AOTAutograd's cache; without one nothing is cached."""
        return self._key

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what stands for it in a snapshot of the config that becomes a part of a cache's key."""
        return str, (str(self._key),)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Partitioner":
        return self  # config snapshots are copied; the region behind this must stay the one being compiled


def compile_inductor(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    patches: Mapping[str, Any],
    partition: Partition,
    lower: Lower,
    lazy_backward: bool,
    key: str | None = None,
    foresee: Foresee = bool,
) -> tuple[Callable[..., Any], list[KeptCode]]:
    """Compile through Inductor with `partition` as its partitioner and `lower` around each graph.

    The backward is lowered before this returns, unless `lazy_backward`: then, as torch does it, when it first runs.

    If there is a `key`, and AOTAutograd's cache has what was compiled with it, neither is called: the graphs' codes are
    returned as well, and `foresee` is called with the facts of each before it is loaded. `lower` is then to return a
    `KeptCode`, and the backward cannot be lazy.

    Inductor's graph cache is used as ever: the plan is in the graph, and so in its key. Graphs with a plan keep the
    planned order: pinned by `planned`, and without Inductor's own reordering for peak memory, which knows of no copies.
    Nor is a dead buffer kept until a later one of its size takes its place: the plan counts on its bytes meanwhile.
    """
    generate = STAGES.timed("Inductor", compile_fx_inner)
    partition, lower = STAGES.timed("planning", partition), _timed_lower(lower)

    def inner_compile(graph: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        def compile_graph(gm: fx.GraphModule, inputs: Sequence[Any], *, planned: CustomGraphPass | None) -> Any:
            ours: dict[str, Any] = {"custom_partitioner_fn": None}  # it has no place in the key of the graph cache
            if planned is None:
                with config.patch(ours):
                    return generate(gm, inputs, **kwargs)
            ours |= {**PLANNED, "post_grad_custom_post_pass": planned}
            if GraphLowering.decide_layout_opt(gm, is_inference=bool(kwargs.get("is_inference"))):
                ours["layout_optimization"] = _is_laid_out(gm.graph)
            compute_mutation_region_ids(gm.graph)  # torch's count knows of no release; no pattern may reach across one
            with config.patch(ours):
                return generate(gm, inputs, **{**kwargs, "cudagraphs": BoxedBool(False)})

        phase = "inference" if kwargs.get("is_inference") else "backward" if kwargs.get("is_backward") else "forward"
        with functorch_config.patch(bundled_autograd_cache=False):  # else Inductor's own cache would not be used
            return lower(graph, example_inputs, compile_graph, phase=phase)

    if functorch_config.bundled_autograd_cache or torch._dynamo.config.caching_precompile:
        key = None  # whoever loads what is precompiled does not come by here: nothing would watch the region
    settings = {**patches, "custom_partitioner_fn": _Partitioner(partition, key)}
    caching: dict[str, Any] = {"enable_autograd_cache": False} if key is None else {"bundled_autograd_cache": True}
    with (
        STAGES.stage("tracing"),
        functorch_config.patch(force_non_lazy_backward_lowering=not lazy_backward, **caching, **_ALONE),
        loaded_codes(foresee) as codes,
    ):
        compiled: Any = compile_fx(gm, inputs, inner_compile=inner_compile, config_patches=settings)
    return compiled, codes


def _is_laid_out(graph: fx.Graph) -> bool:
    """Return whether convolutions have channels last already, as Inductor would have it; none or a few are enough.

    Where they are all contiguous, it would lay values out in another way than the graph says, and a copy of them would
    leave instead of them. Warns of what that may cost.
    """
    aten = torch.ops.aten
    made = [node.meta["val"] for node in graph.find_nodes(op="call_function", target=aten.convolution.default)]
    made += [
        gradient.meta["val"]
        for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
        for gradient in (arguments_of(node)["grad_output"], arguments_of(node)["input"])
    ]
    flat = [value for value in made if value.dim() == 4]
    in_order = all(value.is_contiguous() for value in flat)
    if not in_order or all(value.is_contiguous(memory_format=torch.channels_last) for value in flat):
        return True
    log.warning(
        "a graph with a plan keeps its convolutions' memory format, where Inductor alone would have channels last; "
        "model.to(memory_format=torch.channels_last), and the same for its input, may be faster."
    )
    return False


def may_unfuse(addend: fx.Node, total: fx.Node) -> bool:
    """Return whether Inductor may add `addend` to a product in a loop of its own: from 2.15 on, only if it is a bias.

    Source: `_inductor/fx_passes/post_grad.py: should_prefer_unfused_addmm`.
    """
    is_bias = getattr(post_grad, "_is_bias_like_addmm_input", None)
    return is_bias is None or bool(is_bias(addend, total))


def may_take_out(node: fx.Node) -> bool:
    """Return whether Inductor may take a node out of a graph, as one that changes nothing, such as a clone.

    Source: `_inductor/fx_passes/post_grad.py: remove_noop_ops`.
    """
    return node.target in post_grad.noop_registry


def write_at_once(node: fx.Node) -> None:
    """Have Inductor write a value to memory where it is computed, whatever it would think of computing it anew.

    Source: `_inductor/graph.py: run_node`, which does so for one tensor: where a node makes several, for each of them.
    """
    made = (user for user in node.users if user.target is operator.getitem)
    for each in (node, *made):
        each.meta["inductor_realize_to_strides"] = True


def compile_eager(
    gm: fx.GraphModule, inputs: Sequence[Any], *, partition: Partition, lower: Lower
) -> Callable[..., Any]:
    """Compile without Inductor: AOTAutograd's graphs, decomposed as for Inductor, run node by node.

    The same as torch's "aot_eager_decomp_partition" (`_dynamo/backends/debugging.py`), with `partition` and `lower`,
    but for random numbers: these are drawn as torch draws them without a compiler, and so are the same for a seed.
    """
    from torch._dynamo.backends.common import aot_autograd

    def run(gm: fx.GraphModule, inputs: Sequence[Any], *, planned: object) -> Any:
        return _run_boxed(gm)

    lower = _timed_lower(lower)
    with STAGES.stage("tracing"), functorch_config.patch(unlift_effect_tokens=True, **_ALONE):
        return aot_autograd(
            fw_compiler=functools.partial(lower, compile_graph=run, phase="forward"),
            bw_compiler=functools.partial(lower, compile_graph=run, phase="backward"),
            inference_compiler=functools.partial(lower, compile_graph=run, phase="inference"),
            partition_fn=STAGES.timed("planning", partition),
            decompositions=_drawing_whole,
            keep_inference_input_mutations=True,  # as under Inductor: the plan sees which inputs are written to
        )(gm, inputs)


def _timed_lower(lower: Lower) -> Lower:
    def timed(*args: Any, phase: str, **kwargs: Any) -> Any:
        with STAGES.stage("planning" if phase == "inference" else "rewriting"):  # what has no backward is not split
            return lower(*args, phase=phase, **kwargs)

    return timed


def _drawing_whole() -> dict[Any, Callable[..., Any]]:
    """Return Inductor's decompositions without those of ops that draw random numbers: decomposed, they draw others."""
    seeded = torch.Tag.nondeterministic_seeded
    return {op: how for op, how in select_decomp_table().items() if seeded not in getattr(op, "tags", ())}


def _run_boxed(gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Return a function that runs `gm` and drops each value after its last use, its arguments included."""
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    forward = gm.forward

    def run(args: list[Any]) -> Any:
        return forward(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def any_number_of_compilations() -> contextlib.AbstractContextManager[None]:
    """Let Dynamo compile the same code as often as it is asked to: beyond some limits it runs it uncompiled."""
    most = 1 << 30
    return torch._dynamo.config.patch(recompile_limit=most, accumulated_recompile_limit=most)  # type: ignore[no-any-return]


def without_collecting() -> contextlib.AbstractContextManager[None]:
    """Have Dynamo not look for garbage whenever it has compiled something."""
    return torch._dynamo.config.patch(run_gc_after_compile=False)  # type: ignore[no-any-return]


def runs_on_fakes(settings: Mapping[str, Any]) -> bool:
    """Return whether Inductor's code, generated with `settings`, sees to tensors without bytes; else it reads them."""
    name = "wrap_inductor_compiled_regions"
    return bool(settings.get(name, getattr(config, name, False)))


def ends_at_graph_break(gm: fx.GraphModule) -> bool:
    """Return whether Dynamo's graph ends where it could not go on, with code behind (`_dynamo/output_graph.py`)."""
    return bool(getattr(getattr(gm, "compile_subgraph_reason", None), "graph_break", False))


def forget_callers() -> None:
    """Drop the code of those that called compilations of this thread: torch keeps it for good, with regions it runs."""
    get_metrics_context()._edits.clear()


def compile_lock() -> contextlib.AbstractContextManager[object]:
    """Return the lock under which Dynamo compiles: tracing has state that all threads share (`fx/traceback.py`)."""
    return convert_frame.compile_lock


def in_backward() -> bool:
    """Return whether this thread is in a backward, as is checkpointed code that runs again (`utils/checkpoint.py`)."""
    return bool(torch._C._current_graph_task_id() != -1)


def saves_by_hooks() -> bool:
    """Return whether hooks see what this thread's operations save, as those of checkpointing do, in both runs."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def frames_compiled() -> int:
    """Return how many frames Dynamo was given to compile so far, for whatever backend."""
    return int(counters["frames"]["total"])


def graph_cache_uses() -> tuple[int, int]:
    """Return how many graphs Inductor's cache had, and how many it had not, since Dynamo was reset."""
    found = counters["inductor"]
    return int(found["fxgraph_cache_hit"]), int(found["fxgraph_cache_miss"] + found["fxgraph_cache_bypass"])


def region_cache_uses() -> tuple[int, int]:
    """Return how many graphs AOTAutograd's cache had whole, and how many it had not, since Dynamo was reset."""
    found = counters["aot_autograd"]
    return int(found["autograd_cache_hit"]), int(found["autograd_cache_miss"] + found["autograd_cache_bypass"])


def dynamo_ns() -> int:
    """Return how long Dynamo took to capture what it compiled since it was reset, without its backends."""
    spent = calculate_time_spent()
    return max(0, round(1e9 * (spent.get("entire_frame_compile", 0) - spent.get("backend_compile", 0))))


def source_code(compiled: Any) -> str | None:
    """Return the Python that Inductor generated for a graph; None for a graph that runs without Inductor."""
    return getattr(compiled, "source_code", None)


TELLS_READERS = hasattr(torch.UntypedStorage, "_swap_data_ptr_") and hasattr(
    torch._C, "_storage_throw_on_immutable_data_ptr"
)
"""Whether readers of a storage without bytes can be told so, and it be given bytes again: from torch 2.14 on."""


def take_bytes(storage: torch.UntypedStorage, message: str) -> None:
    """Free a storage's bytes; whoever reads it, or a view of it, then gets a RuntimeError with `message`.

    Before torch 2.14 that could not be taken back. The storage has the size 0 instead: torch makes no views of it
    ("setStorage: ... out of bounds"), and some kernels read where no bytes are, which may end the process.
    """
    if not TELLS_READERS:
        storage.resize_(0)
    elif storage.nbytes():
        nothing = torch._C._construct_storage_from_data_pointer(0, storage.device, storage.nbytes())
        storage._swap_data_ptr_(nothing)  # type: ignore[attr-defined]
        torch._C._set_storage_data_ptr_access_error_msg(storage._cdata, message)


def give_bytes(storage: torch.UntypedStorage, nbytes: int) -> None:
    """Allocate the bytes of a storage that has none; they may be read then."""
    if not TELLS_READERS:
        storage.resize_(nbytes)
    elif nbytes:
        storage._swap_data_ptr_(torch.UntypedStorage(nbytes, device=storage.device))  # type: ignore[attr-defined]


def has_bytes(storage: torch.UntypedStorage) -> bool:
    """Return whether there are bytes behind a storage: not if it is empty, or `take_bytes` has freed them."""
    if not storage.nbytes():
        return False
    return not (TELLS_READERS and torch._C._storage_throw_on_immutable_data_ptr(storage._cdata))


def run_as_is(function: Callable[..., Any], *, with_callees: bool = True) -> Callable[..., Any]:
    """Return the function; Dynamo compiles it only as a part of something, and so what it calls, if `with_callees`.

    As a frame of its own it would be compiled as well, and `torch.compiler.is_dynamo_compiling()` be true in it.
    """
    callees = _FrameAction.SKIP if with_callees else _FrameAction.DEFAULT
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, callees))
    return function
