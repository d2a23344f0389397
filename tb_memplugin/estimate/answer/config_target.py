"""A transformers model built from its config alone: no weights, no network access, no remote code."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.answer.workload import DTYPES, Built, Workload
from tb_memplugin.estimate.ranks.sharded_model import sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SEQ = 2048
"""Tokens for each sample where no number is given."""

IMAGE_SIDE = 224
"""Height and width in pixels, for models that take images of any size."""

ENCODER_DECODERS = ("SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM")
OTHERS = ("MASKED_LM", "CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "IMAGE_CLASSIFICATION")
"""Tasks in order of preference: if a config names no architecture, the first with a model for it counts."""

LOOP_OVER_TOKENS = ("mamba", "falcon_mamba", "jamba", "zamba", "rwkv", "recurrent_gemma")
"""Model types that scan tokens in a Python loop, at least where no fused kernel is installed."""

SCANS = ("mamba2", "bamba", "zamba2", "nemotron_h", "falcon_h1", "granitemoehybrid")
"""Model types whose scan is one fused kernel where mamba-ssm is installed, and many operators elsewhere."""

BEHIND_POSITIONS = 3
"""Rows that a table of positions may have beyond the config's number (OPT and BART have two)."""

_OF_POSITIONS = re.compile(r"pos|wpe", re.IGNORECASE)

MOST_ROUNDS = 4096
"""The most iterations of that loop, over all layers: two steps take about a minute on one thread."""

_HEADS = re.compile(r"(?=For[A-Z]|Model$|LMHead|$)")
"""Where the family name ends in the name of a transformers model."""

OTHER_INPUTS = {"vision": "images", "audio": "sound"}
"""What a multimodal model takes besides tokens, by the part of the config that describes it."""

LABEL_PER_TOKEN = ("LM", "LMHeadModel", "ForConditionalGeneration", "ForTokenClassification")
LABEL_PER_SAMPLE = ("ForImageClassification", "ForSequenceClassification", "ForAudioClassification")
"""Endings of the names of models that take labels and therefore return a loss."""


