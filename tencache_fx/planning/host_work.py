"""How long the thread that runs a training step works on a GPU's behalf: no step is shorter. No torch here.

It issues each kernel and each copy, and starts each parameter's update. On a large model that hides behind the device's
work; on a small one the device waits for it. It does not grow with the micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tencache_fx.planning.loads import Load
from tencache_fx.planning.parameter_schedule import gradients_to_host
from tencache_fx.planning.plan import Plan, TransferKind
from tencache_fx.planning.problem import Problem

HOST_THREAD = "host thread"
"""What its load is called."""
_OPS = {TransferKind.SWAP: 4, TransferKind.LOAD: 2, TransferKind.STORE: 3}
"""The runtime ops of a transfer: offload, release, prefetch, wait; fetch, wait; offload, release, take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """How long a thread works to launch a kernel, for a runtime op of a transfer, and for a parameter's update.

    That is made on the device, or begins there and is made in host memory.
    """

    launch_ns: int
    transfer_op_ns: int
    device_update_ns: int
    host_update_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWork:
    """What a thread works in a step of a model with so many `trained` parameters; nothing without `costs`."""

    costs: HostCosts | None
    trained: int

    def load(self, parts: Sequence[tuple[int, Problem, Plan | None]]) -> Load:
        """Return its load in a step that has so many calls of each of these regions.

        Where there is no plan, without transfers, and with all updates on the device. An op without a duration, such as
        a view, launches no kernel.
        """
        if (costs := self.costs) is None:
            return Load(name=HOST_THREAD, busy_ns=0, nbytes=0)
        busy_ns = updated_there = 0
        for calls, problem, plan in parts:
            launches = sum(op.duration_ns > 0 for op in problem.ops)
            ops = 0 if plan is None else sum(_OPS[each.kind] for each in plan.transfers)
            graph_ns = launches * costs.launch_ns + ops * costs.transfer_op_ns
            busy_ns += problem.accumulation * calls * graph_ns
            if plan is not None:
                updated_there += calls * len({each.parameter for each in gradients_to_host(problem)})
        updated_here = max(0, self.trained - updated_there)
        busy_ns += updated_here * costs.device_update_ns + updated_there * costs.host_update_ns
        return Load(name=HOST_THREAD, busy_ns=busy_ns, nbytes=0)
