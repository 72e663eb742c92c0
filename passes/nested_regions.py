"""Inlines what `torch.compiler.nested_compile_region` marks, where it is called: plans reach into it then.

Dynamo makes a graph of its own of a marked function, and a call of each use. AOTAutograd splits such a graph by itself,
as if nothing else were on the device, and gives the results of all its calls the same fakes
(torch: `_functorch/_aot_autograd/graph_compile.py: run_joint_graph_passes_on_hops`). By these, what several calls save
is one storage: lives are wrong. Inlined, calls are as they would be without the mark. Torch has the same for other
compilers (2.14: `_higher_order_ops/passes/inline_invoke_subgraph.py`).
"""

import itertools
import logging
import operator
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops import invoke_subgraph

from tencache_fx.passes.graphs import output_args, placeholders

log = logging.getLogger("tencache_fx")


def inline_nested_regions(gm: fx.GraphModule) -> None:
    """Inline, in place, all calls of nested regions in a Dynamo graph, and in those of its graphs that ops call.

        before   call = invoke_subgraph(body, "body", x, w); part = getitem(call, 0); sum(part)
        after    mm = matmul(x, w); sum(mm)

    Warns of options that such a region is compiled with by itself. O(nodes, inlined).
    """
    for body in gm.children():
        if isinstance(body, fx.GraphModule):
            inline_nested_regions(body)
    calls = gm.graph.find_nodes(op="call_function", target=invoke_subgraph)
    if not calls:
        return
    bodies: dict[Any, Any] = {call.args[0]: gm.get_submodule(str(call.args[0].target)) for call in calls}
    if any(body.meta.get("nested_region_config") is not None for body in bodies.values()):
        log.warning("nested compile regions are compiled with what is around them: their own options are not used.")
    for call in calls:
        _inline(gm, call, bodies[call.args[0]])
    for name in dict.fromkeys(str(given.target) for given in bodies):
        for given in gm.graph.find_nodes(op="get_attr", target=name):
            if not given.users:
                gm.graph.erase_node(given)
        if not gm.graph.find_nodes(op="get_attr", target=name):
            gm.delete_submodule(name)
    gm.graph.lint()
    gm.recompile()


def _inline(gm: fx.GraphModule, call: fx.Node, body: Any) -> None:
    values: dict[fx.Node, Any] = dict(zip(placeholders(body.graph), call.args[2:], strict=True))
    made: set[fx.Node] = set()
    with gm.graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            if (node.op, node.target) == ("call_method", "item") and not _is_tensor(values[node.args[0]]):
                values[node] = values[node.args[0]]  # Dynamo hands a float over as a tensor, but not to all calls
                continue
            values[node] = copied = gm.graph.node_copy(node, values.__getitem__)
            # Calls have the symbols of a number that they read from data in common, and each reads its own.
            copied.meta.pop("unbacked_bindings", None)
            made.add(copied)
            if node.op in ("get_attr", "call_module"):
                copied.target = _adopt(gm, operator.attrgetter(str(node.target))(body), str(node.target))
    returned: Any = output_args(body.graph)
    results = fx.map_arg(returned, values.__getitem__)
    for part in tuple(call.users):
        assert part.target is operator.getitem, part
        if not part.users:  # torch 2.11 asks for results that there are not
            gm.graph.erase_node(part)
            continue
        result = results[part.args[1]]
        if result in made:  # calls of one graph have the same fakes within it, but not of what they return
            result.meta["example_value"] = part.meta["example_value"]
        _replace(part, result)
        gm.graph.erase_node(part)
    gm.graph.erase_node(call)


def _is_tensor(value: object) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("example_value"), torch.Tensor)


def _replace(node: fx.Node, value: Any) -> None:
    """Let all that read `node` have `value` instead: another node, or a number."""
    for user in tuple(node.users):
        args, kwargs = fx.map_arg((user.args, user.kwargs), lambda each: value if each is node else each)
        user.args, user.kwargs = args, kwargs


def _adopt(gm: fx.GraphModule, attribute: object, target: str) -> str:
    """Return the name under which `gm` has what an inlined graph reads of its own module: a graph, or a constant."""
    name = target = target.replace(".", "_")
    numbers = itertools.count(1)
    while getattr(gm, name, attribute) is not attribute:
        name = f"{target}_{next(numbers)}"
    setattr(gm, name, attribute)
    return name
