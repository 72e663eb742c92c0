"""The last copy of a parameter to the device, which compute waits for once, and not at each use of the parameter."""

from tencache_fx.runtime.streams import Event, Streams


class LastRead:
    """The event of that copy, if there was one, and the compute streams behind it. The parameter's lock guards it."""

    def __init__(self, streams: Streams) -> None:
        self.event: Event | None = None
        self._streams = streams
        self._followers: set[object] = set()  # streams that have been told to wait: what they do next comes behind it

    def renew(self, event: Event) -> Event:
        """Note a new copy; return its event. Nobody waits for it yet."""
        self._followers.clear()
        self.event = event
        return event

    @property
    def is_followed(self) -> bool:
        """Whether the caller's compute stream has nothing to wait for."""
        return self.event is None or self._streams.compute_key() in self._followers

    def follow(self) -> None:
        """Let the caller's compute stream wait for the copy, unless it has been told to before."""
        if self.event is None or (key := self._streams.compute_key()) in self._followers:
            return
        self._streams.wait_compute(self.event)
        if key is not None:
            self._followers.add(key)
