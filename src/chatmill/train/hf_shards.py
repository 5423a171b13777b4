"""Build Hugging Face models with parameters on the meta device, and find their tensors in the weight files.

transformers renames tensors while it loads a model, and fuses some of them, such as the weights of experts. This module
applies transformers' conversion rules to one tensor at a time, and raises `NotShardableError` for a model that these
rules do not cover.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from chatmill.errors import DataError, one_line
from chatmill.train.hf import HFModel
from chatmill.train.hf_load import auto_classes, check_shapes, missing_fault, quiet
from chatmill.train.lora import LoraModel, base_folder, check_base, read_adapters, trained_on
from chatmill.train.model import CausalModel, WeightPrecision
from chatmill.train.model_files import ADAPTER_CONFIG, CONFIG, ModelFiles, check_sizes, read_config, read_model_files
from chatmill.train.sharded_load import NotShardableError, OpenedModel
from chatmill.train.sharded_tensors import Rows, open_weights
from chatmill.train.weight_dtypes import WeightDtypes

READS_BASE = ("modules_to_save", "trainable_token_indices", "use_dora")
"""Keys of adapter_config.json for which peft initializes adapters from the weights of the base model."""


class TensorSource(NamedTuple):
    """One or more tensors in the weight files, and the model tensors that transformers computes from them."""

    names: tuple[str, ...]
    """Tensor names in the files."""
    targets: tuple[str, ...]
    """Parameter names in the model."""
    convert: Callable[[Sequence[Tensor]], Mapping[str, Tensor]] | None = None
    """Computes the model tensors, by name, from the file tensors; None if a single tensor is used unchanged."""


@dataclass(frozen=True)
class MetaModel:
    """A transformers model with parameters on the meta device, and the tensors in the weight files that contain their
    values.
    """

    lm: Any
    files: ModelFiles
    sources: tuple[TensorSource, ...]
    parameters: Mapping[str, Tensor]
    dtypes: Mapping[str, torch.dtype]
    """The dtype in which each parameter is loaded; `HFModel` may later convert the parameter to float32."""

    def values(self) -> Iterator[tuple[Tensor, Rows]]:
        """Yield each parameter with its values from the weight files; a tied weight is yielded only once."""
        read: set[int] = set()
        with open_weights(self.files) as rows:
            for source in self.sources:
                for target in source.targets:
                    parameter = self.parameters.get(target)
                    if parameter is not None and id(parameter) not in read:
                        read.add(id(parameter))
                        values = _rows(source, target, rows, self.dtypes[target])
                        yield (
                            parameter,
                            values if parameter.dtype == self.dtypes[target] else CastRows(values, self.dtypes[target]),
                        )


class CastRows(NamedTuple):
    """A tensor in a weight file whose rows are cast to `dtype` when they are read."""

    rows: Rows
    dtype: torch.dtype

    def __getitem__(self, rows: Any) -> Tensor:
        return self.rows[rows].to(self.dtype)


def _rows(source: TensorSource, target: str, rows: Callable[[str], Rows], dtype: torch.dtype) -> Rows:
    if source.convert is None:
        return rows(source.names[0])
    # Cast the tensors before converting them, as transformers does.
    return source.convert([rows(name)[...].to(dtype) for name in source.names])[target]


def open_hf(folder: Path, *, compute: torch.dtype | None, weights: WeightPrecision, share: int) -> OpenedModel:
    """Open a Hugging Face model on the meta device. Raise an error if the weights, divided equally among `share` ranks,
    do not fit into memory.
    """
    meta = _load_on_meta(folder, weights, share=share)
    # `separates` is set later, when the architecture is tested.
    model = HFModel(meta.lm, source=folder, compute=compute, separates=False)
    fused = [source.targets for source in meta.sources if source.convert is not None]
    model.remember_files(meta.files, fused=fused)
    return OpenedModel(model, meta.values, test=lambda: _test(folder, weights, compute, share))


def open_adapters(folder: Path, *, compute: torch.dtype | None, share: int) -> OpenedModel:
    """Open adapters with their base model. The adapters are in host memory; the base model is on the meta device."""
    config = read_config(folder / ADAPTER_CONFIG)
    if keys := [key for key in READS_BASE if config.get(key)] or ["bias"] * (config.get("bias", "none") != "none"):
        raise NotShardableError(f"{ADAPTER_CONFIG} has {keys[0]}")
    if trained_on(folder) != "stored":
        raise NotShardableError("the base model of the adapters is quantized")
    place = base_folder(folder)
    check_base(folder, place)
    base = open_hf(place, compute=compute, weights="stored", share=share)
    assert isinstance(base.model, HFModel)
    with adapters_on_cpu():
        model = LoraModel(base.model, read_adapters(folder, base.model.lm))
    check_adapters(model)
    return OpenedModel(model, base.values, test=base.test)


def check_adapters(model: CausalModel) -> None:
    """Raise `NotShardableError` if a trained weight is still on the meta device."""
    if any(each.requires_grad and each.device.type == "meta" for each in model.parameters()):
        raise NotShardableError("the adapters train weights of the base model")


@contextmanager
def adapters_on_cpu() -> Iterator[None]:
    """Make peft create adapters in host memory instead of on the meta device of the base model."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    move, to = BaseTunerLayer._move_adapter_to_device_of_base_layer, nn.Module.to

    def move_to_cpu(layer: Any, adapter_name: str, device: Any = None) -> None:
        # Call the original method, because it also casts the adapters.
        move(layer, adapter_name, torch.device("cpu"))

    def to_unless_meta(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return module if args == (torch.device("meta"),) and not kwargs else to(module, *args, **kwargs)

    BaseTunerLayer._move_adapter_to_device_of_base_layer = move_to_cpu
    nn.Module.to = to_unless_meta
    try:
        yield
    finally:
        BaseTunerLayer._move_adapter_to_device_of_base_layer = move
        nn.Module.to = to


# Build the model and find its tensors in the files.


def _load_on_meta(folder: Path, weights: WeightPrecision, *, share: int) -> MetaModel:
    """Load a model like `load_lm`, but with parameters on the meta device and without catching errors from
    transformers.
    """
    files = read_model_files(folder)
    check_sizes(files)
    auto_config, auto_model = auto_classes(folder)
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    with quiet():
        config = auto_config.from_pretrained(folder, **local)
        if hasattr(config, "quantization_config"):
            raise NotShardableError("the model is quantized")
        dtypes = check_shapes(files, config, weights, share=share)
        with torch.random.fork_rng(devices=[]), _parameters_on_meta():
            lm = auto_model.from_config(config, dtype=torch.float32, trust_remote_code=False).eval()
    with quiet():
        sources = tuple(_sources(lm, files))
    state = lm.state_dict(keep_vars=True)
    _check_sources(lm, files, sources, state)
    dtype_of = _dtypes(lm, dtypes)
    parameters = dict(lm.named_parameters(remove_duplicate=False))
    for name in (target for source in sources for target in source.targets if target in parameters):
        tensor = parameters[name]
        tensor.data = tensor.data.to(dtype_of(name, tensor.dtype))
        tensor.requires_grad_(tensor.is_floating_point())
    loaded = {name: tensor.dtype for name, tensor in parameters.items()}
    meta = MetaModel(lm, files, sources, parameters, loaded)
    _read_buffers(meta, dtype_of)
    return meta


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move parameters to the meta device as they are registered. Buffers stay on their device, because their values are
    computed from the config.
    """
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.data.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _sources(lm: Any, files: ModelFiles) -> Iterator[TensorSource]:
    """Yield the tensors in the weight files for each model tensor, following transformers'
    `convert_and_load_state_dict_in_model`.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    except ImportError:
        raise NotShardableError("this version of transformers does not expose how it renames tensors") from None
    rules = get_model_conversion_mapping(lm)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    if len(renamings) + len(converters) < len(rules):
        raise NotShardableError("this version of transformers has unknown rules for renaming tensors")
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    state, prefix = lm.state_dict(), lm.base_model_prefix
    plain: dict[str, str] = {}
    converted: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(files.tensors, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], base_model_prefix=prefix, meta_state_dict=state)
        if target not in state:
            # Skip tensors that the model does not have.
            continue
        if pattern is not None:
            converted.setdefault(target, []).append((pattern, name))
        elif target in plain:
            raise NotShardableError(f"{plain[target]} and {name} are the same weight")
        else:
            plain[target] = name
    # Store the conversions on the model, because transformers reverts them when it saves the model.
    lm._weight_conversions = [rule for rule in rules if rule.was_used()]
    yield from (TensorSource((name,), (target,)) for target, name in plain.items())
    for target, members in converted.items():
        convert = _conversion(lm, by_pattern[members[0][0]], target, members)
        names = tuple(name for _, name in members)
        on_meta = [torch.empty(files.tensors[name].shape, device="meta") for name in names]
        yield TensorSource(names, tuple(convert(on_meta)), convert)


