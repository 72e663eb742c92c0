"""How a case can be run: ours, plain `torch.compile`, and what others offer against memory.

A way is written as

    plain                       torch.compile as it is
    checkpoint                  eager, each block under torch.utils.checkpoint
    checkpoint-compiled         the same inside torch.compile
    memory-budget:0.5           torch.compile with torch._functorch.config.activation_memory_budget
    save-on-cpu                 eager under torch.autograd.graph.save_on_cpu, pinned on CUDA
    native-offload              torch.compile's own activation offload, of every tensor above 1 MiB, on one stream
    native-offload:async        the same on a stream of its own, with prefetch (fails to compile on torch 2.11)
    tencache:POLICY@BUDGET[+OPTION=VALUE ...]      ours; POLICY `all` stands for each one that decides anything

where BUDGET is what the process may hold on the device:

    13.8   13.8GiB              GiB, or a size with a unit
    60%    peak*0.6   peak/1.9  a share of plain's measured peak
    checkpoint                  what that way, or any other run earlier, was measured to hold
    half-activations            plain's state (parameters, gradients, batch) and half of what its peak holds above it
    floor   floor*1.05          the least that an earlier run of the same policy said it needs
    auto                        the option's own default
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
from models import Stack
from torch import Tensor, fx

from tencache_fx.option_values import read_size
from tencache_fx.planning.planner import POLICIES

GIB = 1 << 30

Forward = Callable[..., Tensor]
Line = Mapping[str, Any]
"""What was measured of one way, as in the JSON file."""


class WayError(ValueError):
    """A way is written wrong, or its budget depends on a way that was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way: what kind, the setting behind its colon, and for ours the budget and further options as written."""

    name: str
    kind: str
    setting: str = ""
    budget: str = ""
    options: tuple[tuple[str, str], ...] = ()


def parse_ways(texts: Sequence[str]) -> tuple[Way, ...]:
    """Return the ways that are written, each once, in order; raises `WayError`.

    >>> [way.name for way in parse_ways(["plain", "tencache:teraio@13.8", "plain"])]
    ['plain', 'tencache:teraio@13.8']
    """
    policies = [policy for policy in POLICIES if policy != "none"]
    spread = [text.replace(":all@", f":{policy}@", 1) for text in texts for policy in policies]
    return tuple(_parse_way(text) for text in dict.fromkeys(spread))


def _parse_way(text: str) -> Way:
    given, *pairs = text.split("+")
    whole, _, budget = given.partition("@")
    kind, _, setting = whole.partition(":")
    options = tuple((name, value) for name, _, value in (pair.partition("=") for pair in pairs))
    if kind not in _KINDS:
        raise WayError(f"{text!r} is no way to run a case; choose one of: {', '.join(_KINDS)}.")
    if kind == "tencache":
        if setting not in POLICIES:
            raise WayError(f"{text!r} names no policy of ours; choose one of: all, {', '.join(POLICIES)}.")
        if not budget:
            raise WayError(f"{text!r} has no budget; write tencache:{setting}@13.8, for instance.")
    elif budget or options:
        raise WayError(f"{text!r}: only tencache takes a budget and options.")
    if kind == "memory-budget" and not re.fullmatch(r"0(\.\d+)?|1(\.0+)?", setting):
        raise WayError(f"{text!r} needs a share from 0 to 1; write memory-budget:0.5, for instance.")
    known: tuple[str, ...] = ("", "async") if kind == "native-offload" else ("",)
    if kind not in ("tencache", "memory-budget") and setting not in known:
        raise WayError(f"{text!r}: {kind} has no setting {setting!r}.")
    return Way(name=text, kind=kind, setting=setting, budget=budget, options=options)


def needs_plain(way: Way) -> bool:
    """Return True if the way's budget depends on what plain was measured to hold."""
    return way.budget.startswith("peak") or way.budget.endswith("%") or way.budget == "half-activations"


def budget_bytes(way: Way, lines: Sequence[Line]) -> int | None:
    """Return the way's budget, given what was measured so far; None for no budget, or the option's own default.

    Raises `WayError` when the budget cannot be read, or depends on what was not measured.
    """
    text = way.budget
    if text in ("", "auto"):
        return None
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return int(float(text) * GIB)
    if text == "half-activations":
        plain, state = _measured("plain", "peak_bytes", way, lines), _measured("plain", "state_bytes", way, lines)
        return state + max(0, plain - state) // 2
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)%", text):
        return int(_measured("plain", "peak_bytes", way, lines) * float(match[1]) / 100)
    match = re.fullmatch(r"([a-z][\w:.-]*?)(?:([*/])(\d+(?:\.\d+)?))?", text)
    if match is None:
        size = read_size(way.name, text)
        assert size is not None  # only None and "none" are no size
        assert size.nbytes is not None  # shares and "auto" were read above
        return size.nbytes
    source, sign, number = match.groups()
    if source == "floor":
        nbytes = _floor_bytes(way, lines)
    else:
        nbytes = _measured("plain" if source == "peak" else source, "peak_bytes", way, lines)
    factor = 1.0 if sign is None else float(number) if sign == "*" else 1 / float(number)
    return int(nbytes * factor)


