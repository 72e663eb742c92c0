"""Offloading a model: which parameters, whether all of them can be, and each module's move.

Whatever stops a move leaves the model as it was: what can be known is refused before anything moves, and for the rest
each part of a move says how to take it back.
"""

import contextlib
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tencache_fx.errors import OptionError
from tencache_fx.model_state.disk_backing import Place
from tencache_fx.model_state.disk_choice import Candidate, Room, choose_for_disk
from tencache_fx.model_state.gradient_parts import PartHook
from tencache_fx.model_state.model_weights import ModelWeights
from tencache_fx.model_state.offloaded_parameter import OffloadedParameter
from tencache_fx.model_state.parameter_store import find_offloaded, parameters_of
from tencache_fx.model_state.shard import RankGroup, Shard
from tencache_fx.model_state.sharded_modules import check_readers
from tencache_fx.planning.problem import Tier, host_state_bytes
from tencache_fx.runtime.buffers import Use
from tencache_fx.runtime.engine import Engine

LEAST_BYTES = 64 << 10
"""Smaller parameters stay on the device: their copies would cost more in time than they save in memory."""

_LEAST_AHEAD_BYTES = 1 << 20  # less is mapped at once
# As much is mapped before its value comes, and up to this share of the budget: host memory may not have a model twice.
_MOST_AHEAD_BYTES, _AHEAD_SHARE = 1 << 30, 16
_FEW = 32  # one part in so many: with gradients, and masters and moments in fp32, that is up to eight times as much


def is_adapted(model: nn.Module) -> bool:
    """Return whether a model is frozen but for a few parameters."""
    parameters = list(model.parameters())
    trained_bytes = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    return trained_bytes * _FEW <= sum(parameter.nbytes for parameter in parameters)


def should_offload(parameter: Tensor, name: str, *, adapts: bool) -> bool:
    """Return whether a parameter is large enough, and not one of the few that are trained where the model `adapts`.

    Raises `OptionError` for one that is, but has gaps between its elements, or the same memory for several.
    """
    if not _may_leave(parameter, adapts=adapts):
        return False
    if not torch.ops.aten.is_non_overlapping_and_dense(parameter.detach()):
        raise OptionError(
            f"{name} of size {tuple(parameter.shape)} has strides {parameter.stride()}, with gaps between its elements "
            "or the same memory for several; make it contiguous."
        )
    return True


def _may_leave(parameter: Tensor, *, adapts: bool) -> bool:
    return parameter.nbytes >= LEAST_BYTES and not (adapts and parameter.requires_grad)


