"""What was read from caches on disk, ours and Inductor's, instead of being made again; for logs and reports.

Our files also go with those of torch: `torch.compiler.save_cache_artifacts()` has all that this process has used.
"""

import logging
import re
from collections.abc import Mapping
from pathlib import Path

from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager

from tencache_fx import compat
from tencache_fx.hardware.cache import USES, folder, keep_file

log = logging.getLogger("tencache_fx")

Counts = Mapping[str, tuple[int, int]]
"""How many entries of each sort were read, and how many had to be made."""

_NAMES = {
    "accumulation": "numbers of backwards before an update",
    "auto": "automatic budgets",
    "choice": "choices of what to recompute",
    "collectives": "rates of process groups",
    "disk": "disks' rates",
    "links": "links' rates",
    "margin": "margins for generated code",
    "native": "native kernels",
    "op": "ops' times",
    "plan": "plans",
    "roofline": "compute rates",
    "scales": "corrections of forecasts",
    "state": "sizes of optimizers' state",
    "stepchoice": "choices for steps",
}
_NONE = (0, 0)
_NAME = re.compile(r"[a-z]+-[0-9a-f]+\.(?:json|so)")


def count_uses() -> Counts:
    """Return what this process has read from caches, and made, so far."""
    torchs = {"whole regions": compat.region_cache_uses(), "Inductor's graphs": compat.graph_cache_uses()}
    return {**USES.counts(), **torchs}


def show_uses(uses: Counts, before: Counts | None = None) -> str:
    """Return as text how much of what was used since `before` was read: "2 of 2 plans, 3 of 4 ops' times"."""
    parts = []
    for sort, (read, made) in uses.items():
        read_before, made_before = (before or {}).get(sort, _NONE)
        read, made = read - read_before, made - made_before
        if read + made > 0:
            parts.append(f"{read} of {read + made} {_NAMES.get(sort, sort)}")
    return ", ".join(parts) or "nothing was looked for"


@CacheArtifactFactory.register
class TencacheArtifact(CacheArtifact):
    """A file of our cache folder, by its name."""

    def populate_cache(self) -> None:
        """Write the file, unless this machine has one: then that stays. Whoever reads it checks what is in it."""
        if not _NAME.fullmatch(self.key):
            log.warning("a cache artifact of the name %r is not written: it is none of ours.", self.key)
            return
        try:
            path = folder() / self.key
            if not path.exists():
                keep_file(path, self.content)
        except OSError as error:
            log.info("%s cannot be kept: %s", self.key, str(error))

    @staticmethod
    def type() -> str:
        """Return the name of this sort of artifact."""
        return "tencache"


def _record(path: Path) -> None:
    """Have torch save a file that was used along with its own."""
    try:
        content = path.read_bytes()
    except OSError:  # another process has evicted it
        return
    CacheArtifactManager.record_artifact(TencacheArtifact.type(), path.name, content)


USES.watch(_record)
