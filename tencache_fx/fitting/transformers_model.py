"""Models of transformers by the name of their configuration: what they are called with, and with fewer layers.

transformers is optional: `find_config` says so where it is missing.
"""

import copy
import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tencache_fx.errors import OptionError
from tencache_fx.fitting import PREFIX
from tencache_fx.fitting.fake_model import FactoryResult, MetaDeviceMode
from tencache_fx.fitting.user_code import users_code
from tencache_fx.fitting.workload import Workload
from tencache_fx.option_values import listed, nearest

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_DEPTHS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
_MAPPINGS = (  # in this order: a model that fills in masks may be in the list of those that go on, too
    ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "AutoModelForSeq2SeqLM"),
    ("MODEL_FOR_MASKED_LM_MAPPING", "AutoModelForMaskedLM"),
    ("MODEL_FOR_CAUSAL_LM_MAPPING", "AutoModelForCausalLM"),
    ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", "AutoModelForImageClassification"),
)
_LONGEST = 2048  # a sequence, where nobody says


@dataclass(frozen=True, kw_only=True)
class ConfiguredModel:
    """A model by its configuration, with what a sample is: `sequence` tokens, or an image, for which that is 0.

    `depths` are the numbers of layers it has, by the configuration's names for them.
    """

    name: str
    config: Any
    maker: str
    dtype: torch.dtype
    sequence: int
    depths: Mapping[str, int]

    @property
    def is_image(self) -> bool:
        """Whether a sample is an image."""
        return not self.sequence

    def make(self, micro_batch: int) -> FactoryResult:
        """Return the model, and what it is called with, on "meta"; raises `OptionError` if it cannot be made."""
        import transformers  # here: it is optional, and slow to import

        config = copy.deepcopy(self.config)
        config.use_cache = False
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = config.pad_token_id or 0
        told = users_code(f"{self.name} makes no model", _advise, tell_place=False)
        with told, MetaDeviceMode(), torch.device("meta"):
            model = getattr(transformers, self.maker).from_config(config, dtype=self.dtype)
            if getattr(model, "loss_type", "") is None:
                model.loss_type = "ForCausalLM"  # what it takes then, with a warning that breaks the graph
            inputs = self._inputs(micro_batch)
        return FactoryResult(model=model.train(), inputs=(), named_inputs=inputs, loss_fn=_loss_of)

    def shorter(self, ends: int) -> "tuple[ConfiguredModel, int]":
        """Return the same model with two units of layers, so many layers before and behind them, and a unit's layers.

        A unit is what repeats: layers of several kinds, where these take turns. A model that has fewer stays itself.
        """
        unit = max((_period(kinds) for kinds in self._kinds()), default=1)
        config, depths = copy.deepcopy(self.config), dict(self.depths)
        least = 2 * (unit + ends)
        for name, depth in self.depths.items():
            depths[name] = min(depth, least + (depth - least) % unit)
        if depths == self.depths:
            return self, unit
        for key, value in list(vars(config).items()):
            if isinstance(value, list) and len(value) in self.depths.values():
                setattr(config, key, value[: max(depths.values())])
        for name, depth in depths.items():
            setattr(config, name, depth)
        return ConfiguredModel(**{**vars(self), "config": config, "depths": depths}), unit

    def _kinds(self) -> Iterator[Sequence[object]]:
        """Yield what a configuration says of each layer."""
        for value in vars(self.config).values():
            if isinstance(value, list) and len(value) in self.depths.values():
                yield value

    def _inputs(self, micro_batch: int) -> dict[str, torch.Tensor]:
        config = self.config
        if self.is_image:
            height, width = _pair(config.image_size)
            pixels = torch.empty(micro_batch, config.num_channels, height, width, dtype=self.dtype)
            return {"pixel_values": pixels, "labels": torch.empty(micro_batch, dtype=torch.int64)}
        tokens = torch.empty(micro_batch, self.sequence, dtype=torch.int64)
        return {"input_ids": tokens, "labels": tokens.clone()}


def find_config(load: Workload) -> ConfiguredModel:
    """Return the model that a configuration, such as "LlamaConfig", stands for with the settings of a workload.

    Raises `OptionError` if transformers is not installed, or for what it does not know.
    """
    name, settings, dtype, sequence = load.config, load.settings, load.dtype, load.sequence
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise OptionError(
            f"{PREFIX}{name} needs transformers, which is not installed; pip install 'tencache_fx[models]'."
        ) from error
    if not name.endswith("Config") or not hasattr(transformers, name):  # to list all names takes longer
        known = [each for each in dir(transformers) if each.endswith("Config")]
        raise OptionError(f"transformers has no {name};{nearest(name, dict.fromkeys(known))} name a configuration.")
    if dtype not in DTYPES:
        raise OptionError(f"dtype is {dtype!r};{nearest(dtype, DTYPES)} there are {listed(DTYPES)}.")
    kind: Any = getattr(transformers, name)
    with users_code(f"{name} cannot be made", _advise, tell_place=False):
        plain = kind()
    if unknown := [each for each in settings if not hasattr(plain, each)]:
        fields = {**plain.to_dict(), **dict.fromkeys(plain.attribute_map)}
        raise OptionError(f"{name} has no {unknown[0]};{nearest(unknown[0], fields)} see its documentation.")
    with users_code(f"{name} cannot be made", _advise, tell_place=False):
        config = kind(**settings)
    maker = _maker_of(name, config)
    is_image = maker == "AutoModelForImageClassification"
    if is_image and sequence is not None:
        raise OptionError(f"{name} is for images, which have no sequence; leave that out.")
    longest = getattr(config, "max_position_embeddings", None) or _LONGEST
    return ConfiguredModel(
        name=name,
        config=config,
        maker=maker,
        dtype=DTYPES[dtype],
        sequence=0 if is_image else sequence or min(longest, _LONGEST),
        depths={each: depth for each in _DEPTHS if isinstance(depth := getattr(config, each, None), int)},
    )


def _maker_of(name: str, config: object) -> str:
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    for mapping, maker in _MAPPINGS:
        if type(config) in getattr(auto, mapping):
            return maker
    raise OptionError(
        f"{name} is of no model that is trained on text or on images; write a factory, and name it MODULE:FUNCTION."
    )


def _advise(_: BaseException) -> str:
    return "set other values with --set"


def _period(kinds: Sequence[object]) -> int:
    """Return after how many layers their kinds repeat.

    >>> _period(["local", "local", "full", "local", "local", "full", "local"])
    3
    """
    return next(n for n in range(1, len(kinds) + 1) if all(a == b for a, b in zip(kinds, kinds[n:], strict=False)))


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)


def _loss_of(output: Any) -> torch.Tensor:
    return output.loss  # type: ignore[no-any-return]