class Offloading:
    """The move of one model to `device`, module by module: large parameters to `engine`'s host memory, or its disk.

    With `weights`, that is where all values come from. Leaving its context by an exception takes everything back.
    Raises, before anything moves, `OptionError` for what cannot, and `BudgetError` when neither host budget nor disk
    has room for all of it.
    """

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        device: torch.device,
        group: RankGroup | None = None,
        weights: ModelWeights | None = None,
    ) -> None:
        self._engine = engine
        self._device = device
        self._group = group
        self._weights = weights
        self.shards: dict[Tensor, Shard | None] = {}  # of those moved over a group; None for one that is whole
        self._adapts = is_adapted(model)
        self._made: dict[nn.Parameter, nn.Parameter] = {}  # for those on "meta"
        self._new: set[nn.Parameter] = set()  # those made
        self._undo = contextlib.ExitStack()
        self._joined = contextlib.ExitStack()
        _check_ties(model)
        _check_makers(model, weights)
        if group is not None:
            check_readers(model)
        sizes: dict[nn.Parameter, tuple[str, int]] = {}
        for name, parameter in model.named_parameters():
            if group is not None:
                _check_whole(parameter, name)
            is_new = parameters_of(engine).find(parameter) is None
            if weights is not None and not is_new:
                raise OptionError(f"{name} is offloaded already; give weights= the first time that offload is called.")
            if is_new and self._leaves(parameter):
                if not parameter.is_meta:  # else it is made dense
                    should_offload(parameter, name, adapts=self._adapts)
                sizes[parameter] = name, parameter.nbytes if group is None else local_bytes(parameter, group)
        self.nbytes = sum(nbytes for _, nbytes in sizes.values())
        parameters_of(engine).updates.wait()  # the last of a model that is gone still hold its memory
        engine.object_buffers.drain()
        self._places = choose_places(engine, sizes, weights)
        in_memory = [nbytes for each, (_, nbytes) in sizes.items() if not self._places[each].on_disk]
        on_disk = [nbytes for each, (_, nbytes) in sizes.items() if self._places[each].on_disk]
        more = parameters_of(engine).passing.missing_sizes(max(on_disk)) if on_disk else []
        engine.pool.make_room([*in_memory, *more], Use.PARAMETER)
        self._largest_bytes = max(on_disk, default=0)
        self._large_sizes = deque(nbytes for nbytes in in_memory if nbytes >= _LEAST_AHEAD_BYTES)
        self._ahead_bytes = 0  # of these, that are yet to come before more is mapped

    def __enter__(self) -> "Offloading":
        self._undo.callback(self._engine.object_buffers.drain)
        if self._largest_bytes:  # all buffers, while there is room for them
            passing = parameters_of(self._engine).passing
            passing.join(self._largest_bytes)
            self._joined.callback(passing.leave)
        self._map_next()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        in_place = {each.weights for each in self._places.values() if each.weights is not None and each.in_file}
        with self._joined:
            self._joined.callback(self._engine.map_ahead, (), Use.PARAMETER)
            if kind is None:
                self._undo.pop_all()
            else:
                self._undo.close()
        if self._weights is not None:
            self._weights.close_unread(in_place if kind is None else set())

    def _map_next(self) -> None:
        """Begin to map the parameters that come next, while others are copied."""
        sizes, left_bytes = [], min(_MOST_AHEAD_BYTES, self._engine.pool.budget_bytes // _AHEAD_SHARE)
        for nbytes in self._large_sizes:
            if nbytes > left_bytes:
                break
            sizes.append(nbytes)
            left_bytes -= nbytes
        self._engine.map_ahead(sizes, Use.PARAMETER, compiles=False)
        self._ahead_bytes = sum(sizes) // 2

    def _note_arrival(self, nbytes: int) -> None:
        """Begin to map more once half of what was begun is there: a value that came has left its former place."""
        if self._large_sizes and nbytes >= _LEAST_AHEAD_BYTES:
            self._large_sizes.popleft()
            self._ahead_bytes -= nbytes
            if self._ahead_bytes <= 0:
                self._map_next()

    def make(self, module: nn.Module) -> None:
        """Make what a module has on "meta", by itself, on the device; tied parameters only once."""
        self._put_back_later(module._parameters)
        self._put_back_later(module._buffers)
        if self._weights is not None:
            self._make_empty(module, self._weights)
        on_meta = {key: p for key, p in module.named_parameters(recurse=False) if p.is_meta}
        has_buffers = _has_buffers_on_meta(module, self._weights)
        for key, parameter in on_meta.items():
            if parameter in self._made:
                module.register_parameter(key, self._made[parameter])
        if all(parameter in self._made for parameter in on_meta.values()) and not has_buffers:
            return
        parameters = {key: p for key, p in module.named_parameters(recurse=False) if not p.is_meta}
        buffers = {key: buffer for key, buffer in module.named_buffers(recurse=False) if not buffer.is_meta}
        module._parameters |= {key: nn.Parameter(torch.empty_like(p), p.requires_grad) for key, p in parameters.items()}
        module._buffers |= {key: torch.empty_like(buffer) for key, buffer in buffers.items()}
        module.to_empty(device=self._device, recurse=False)
        module.reset_parameters()  # type: ignore[operator]  # as `_check_makers` has seen
        module._parameters |= parameters  # what was there already is kept: only stand-ins were reset
        module._buffers |= buffers
        self._made |= {parameter: getattr(module, key) for key, parameter in on_meta.items()}
        self._new |= {self._made[parameter] for parameter in on_meta.values()}
        self._places |= {self._made[each]: self._places.get(each, Place()) for each in on_meta.values()}

    def _make_empty(self, module: nn.Module, weights: ModelWeights) -> None:
        """Make the parameters and buffers on "meta" that weight files have the values of, without these."""
        for key, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta and weights.find(parameter) is not None:
                if parameter not in self._made:
                    made = nn.Parameter(torch.empty_like(parameter, device=self._device), parameter.requires_grad)
                    self._made[parameter] = made
                    self._new.add(made)
                    self._places[made] = self._places.get(parameter, Place())
                    weights.carry_over({parameter: made})
                module.register_parameter(key, self._made[parameter])
        for key, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta and weights.find(buffer) is not None:
                module._buffers[key] = made_buffer = torch.empty_like(buffer, device=self._device)
                weights.carry_over({buffer: made_buffer})

    def move(self, parameter: nn.Parameter, name: str) -> int:
        """Offload a parameter that should be, and is not yet; move any other to the device. Return the bytes moved."""
        store = parameters_of(self._engine)
        if store.find(parameter) is not None:
            return 0
        before = parameter.data
        if self._group is not None:
            if parameter in self.shards:
                return 0
            self._take_part(parameter, self._group)
        if self._leaves(parameter):
            should_offload(parameter, name, adapts=self._adapts)
            offloaded = store.offload(parameter, name, self._device, self._places.get(parameter, Place()))
            if parameter in self._new:
                self._undo.callback(offloaded.forget)
            elif self._weights is not None:
                self._undo.callback(_give_back, offloaded, before)
            else:
                self._undo.callback(_undo_offload, offloaded, before.device)
            if (shard := self.shards.get(parameter)) is not None:
                offloaded.shard = shard
                PartHook(parameter, store.additions, shard.group.name)
            del before  # its memory is to go
            if offloaded.tier is Tier.HOST:
                self._note_arrival(offloaded.nbytes)
            return offloaded.nbytes
        parameter.data = self._moved(parameter)
        self._undo.callback(setattr, parameter, "data", before)
        if parameter.requires_grad and parameter not in store.kept:
            store.kept[parameter] = True
            self._undo.callback(store.kept.pop, parameter)
        return 0

    def _moved(self, tensor: Tensor) -> Tensor:
        """Return a parameter's or a buffer's value on the device: that of a file, if there is one."""
        value = tensor.detach()
        if self._weights is None or (weights := self._weights.find(tensor)) is None:
            return value.to(self._device)
        moved = torch.empty_like(value, device=self._device)
        weights.fill(moved)
        return moved

    def _leaves(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter is to be in host memory, in whole or in part."""
        if parameter in self.shards:
            return self.shards[parameter] is not None
        if self._group is not None:
            return self._shard_of(parameter, self._group) is not None
        return _may_leave(parameter, adapts=self._adapts)

    def _shard_of(self, parameter: nn.Parameter, group: RankGroup) -> Shard | None:
        """Return how a parameter is to be spread; None for one that all ranks have whole, on their devices."""
        if parameter.dim() == 0 or parameter.size(0) < group.size or (self._adapts and parameter.requires_grad):
            return None
        return Shard(group, parameter.size()) if local_bytes(parameter, group) >= LEAST_BYTES else None

    def _take_part(self, parameter: nn.Parameter, group: RankGroup) -> None:
        """Let a parameter be this rank's part of the value that rank 0 has, or all of that; a collective."""
        value = parameter.detach().to(self._device).contiguous()
        torch.distributed.broadcast(value, group=group.process_group, group_src=0)
        self.shards[parameter] = shard = self._shard_of(parameter, group)
        parameter.data = value if shard is None else shard.cut(value)

    def move_buffers(self, module: nn.Module) -> None:
        """Move a module's own buffers to the device; with a group, they are those of rank 0."""
        for key, buffer in module.named_buffers(recurse=False):
            module._buffers[key] = moved = self._moved(buffer)
            if self._group is not None:
                torch.distributed.broadcast(moved, group=self._group.process_group, group_src=0)

    def _put_back_later(self, entries: dict[str, Any]) -> None:
        before = dict(entries)

        def put_back() -> None:
            entries.clear()
            entries.update(before)

        self._undo.callback(put_back)


def local_bytes(parameter: Tensor, group: RankGroup) -> int:
    """Return the bytes of each rank's part of a parameter of one dimension at least."""
    rows = parameter.size(0) if parameter.dim() else 1
    return -(-rows // group.size) * (parameter.nbytes // max(rows, 1))


def _check_whole(parameter: Tensor, name: str) -> None:
    """Refuse to spread a parameter that is in host memory as a whole."""
    offloaded = None if parameter.is_meta else find_offloaded(parameter)
    if offloaded is not None and offloaded.shard is None:
        raise OptionError(
            f"{name} is offloaded to host memory as a whole already; give shard= the first time that offload is called."
        )


def _undo_offload(offloaded: OffloadedParameter, device: torch.device) -> None:
    """Make a parameter that has just been offloaded an ordinary one again."""
    offloaded.make_ordinary(device)
    offloaded.forget()


def _give_back(offloaded: OffloadedParameter, before: Tensor) -> None:
    """Give a parameter whose value came from a file the one that it had."""
    offloaded.parameter.data = before
    offloaded.forget()


def choose_places(
    engine: Engine, sizes: Mapping[nn.Parameter, tuple[str, int]], weights: ModelWeights | None
) -> dict[nn.Parameter, Place]:
    """Return where these parameters, with their names and bytes, go to; raises `BudgetError` if there is no room.

    Those that are all but frozen models' few trained ones are not among them.
    """
    store, pool, parameters = engine.store, engine.pool, parameters_of(engine)
    slices = {each: None if weights is None else weights.find(each) for each in sizes}
    in_file = {
        each: found is not None and not each.requires_grad and each.is_contiguous() for each, found in slices.items()
    }
    trained_bytes = sum(each.nbytes for each in parameters if not each.is_dead and each.parameter.requires_grad)
    candidates = [
        Candidate(
            name=name,
            nbytes=nbytes,
            state_bytes=host_state_bytes(nbytes // each.itemsize, split=each.dtype == torch.bfloat16),
            trained=each.requires_grad,
            in_file=in_file[each],
        )
        for each, (name, nbytes) in sizes.items()
    ]
    room = Room(
        host_budget_bytes=pool.budget_bytes,
        host_bytes=pool.budget_bytes - pool.acquired_bytes,
        gradient_bytes=max(0, trained_bytes - pool.held_for(Use.GRADIENT)),
        disk_bytes=None if store is None else store.budget_bytes - store.acquired_bytes,
        passing_bytes=parameters.passing.nbytes,
    )
    chosen = choose_for_disk(candidates, room)
    return {
        each: Place(on_disk=name in chosen, weights=slices[each], in_file=name in chosen and in_file[each])
        for each, (name, _) in sizes.items()
    }


def _check_ties(model: nn.Module) -> None:
    """Refuse parameters that share memory; called while all of them have theirs, which tells them apart."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        if (other := names.setdefault(parameter.untyped_storage()._cdata, name)) != name:
            raise OptionError(f"{name} shares memory with {other}; tie them by using one Parameter in both places.")


def _check_makers(model: nn.Module, weights: ModelWeights | None) -> None:
    """Refuse modules on "meta" that cannot make what they have there, and no file has."""
    made: set[nn.Parameter] = set()
    for name, module in model.named_modules():
        on_meta = {p for p in module.parameters(recurse=False) if p.is_meta and not _has(weights, p)}
        if on_meta <= made and not _has_buffers_on_meta(module, weights):
            continue
        if not callable(getattr(module, "reset_parameters", None)) or on_meta & made:
            raise OptionError(
                f"module {name or 'the model'} ({type(module).__name__}) is on the meta device and has no "
                "reset_parameters() to make its parameters and buffers with, or shares some of them; build it on the "
                "CPU."
            )
        made |= on_meta


def _has_buffers_on_meta(module: nn.Module, weights: ModelWeights | None) -> bool:
    return any(buffer.is_meta and not _has(weights, buffer) for buffer in module.buffers(recurse=False))


def _has(weights: ModelWeights | None, tensor: Tensor) -> bool:
    return weights is not None and weights.find(tensor) is not None
