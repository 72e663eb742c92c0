"""Quick runs of other libraries: nothing is measured or generated; what they set is taken back."""

import gc
import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def quick(alone: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the graphs as they are, with fixed rates, on one thread: with more, an embedding's gradient is added up in
    any order.
    """
    for variable in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("TENCACHE_COMPILER", "eager")
    monkeypatch.setenv("TENCACHE_CALIBRATE", "0")
    gc.collect()  # regions of the test before are none of this one's
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    for variable in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[variable]