def _conversion(
    lm: Any, rule: Any, target: str, members: Sequence[tuple[str, str]]
) -> Callable[[Sequence[Tensor]], Mapping[str, Tensor]]:
    def convert(tensors: Sequence[Tensor]) -> Mapping[str, Tensor]:
        mapping = deepcopy(rule)
        for (pattern, name), tensor in zip(members, tensors, strict=True):
            mapping.add_tensor(target, name, pattern, tensor)
        made = mapping.convert(target, model=lm, config=lm.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}

    return convert


def _check_sources(lm: Any, files: ModelFiles, sources: Sequence[TensorSource], state: Mapping[str, Tensor]) -> None:
    """Raise `DataError` if a tensor is missing from the files or has the wrong shape."""
    names = [target for source in sources for target in source.targets]
    if len(set(names)) < len(names) or not set(names) <= state.keys():
        raise NotShardableError("transformers computes the same weight from more than one group of tensors")
    for source in sources:
        shapes = {source.targets[0]: files.tensors[source.names[0]].shape}
        if source.convert is not None:
            on_meta = [torch.empty(files.tensors[name].shape, device="meta") for name in source.names]
            shapes = {name: tuple(tensor.shape) for name, tensor in source.convert(on_meta).items()}
        for name, shape in shapes.items():
            if shape != tuple(state[name].shape):
                raise DataError(
                    f"{files.folder}: {one_line(name)} has the shape {shape}, but {CONFIG} implies "
                    f"{tuple(state[name].shape)}"
                )
    by_id: dict[int, str] = {}
    with open_weights(files) as rows:
        plain = {source.targets[0]: source.names[0] for source in sources if source.convert is None}
        for name in names:
            other = by_id.setdefault(id(state[name]), name)
            if other != name and not (
                {name, other} <= plain.keys() and torch.equal(rows(plain[name])[...], rows(plain[other])[...])
            ):
                raise NotShardableError(f"{name} and {other} are tied, but their values in the files differ")
    if missing := sorted(name for name, tensor in state.items() if id(tensor) not in by_id):
        if lm._keys_to_ignore_on_load_missing:
            raise NotShardableError(f"the weight files have no {missing[0]}")
        raise missing_fault(files.folder, missing)


