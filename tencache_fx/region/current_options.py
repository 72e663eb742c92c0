"""The options of a region as they count now: `configure` may have changed budgets since torch handed it over."""

import dataclasses

from tencache_fx.options import SETTINGS, Options
from tencache_fx.region.source import RegionSource
from tencache_fx.runtime.engine_registry import usage


class CurrentOptions:
    """The options of one region.

    Budgets of host memory and disk, and directories, are those that `configure` was told since. A budget that was given
    with the compilation is the most that it may be. The device budget changes for regions of a step alone.
    """

    def __init__(self, source: RegionSource) -> None:
        self._source = source
        self._known = self._known_of_step = source.configured
        self._options = self._options_of_step = source.options

    @property
    def options(self) -> Options:
        """What the region is planned for by itself. Raises `OptionError` for a budget that there is no room for."""
        if SETTINGS.given is not self._known:
            self._options, self._known = self._find(), SETTINGS.given
        return self._options

    @property
    def of_step(self) -> Options:
        """What it is planned for with its step. Raises what `options` does."""
        if SETTINGS.given is not self._known_of_step:
            found = self.options
            if "device_budget" not in self._source.own:
                found = found.as_configured({"device_budget"}, device=self._source.device)
            self._options_of_step, self._known_of_step = found, SETTINGS.given
        return self._options_of_step

    @property
    def source(self) -> RegionSource:
        """The region with these options, by itself. Raises what `options` does."""
        options = self.options
        return self._source if options == self._source.options else dataclasses.replace(self._source, options=options)

    def _find(self) -> Options:
        source, now, before = self._source, SETTINGS.given, self._source.configured
        changed = {name for name in now if now[name] != before.get(name)} & {"host_budget", "spill_budget", "spill_dir"}
        if "spill_dir" in changed:
            changed = changed - {"spill_dir"} if "spill_dir" in source.own else changed | {"spill_budget"}
        if not changed:
            return source.options
        own, options = usage(source.device), source.options
        found = options.as_configured(
            changed, device=source.device, own_host_bytes=own.host_bytes, own_disk_bytes=own.disk_bytes
        )
        if "host_budget" in source.own:
            found = dataclasses.replace(found, host_budget=min(found.host_budget, options.host_budget))
        if "spill_budget" in source.own:
            found = dataclasses.replace(found, spill_budget=min(found.spill_budget, options.spill_budget))
        return found
