"""The Trainer of transformers: `torch_compile_backend="tencache"`, and what the runtime did in its logs.

from tencache_fx.integrations import hf

hf.register()
tencache_fx.configure(device_budget="12GiB", spill_dir="/scratch")  # or TENCACHE_DEVICE_BUDGET, ...
trainer = Trainer(model, TrainingArguments(..., torch_compile=True, torch_compile_backend="tencache"), ...)
hf.TencacheCallback.add_to(trainer)
"""

from collections import Counter
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tencache_fx.api import stats
from tencache_fx.integrations.dynamo_backend import register

__all__ = ["TencacheCallback", "register"]

_PER_STEP = ("d2h_bytes", "h2d_bytes", "disk_write_bytes", "disk_read_bytes", "updates")
_GAUGES = ("host_high_water_bytes", "host_pool_bytes", "disk_bytes")


class TencacheCallback(TrainerCallback):
    """Put what the runtime did, from one line of the training log to the next, into that line.

    Of each step, on average: `tencache/d2h_bytes`, `h2d_bytes`, `disk_write_bytes`, `disk_read_bytes`, `updates` of
    offloaded parameters, and `stall_ms`. The least of the steps: `hit_rate`. As they are now: `host_pool_bytes` and
    `disk_bytes`, which the runtime has taken, and `host_high_water_bytes`, the most that was in use at once. On a GPU
    also `device_peak_bytes`, the most that torch's allocator has held of the device's memory since training began.
    See `tencache_fx.runtime.stats.Stats.take`, whose counters this takes: nobody else gets them meanwhile.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._sums: Counter[str] = Counter()
        self._hit_rate: int | float = 1.0
        self._gauges: dict[str, int | float] = {}

    @classmethod
    def add_to(cls, trainer: Trainer) -> "TencacheCallback":
        """Add one to a trainer, before those that report to TensorBoard and the like; return it.

        `Trainer(callbacks=[...])` and `add_callback` put it behind them: they have then reported already.
        """
        callback = cls()
        trainer.add_callback(callback)
        callbacks = trainer.callback_handler.callbacks
        callbacks.remove(callback)
        callbacks.insert(0, callback)
        return callback

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Forget what was before."""
        stats()
        self._forget()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Note what the step did."""
        taken = stats()
        self._steps += 1
        self._sums.update({name: taken[name] for name in (*_PER_STEP, "stall_ns")})
        self._hit_rate = min(self._hit_rate, taken["hit_rate"])
        self._gauges = {name: taken[name] for name in _GAUGES}

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Forget what evaluation did: it is no step."""
        stats()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Add what was noted to a line of training, here and in the trainer's history."""
        if logs is None or "loss" not in logs or not self._steps:
            return
        metrics = {name: self._sums[name] / self._steps for name in _PER_STEP}
        metrics |= {"stall_ms": self._sums["stall_ns"] / self._steps / 1e6, "hit_rate": self._hit_rate, **self._gauges}
        if torch.cuda.is_initialized():
            metrics["device_peak_bytes"] = torch.cuda.max_memory_allocated()
        named = {f"tencache/{name}": value for name, value in metrics.items()}
        logs.update(named)
        state.log_history[-1].update(named)
        self._forget()

    def _forget(self) -> None:
        self._steps, self._hit_rate = 0, 1.0
        self._sums.clear()
