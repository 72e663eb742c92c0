"""Which tensors of weight files are which parameters and buffers of a model."""

from collections.abc import Mapping

from torch import Tensor, nn

from tencache_fx.errors import OptionError
from tencache_fx.model_state.weight_files import WeightFiles, WeightSlice

_SHOWN = 3  # missing names


class ModelWeights:
    """The values that files have for a model: for all its parameters, and for the buffers of its `state_dict`.

    A tied parameter is found by any of its names; names that the model does not have are left alone. Raises
    `OptionError` for what the files lack, or have in another size or dtype.
    """

    def __init__(self, model: nn.Module, files: WeightFiles) -> None:
        self._files = files
        names: dict[Tensor, list[str]] = {}
        for name, each in model.named_parameters(remove_duplicate=False):
            names.setdefault(each, []).append(name)
        missing: list[str] = []
        self._of: dict[Tensor, WeightSlice] = {}
        for parameter, known in names.items():
            self._note(parameter, known, missing)
        for prefix, module in model.named_modules():
            for key, buffer in module.named_buffers(recurse=False):
                if key not in module._non_persistent_buffers_set:
                    self._note(buffer, [f"{prefix}.{key}" if prefix else key], missing)
        if missing:
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            places = ", ".join(str(file.path) for file in files.files[:_SHOWN])
            raise OptionError(
                f"weights: {', '.join(missing[:_SHOWN])}{more} of the model's {len(names)} parameters and its buffers "
                f"are not among the {len(files.slices)} tensors of {places}; name the files of this model."
            )

    def find(self, tensor: Tensor) -> WeightSlice | None:
        """Return the value of a parameter or buffer of the model."""
        return self._of.get(tensor)

    def carry_over(self, made: Mapping[Tensor, Tensor]) -> None:
        """Know tensors by others that have taken their places."""
        self._of |= {other: self._of[tensor] for tensor, other in made.items() if tensor in self._of}

    def close_unread(self, read_in_place: set[WeightSlice]) -> None:
        """Close the files of which nothing is read from now on."""
        needed = {id(each.file) for each in read_in_place}
        for file in self._files.files:
            if id(file) not in needed:
                file.close()

    def _note(self, tensor: Tensor, names: list[str], missing: list[str]) -> None:
        if (found := self._files.find(names, tensor)) is None:
            missing.append(names[0])
        else:
            self._of[tensor] = found
