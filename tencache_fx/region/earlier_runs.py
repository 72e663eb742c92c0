"""What earlier runs have learned of a region.

It is how far its forecast is off, what generated code holds more, and how many backwards come before an update.
"""

from collections.abc import Collection
from dataclasses import dataclass

from tencache_fx.hardware import rates
from tencache_fx.hardware.cache import cached, kept
from tencache_fx.planning.recalibration import StoredCorrection
from tencache_fx.region.dynamic_shapes import NamedSizes
from tencache_fx.region.source import RegionSource
from tencache_fx.serialization import Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """How much more a region's generated code held than its graphs show."""

    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulation:
    """How many backwards come before an update."""

    count: Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierRuns:
    """What was learned of one region, as it is asked for now, and the keys under which that is kept.

    It is known by the region's Dynamo graph, so before anything is traced.
    """

    correction: StoredCorrection
    correction_key: dict[str, str]
    margin_bytes: int
    margin_key: dict[str, str]
    accumulation: int
    accumulation_key: dict[str, str]

    @staticmethod
    def read(source: RegionSource, offloaded: Collection[str], planned: NamedSizes | None) -> "EarlierRuns":
        """Return what is kept of `source` with these parameters `offloaded`; margins are of the sizes `planned` for."""
        options = source.options
        asked = options.device_budget, options.policy, options.recompute, options.compiler
        key = {
            **rates.device_key("scales", source.device),
            "asked": repr((*asked, sorted(source.settings.items()), sorted(offloaded))),
            "region": source.fingerprint,
        }
        margin_key = {**key, "what": "margin", "sizes": str(planned)}
        correction = kept(key, StoredCorrection) if options.calibrate else None
        margin = kept(margin_key, Margin) if options.device_budget is not None else None
        accumulation_key = {**key, "what": "accumulation"}
        accumulation = kept(accumulation_key, Accumulation) if offloaded else None
        return EarlierRuns(
            correction=correction or StoredCorrection(),
            correction_key=key,
            margin_bytes=0 if margin is None else margin.nbytes,
            margin_key=margin_key,
            accumulation=1 if accumulation is None else accumulation.count,
            accumulation_key=accumulation_key,
        )

    def keep_margin(self, nbytes: int) -> None:
        """Keep for the next compilation what this one had to keep free of what the graphs do not show."""
        if nbytes:
            cached(self.margin_key, Margin, lambda: Margin(nbytes=nbytes), renew=True)

    def keep_accumulation(self, count: int) -> None:
        """Keep for the next process how many backwards come before an update."""
        if count != self.accumulation:
            cached(self.accumulation_key, Accumulation, lambda: Accumulation(count=count), renew=True)
