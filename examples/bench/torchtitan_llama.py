"""torchtitan's training of a Llama of 1.48e9 parameters (6 layers of hidden 4096), with each step timed.

All arguments are torchtitan's (0.2.2 was tried), and in a checkout of it this runs like its own `torchtitan/train.py`:

    TENCACHE_DEVICE_BUDGET=14GiB torchrun --nproc-per-node 2 torchtitan_llama.py \
        --job.config_file torchtitan/models/llama3/train_configs/debug_model.toml --model.flavor six \
        --training.seq_len 2048 --training.local_batch_size 4 --training.steps 12 --activation_checkpoint.mode none \
        --compile.enable --compile.backend tencache

`--model.name simple_fsdp.llama3 --job.custom_config_module=torchtitan.experiments.simple_fsdp.job_config` has weights
gathered by the compiled graph instead of FSDP2. Rank 0 prints the times of all steps, the median of the last six, and
the peak on its device.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.train as titan
from torchtitan.models.llama3 import llama3_args
from torchtitan.models.llama3.model.args import TransformerModelArgs


class TimedTrainer(titan.Trainer):  # type: ignore[misc]
    """A trainer that notes the time of each step, and the peak before torchtitan's log resets it."""

    def __init__(self, config: Any) -> None:
        self.times_ns: list[int] = []
        self.peak_bytes = 0
        super().__init__(config)

    def train_step(self, batches: Any) -> None:
        """Train for one step."""
        torch.cuda.synchronize()
        begun_ns = time.perf_counter_ns()
        log = self.metrics_processor.log
        self.metrics_processor.log = self._noting_peak(log)
        super().train_step(batches)
        self.metrics_processor.log = log
        torch.cuda.synchronize()
        self.times_ns.append(time.perf_counter_ns() - begun_ns)
        if dist.get_rank() == 0 and self.step == self.job_config.training.steps:
            ms = [round(each / 1e6, 1) for each in self.times_ns]
            peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated())
            print(f"steps {ms} ms, median {statistics.median(ms[-6:])}, peak {peak_bytes / 2**30:.2f} GiB", flush=True)

    def _noting_peak(self, log: Callable[..., None]) -> Callable[..., None]:
        def note(*args: Any, **kwargs: Any) -> None:
            self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated())
            log(*args, **kwargs)

        return note


llama3_args["six"] = TransformerModelArgs(dim=4096, n_layers=6, n_heads=32, vocab_size=32000)

if __name__ == "__main__":
    titan.main(TimedTrainer)