def _dtypes(lm: Any, dtypes: WeightDtypes) -> Callable[[str, torch.dtype], torch.dtype]:
    """Return a function that maps the name and dtype of a weight to the dtype in which transformers loads it."""
    if dtypes.are_float32:
        return lambda name, dtype: dtype
    from transformers.core_model_loading import build_glob_alternation

    plan = {**lm._get_dtype_plan(dtypes.default), **dtypes.plan()}
    pattern, by_group, _ = build_glob_alternation(list(plan))

    def dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
        match = pattern.search(name)
        return dtype if match is None else plan[by_group[match.lastgroup]]

    return dtype_of


def _read_buffers(meta: MetaModel, dtype_of: Callable[[str, torch.dtype], torch.dtype]) -> None:
    """Read the model's buffers from the weight files. Buffers are small, so they are not sharded."""
    state = meta.lm.state_dict(keep_vars=True)
    with open_weights(meta.files) as rows:
        for source in meta.sources:
            for target in source.targets:
                if target not in meta.parameters:
                    dtype = dtype_of(target, state[target].dtype)
                    # Make a copy: the safetensors tensor may be a view of the memory-mapped file, which may change
                    # later.
                    values = _rows(source, target, rows, dtype)[...].to(dtype, copy=True)
                    module, _, name = target.rpartition(".")
                    meta.lm.get_submodule(module)._buffers[name] = values


# Test the architecture.


@contextmanager
def _without_onednn() -> Iterator[None]:
    """Disable oneDNN, which caches copies of weights. `torch.backends.mkldnn.flags` would print a warning."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def _test(folder: Path, weights: WeightPrecision, compute: torch.dtype | None, share: int) -> bool:
    """Run the model to test whether it processes the conversations of a packed row independently.

    Unlike `HFModel`, this function does not load the whole model: it reads the weights layer by layer. If `weights` is
    "float32", the weights keep the dtype of the files, because casting them would not change the result.
    """
    meta = _load_on_meta(folder, "stored" if weights == "float32" else weights, share=share)
    with open_weights(meta.files) as rows:
        sources = {target: source for source in meta.sources for target in source.targets}
        names = {id(parameter): name for name, parameter in meta.parameters.items() if name in sources}

        def read(parameters: Mapping[str, nn.Parameter | None], place: nn.Module) -> None:
            for name, parameter in parameters.items():
                if parameter is not None and parameter.device.type == "meta":
                    target = names[id(parameter)]
                    values = _rows(sources[target], target, rows, parameter.dtype)[...].to(parameter.dtype)
                    place._parameters[name] = nn.Parameter(values, requires_grad=False)

        def read_all(module: nn.Module) -> dict[nn.Module, dict[str, nn.Parameter | None]]:
            before = {each: dict(each._parameters) for each in module.modules()}
            for each, parameters in before.items():
                read(parameters, each)
            return before

        layers = HFModel.layers_of(meta.lm)
        inside = {each for layer in layers for each in layer.modules()}
        held: dict[nn.Module, dict[nn.Module, dict[str, nn.Parameter | None]]] = {}

        def release(layer: nn.Module) -> None:
            for module, parameters in held.pop(layer).items():
                module._parameters.update(parameters)

        for layer in layers:
            layer.register_forward_pre_hook(lambda each, _: held.update({each: read_all(each)}))
            layer.register_forward_hook(lambda each, *_: release(each))
        for module in meta.lm.modules():
            if module not in inside:
                read(dict(module._parameters), module)
        with _without_onednn():
            model = HFModel(meta.lm, source=folder)
    if model.is_widened and weights != "float32" and compute in (None, torch.float32):
        raise NotShardableError("the layers of this architecture cannot compute in float32 with half-precision weights")
    return model.separates