def _measured(name: str, what: str, way: Way, lines: Sequence[Line]) -> int:
    for line in lines:
        if line["way"] == name and what in line:
            return int(line[what])
    raise WayError(f"the budget of {way.name} depends on {name}, which has not been measured; run that way before it.")


def _floor_bytes(way: Way, lines: Sequence[Line]) -> int:
    floors = [
        line["forecast"]["floor_bytes"] for line in lines if line.get("policy") == way.setting and "forecast" in line
    ]
    if not floors:
        raise WayError(f"the budget of {way.name} depends on an earlier run of {way.setting}; run one before it.")
    return int(min(floors))


# ---------------------------------------------------------------- opening a way: a context in which the model is called


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a way needs to know beside its name: who compiles (inductor or eager), and for ours budget and dump."""

    compiler: str
    device: torch.device
    budget_bytes: int | None = None
    dump_dir: Path | None = None


@contextlib.contextmanager
def open_way(way: Way, model: Stack, setting: Setting) -> Iterator[Forward]:
    """Within this context, return what to call in place of `model`; torch's settings are restored behind it."""
    with _KINDS[way.kind](way, model, setting) as forward:
        yield forward


def _compile_plain(model: Stack, setting: Setting) -> Forward:
    backend = "inductor" if setting.compiler == "inductor" else "aot_eager_decomp_partition"
    compiled: Forward = torch.compile(model, backend=backend)
    return compiled


@contextlib.contextmanager
def _plain(way: Way, model: Stack, setting: Setting) -> Iterator[Forward]:
    yield _compile_plain(model, setting)


@contextlib.contextmanager
def _tencache(way: Way, model: Stack, setting: Setting) -> Iterator[Forward]:
    options: dict[str, Any] = {
        "device_budget": "auto" if setting.budget_bytes is None else setting.budget_bytes,
        "policy": way.setting,
        "compiler": setting.compiler,
        "dump_dir": setting.dump_dir,
        **dict(way.options),
    }
    yield torch.compile(model, backend="tencache", options=options)


@contextlib.contextmanager
def _checkpoint(way: Way, model: Stack, setting: Setting) -> Iterator[Forward]:
    model.checkpointed = True
    try:
        yield model if way.kind == "checkpoint" else _compile_plain(model, setting)
    finally:
        model.checkpointed = False


@contextlib.contextmanager
def _memory_budget(way: Way, model: Stack, setting: Setting) -> Iterator[Forward]:
    with torch._functorch.config.patch(activation_memory_budget=float(way.setting)):
        yield _compile_plain(model, setting)


@contextlib.contextmanager
def _save_on_cpu(way: Way, model: Stack, setting: Setting) -> Iterator[Forward]:
    def forward(*batch: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=setting.device.type == "cuda"):
            loss: Tensor = model(*batch)
        return loss

    yield forward


@contextlib.contextmanager
def _native_offload(way: Way, model: Stack, setting: Setting) -> Iterator[Forward]:
    """Torch offloads the saved tensors that a pass marked."""
    if setting.compiler != "inductor":
        raise WayError(f"{way.name} marks tensors in a pass of Inductor's; run it with --compiler inductor.")
    names = ("activation_offload_separate_stream", "activation_offload_sink_wait", "activation_reload_prefetch")
    switches = {"enable_activation_offloading": True} | dict.fromkeys(names, way.setting == "async")

    def mark(graph: fx.Graph) -> None:
        for node in graph.nodes:
            value = node.meta.get("val")
            if node.op == "call_function" and isinstance(value, Tensor) and value.nbytes > 1 << 20:
                node.meta["should_offload"] = True

    with torch._functorch.config.patch(switches), torch._inductor.config.patch(joint_custom_post_pass=mark):
        yield _compile_plain(model, setting)


_KINDS: Mapping[str, Callable[[Way, Stack, Setting], contextlib.AbstractContextManager[Forward]]] = {
    "plain": _plain,
    "tencache": _tencache,
    "checkpoint": _checkpoint,
    "checkpoint-compiled": _checkpoint,
    "memory-budget": _memory_budget,
    "save-on-cpu": _save_on_cpu,
    "native-offload": _native_offload,
}
