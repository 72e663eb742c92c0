"""What a transformers model is to be trained with. No torch here."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tencache_fx.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a transformers model is to be trained with: `samples` or `tokens` a step, or else one micro-batch.

    `settings` are those of its configuration. Without a `micro_batch` the fastest is searched for.
    """

    config: str
    settings: Mapping[str, object] = field(default_factory=dict)
    dtype: str = "bfloat16"
    sequence: int | None = None
    micro_batch: int | None = None
    samples: int | None = None
    tokens: int | None = None

    def check(self) -> None:
        """Raise `OptionError` for numbers that are none."""
        for name in ("sequence", "micro_batch", "samples", "tokens"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise OptionError(f"{name} is {number}; give 1 or more.")

    @property
    def is_searched(self) -> bool:
        """Whether there may be several micro-batches to choose from."""
        return self.micro_batch is None and (self.samples is not None or self.tokens is not None)

    def samples_of(self, sequence: int) -> int:
        """Return how many samples a step has, of so many tokens each, 0 for images.

        Raises `OptionError` for numbers that contradict each other.
        """
        found = self._samples(sequence)
        if self.micro_batch is not None and found % self.micro_batch:
            raise OptionError(f"{found} samples a step are no multiple of micro_batch, {self.micro_batch}; change one.")
        return found

    def _samples(self, sequence: int) -> int:
        if self.tokens is None:
            return self.samples or self.micro_batch or 1
        if self.samples is not None:
            raise OptionError("tokens and samples are both given, and say the same; give one of them.")
        if not sequence:
            raise OptionError(f"{self.config} is for images, which are no tokens; give samples.")
        if self.tokens % sequence:
            raise OptionError(
                f"{self.tokens} tokens are no whole sequences of {sequence}; give a multiple, or another sequence."
            )
        return self.tokens // sequence


@dataclass(frozen=True, kw_only=True)
class Request:
    """What `fit_config` was asked for."""

    load: Workload
    device: str | None
    options: dict[str, object]
    profile: str | None


def read_settings(texts: Sequence[str]) -> dict[str, object]:
    """Return the values of "name=value"; raises `OptionError` for what is none."""
    return dict(map(read_setting, texts))


def read_setting(text: str) -> tuple[str, object]:
    """Return the name and the value of "name=value", which is JSON, or else text; raises `OptionError` without a "=".

    >>> read_setting("hidden_size=4096"), read_setting("hidden_act=gelu")
    (('hidden_size', 4096), ('hidden_act', 'gelu'))
    """
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise OptionError(f"{text!r} sets nothing; give NAME=VALUE, such as hidden_size=4096.")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, {"True": True, "False": False, "None": None}.get(value, value)