@dataclass(frozen=True, slots=True)
class ConfigTarget:
    """A config and its model: the first architecture that it names, or else the default for its type."""

    config: Any

    @property
    def name(self) -> str:
        """The class names of the model and its config."""
        return f"{self.model_class.__name__} ({type(self.config).__name__})"

    @property
    def takes(self) -> frozenset[str]:
        """The sizes that can be set: batch and mesh for every model, seq except for models of images."""
        images = self.model_class.main_input_name == "pixel_values"
        return frozenset({"batch", "mesh"} if images else {"batch", "seq", "mesh"})

    @property
    def model_class(self) -> Any:
        """The class of the config's model.

        Raises:
            MemPluginError: transformers has no model for this config.
        """
        transformers = _transformers()
        for name in self._architectures:
            if (cls := getattr(transformers, name, None)) is not None:
                return cls
        if (pair := self._trained_on_pairs(transformers)) is not None:
            return pair
        tasks = ENCODER_DECODERS if getattr(self.config, "is_encoder_decoder", False) else OTHERS
        for mapping in (*(f"MODEL_FOR_{task}_MAPPING" for task in tasks), "MODEL_MAPPING"):
            if type(self.config) in getattr(transformers, mapping):
                cls = getattr(transformers, mapping)[type(self.config)]
                cls = cls[0] if isinstance(cls, (tuple, list)) else cls
                if isinstance(self.config, cls.config_class):  # not, if it takes only a part of the config
                    return cls
        raise MemPluginError(
            f"transformers has no model for {type(self.config).__name__}.",
            where="TARGET",
            fix='Name a model class in config.json: "architectures": ["LlamaForCausalLM"].',
        )

    def _trained_on_pairs(self, transformers: ModuleType) -> Any:
        """Return the class of a model that is trained on pairs of text and image (CLIP), None for others."""
        if not all(hasattr(self.config, f"{part}_config") for part in ("text", "vision")):
            return None
        mapping = transformers.MODEL_MAPPING
        cls = mapping.get(type(self.config), None)
        return cls if cls is not None and _takes_pairs(cls) else None

    @property
    def _architectures(self) -> tuple[str, ...]:
        return tuple(getattr(self.config, "architectures", None) or ())

    def settled(self, workload: Workload) -> Workload:
        """Fill in the sizes that are not given.

        These are one sample; 2048 tokens, or the config's number of positions if that is smaller; and the
        config's dtype, or else fp32.
        """
        seq = workload.seq or min(SEQ, self._positions() or SEQ)
        return replace(
            workload,
            batch=workload.batch or 1,
            seq=seq if "seq" in self.takes else None,
            dtype=workload.dtype or self._dtype(),
        )

    def _dtype(self) -> str:
        """The dtype that the config names, in which transformers loads the model; a key of `DTYPES`.

        Raises:
            MemPluginError: the weights are quantized, or their dtype is not in `DTYPES`.
        """
        if (quantized := _quantization(self.config)) is not None:
            raise MemPluginError(
                f"The config describes quantized weights ({quantized}), which cannot be estimated.",
                where="TARGET",
                fix="Add --dtype bf16 to estimate the model without quantization.",
            )
        config_dtype = str(getattr(self.config, "dtype", None) or torch.float32).removeprefix("torch.")
        for name, dtype in DTYPES.items():
            if str(dtype) == f"torch.{config_dtype}":
                return name
        raise MemPluginError(
            f"The config's dtype, {config_dtype[:40]!r}, cannot be estimated.",
            where="TARGET",
            fix=f"Add --dtype with one of: {', '.join(DTYPES)}.",
        )

    def build(self, workload: Workload, mesh: DeviceMesh | None = None) -> Built:
        """Build the model in the requested dtype, or one rank's part of it, and inputs of the requested size.

        Raises:
            MemPluginError: the model takes inputs that cannot be made from a config, would run too long, or
                cannot be sharded over this mesh.
        """
        self._refuse_long_loops(workload.seq or 1)
        if not workload.inference and hasattr(self.config, "use_cache"):
            self.config.use_cache = False
        notes = (*self._differences(workload.seq), *self._without_dropping_layers())
        with torch.device("cuda"):
            model = self._model()
            self._refuse_more_positions(model, workload.seq)
            inputs = self._inputs(workload.batch or 1, workload.seq or 1, labels=not workload.inference)
        if mesh is None:
            return Built(model, keywords=inputs, notes=notes)
        part, note = sharded(model, mesh)
        return Built(part, keywords=inputs, notes=(*notes, note), is_part=True)

    def _without_dropping_layers(self) -> tuple[str, ...]:
        """Keep all layers in training, which a config may drop at random; return a note where it does."""
        rates = [name for name, rate in vars(self.config).items() if name.endswith("layerdrop") and rate]
        for name in rates:
            setattr(self.config, name, 0.0)
        if not rates:
            return ()
        return (f"The config drops layers at random ({', '.join(rates)}): the estimate keeps all of them.",)

    def _refuse_long_loops(self, seq: int) -> None:
        layers = getattr(self.config, "num_hidden_layers", 1)
        if getattr(self.config, "model_type", "") in LOOP_OVER_TOKENS and layers * seq > MOST_ROUNDS:
            raise MemPluginError(
                f"{self.model_class.__name__} loops over tokens in Python ({layers} layers x {seq:,} "
                "tokens). The estimate would take many minutes, and would be of that loop, also where "
                "a fused kernel exists.",
                where="--seq",
                fix=(
                    f"Use --seq {max(MOST_ROUNDS // layers, 1)} or less, and see how the memory grows with "
                    "it."
                ),
            )

    def _model(self) -> nn.Module:
        """Build the model without initial values.

        They do not matter here, and some initialisers read the numbers that they have drawn.
        """
        with _no_first_values()():
            model: Any = self.model_class(self.config)
        device = torch.get_default_device()
        if any(parameter.device.type != device.type for parameter in model.parameters()):
            model.to(device)  # old models use torch.FloatTensor, which is always on the CPU
        model.tie_weights()
        return model  # type: ignore[no-any-return]  # every model of transformers is a module

    def _positions(self) -> int | None:
        text = getattr(self.config, "get_text_config", lambda: self.config)()
        names = ("max_position_embeddings", "n_positions", "max_target_positions")
        counts = (getattr(text, name, None) for name in names)
        return next((count for count in counts if isinstance(count, int) and count > 0), None)

    def _refuse_more_positions(self, model: nn.Module, seq: int | None) -> None:
        """Raise for more tokens than a table of positions has rows: a real run would fail, too."""
        most = self._positions()
        if most is None or seq is None or seq <= most:
            return
        for name, module in model.named_modules():
            rows = module.num_embeddings if isinstance(module, nn.Embedding) else 0
            if most <= rows < most + BEHIND_POSITIONS and _OF_POSITIONS.search(name):
                raise MemPluginError(
                    f"{seq:,} tokens are more than the {most:,} positions of the model: a real run fails.",
                    where="--seq",
                    fix=f"Use --seq {most} or less, or a config with more positions.",
                )

    def _differences(self, seq: int | None) -> Iterator[str]:
        """Yield notes on what the estimate does differently from what the config suggests."""
        most, model = self._positions(), self.model_class.__name__
        if most is not None and seq is not None and seq > most:
            yield f"{seq} tokens are more than the {most} positions of the config: a real run may fail."
        if not self._architectures:
            yield f"The config names no model class: {model} is estimated."
        if getattr(self.config, "model_type", "") in (*LOOP_OVER_TOKENS, *SCANS):
            yield (
                f"{model} runs transformers' own operators, as where mamba-ssm is not installed: its fused "
                "kernels take far less memory."
            )
        if self._architectures and model not in self._architectures:
            named = ", ".join(self._architectures)[:80]
            yield (
                f"The config names {named}, which this version of transformers does not have: {model} is "
                "estimated instead."
            )
        if (quantized := _quantization(self.config)) is not None:
            yield (
                f"The config describes quantized weights ({quantized}): the estimate is without quantization."
            )
        kinds = [kind for kind in ("vision", "audio") if getattr(self.config, f"{kind}_config", None)]
        if kinds and self.model_class.main_input_name == "input_ids" and not _takes_pairs(self.model_class):
            yield (
                f"The model also takes {' and '.join(OTHER_INPUTS[kind] for kind in kinds)}. The "
                "estimate gives it only tokens, so that part does not run and has no gradients."
            )

    def _inputs(self, batch: int, seq: int, *, labels: bool) -> dict[str, Any]:
        config, name = self.config, self.model_class.main_input_name
        inputs: dict[str, Any]
        if name == "input_ids":
            inputs = {name: torch.zeros(batch, seq, dtype=torch.long)}
        elif name == "pixel_values":
            image = getattr(config, "vision_config", config)
            side, channels = getattr(image, "image_size", IMAGE_SIDE), getattr(image, "num_channels", 3)
            sides = side if isinstance(side, (tuple, list)) else [side, side]
            frames = [count] if isinstance(count := getattr(image, "num_frames", None), int) else []
            inputs = {name: torch.zeros(batch, *frames, channels, *sides)}
        elif (
            name == "input_features"
            and hasattr(config, "max_source_positions")
            and hasattr(config, "num_mel_bins")
        ):
            inputs = {name: torch.zeros(batch, config.num_mel_bins, 2 * config.max_source_positions)}
        else:
            raise MemPluginError(
                f"{self.model_class.__name__} takes {name!r}, whose size is not in the config.",
                where="TARGET",
                fix="Write a function that returns (model, inputs), and use module:function as the target.",
            )
        if _takes_pairs(self.model_class) and "pixel_values" not in inputs:
            image, side = config.vision_config, config.vision_config.image_size
            inputs["pixel_values"] = torch.zeros(batch, image.num_channels, side, side)
            inputs["return_loss"] = labels
        if getattr(config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = torch.zeros(batch, seq, dtype=torch.long)
        if labels and self.model_class.__name__.endswith(LABEL_PER_TOKEN):
            inputs["labels"] = torch.zeros(batch, seq, dtype=torch.long)
        elif labels and self.model_class.__name__.endswith(LABEL_PER_SAMPLE):
            inputs["labels"] = torch.zeros(batch, dtype=torch.long)
        return inputs


def _takes_pairs(model_class: Any) -> bool:
    """Whether a model computes a loss of its own from pairs of text and image."""
    parameters = inspect.signature(model_class.forward).parameters
    return {"input_ids", "pixel_values", "return_loss"} <= parameters.keys()


def _quantization(config: Any) -> str | None:
    """The quantization method that the config names, None for weights that are not quantized."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return None
    method = (
        quantization.get("quant_method")
        if isinstance(quantization, dict)
        else getattr(quantization, "quant_method", None)
    )
    return str(getattr(method, "value", method) or "quantization_config")[:40]


def config_of_folder(path: Path) -> Any:
    """Load the config from a folder, or from a JSON file.

    Raises:
        MemPluginError: there is no config.json, or transformers does not know its model.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise MemPluginError("The folder has no config.json.", where=str(path))
    try:
        return _transformers().AutoConfig.from_pretrained(
            str(file), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0][:300]
        raise MemPluginError(
            f"transformers cannot read the config: {reason}",
            where=str(file),
            fix="Check that this version of transformers supports its model_type.",
        ) from error


def config_of_class(name: str) -> Any:
    """Create a config with the defaults of the class.

    Raises:
        MemPluginError: transformers has no such class.
    """
    transformers = _transformers()
    config_class = getattr(transformers, name, None)
    if isinstance(config_class, type):
        return config_class()
    near = nearest_configs(name)
    raise MemPluginError(
        f"transformers has no class {name[:80]!r}.",
        where="TARGET",
        fix=f"Did you mean {', '.join(near)}?" if near else "Give a folder with a config.json.",
    )


def nearest_configs(name: str) -> tuple[str, ...]:
    """Names of transformers' config classes similar to a name, or the one of the model that it names.

    Empty where transformers is not installed.
    """
    with suppress(MemPluginError):
        names = [other for other in dir(_transformers()) if other.endswith("Config")]
        stem = _HEADS.split(name)[0] + "Config"
        return (stem,) if stem in names else tuple(difflib.get_close_matches(name, names, 3))
    return ()


def _no_first_values() -> Any:
    """Return transformers' `no_init_weights`, which moved to another module in version 5."""
    for module in ("initialization", "modeling_utils"):
        with suppress(ImportError, AttributeError):
            return importlib.import_module(f"transformers.{module}").no_init_weights
    return nullcontext


def _transformers() -> ModuleType:
    try:
        import transformers
    except ImportError as error:
        raise MemPluginError(
            "A config needs transformers, which is not installed.",
            where="TARGET",
            fix='Run: pip install "tb-memplugin[transformers]". Or use module:function as the target.',
        ) from error
    return transformers  # type: ignore[no-any-return]  # mypy does not follow it
