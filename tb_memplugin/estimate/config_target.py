"""A model of transformers by its config alone: no weights, no network, no code from elsewhere."""

from __future__ import annotations

import difflib
import importlib
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
from tb_memplugin.estimate.ranks.sharded_model import sharded
from tb_memplugin.estimate.workload import DTYPES, Built, Workload

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SEQ = 2048
"""Tokens for each sample where none are told."""

IMAGE_SIDE = 224
"""Pixels, where a model takes images of any size."""

ENCODER_DECODERS = ("SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM")
OTHERS = ("MASKED_LM", "CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "IMAGE_CLASSIFICATION")
"""Tasks of which the first that a config has a model for is taken, if it names no architecture."""

LOOP_OVER_TOKENS = ("mamba", "falcon_mamba", "jamba", "zamba", "rwkv")
"""Types of models whose scan is a Python loop over tokens where its fused kernel is not installed."""

MOST_ROUNDS = 4096
"""Rounds of that loop in all layers that are run: about a minute for two steps on one thread."""

_HEADS = re.compile(r"(?=For[A-Z]|Model$|LMHead|$)")
"""Where the name of a model of transformers goes on after that of its family."""

OTHER_INPUTS = {"vision": "images", "audio": "sound"}
"""What a model of several kinds of inputs takes beside tokens, by the config of its part."""

LABEL_PER_TOKEN = ("LM", "LMHeadModel", "ForConditionalGeneration", "ForTokenClassification")
LABEL_PER_SAMPLE = ("ForImageClassification", "ForSequenceClassification", "ForAudioClassification")
"""Ends of the names of models that take labels, and so give a loss themselves."""


@dataclass(frozen=True, slots=True)
class ConfigTarget:
    """A config, and the model that belongs to it: its first architecture, or else the usual one."""

    config: Any

    @property
    def name(self) -> str:
        """The class of the model and of its config."""
        return f"{self.model_class.__name__} ({type(self.config).__name__})"

    @property
    def takes(self) -> frozenset[str]:
        """Every model takes a batch and a mesh; images have no length."""
        images = self.model_class.main_input_name == "pixel_values"
        return frozenset({"batch", "mesh"} if images else {"batch", "seq", "mesh"})

    @property
    def model_class(self) -> Any:
        """The class of the model.

        Raises:
            MemPluginError: transformers has no model for this config.
        """
        transformers = _transformers()
        for name in self._architectures:
            if (found := getattr(transformers, name, None)) is not None:
                return found
        tasks = ENCODER_DECODERS if getattr(self.config, "is_encoder_decoder", False) else OTHERS
        for mapping in (*(f"MODEL_FOR_{task}_MAPPING" for task in tasks), "MODEL_MAPPING"):
            if type(self.config) in getattr(transformers, mapping):
                found = getattr(transformers, mapping)[type(self.config)]
                return found[0] if isinstance(found, (tuple, list)) else found
        raise MemPluginError(
            f"transformers has no model for {type(self.config).__name__}.",
            where="TARGET",
            fix='Name one in config.json: "architectures": ["LlamaForCausalLM"].',
        )

    @property
    def _architectures(self) -> tuple[str, ...]:
        return tuple(getattr(self.config, "architectures", None) or ())

    def settled(self, workload: Workload) -> Workload:
        """One sample; 2048 tokens, or what the config has positions for; its type, or else fp32."""
        seq = workload.seq or min(SEQ, self._positions() or SEQ)
        return replace(
            workload,
            batch=workload.batch or 1,
            seq=seq if "seq" in self.takes else None,
            dtype=workload.dtype or self._dtype(),
        )

    def _dtype(self) -> str:
        """The type that the config names, which transformers loads a model in.

        Raises:
            MemPluginError: the weights are quantized, or of a type that is not ours to estimate.
        """
        if (quantized := _quantization(self.config)) is not None:
            raise MemPluginError(
                f"The config says that the weights are quantized ({quantized}): that is not built here.",
                where="TARGET",
                fix="Say --dtype bf16 to estimate it as it is without quantization.",
            )
        told = str(getattr(self.config, "dtype", None) or torch.float32).removeprefix("torch.")
        for name, dtype in DTYPES.items():
            if str(dtype) == f"torch.{told}":
                return name
        raise MemPluginError(
            f"The config asks for the type {told[:40]!r}.",
            where="TARGET",
            fix=f"Give --dtype, one of {', '.join(DTYPES)}.",
        )

    def build(self, workload: Workload, mesh: DeviceMesh | None = None) -> Built:
        """The model in the dtype asked for, or a rank's part of it, and inputs of the size.

        Raises:
            MemPluginError: it takes inputs that cannot be made from a config, would not end in time, or
                cannot be sharded like this.
        """
        self._refuse_long_loops(workload.seq or 1)
        if not workload.inference and hasattr(self.config, "use_cache"):
            self.config.use_cache = False
        model = self._model()
        inputs = self._inputs(workload.batch or 1, workload.seq or 1, labels=not workload.inference)
        if mesh is None:
            return Built(model, keywords=inputs, notes=self._notes(workload.seq))
        part, told = sharded(model, mesh)
        return Built(part, keywords=inputs, notes=(*self._notes(workload.seq), told), is_part=True)

    def _refuse_long_loops(self, seq: int) -> None:
        layers = getattr(self.config, "num_hidden_layers", 1)
        if getattr(self.config, "model_type", "") in LOOP_OVER_TOKENS and layers * seq > MOST_ROUNDS:
            raise MemPluginError(
                f"{self.model_class.__name__} loops over tokens in Python, {layers} layers x {seq:,} tokens: "
                "the estimate would take many minutes, and be that of the loop, not of a fused kernel.",
                where="--seq",
                fix=f"Give --seq {max(MOST_ROUNDS // layers, 1)} or less, and see how memory grows with it.",
            )

    def _model(self) -> nn.Module:
        """Without first values: they do not matter here, and some ways to draw them look at the draws."""
        with _no_first_values()():
            model: Any = self.model_class(self.config)
        device = torch.get_default_device()
        if any(one.device.type != device.type for one in model.parameters()):
            model.to(device)  # torch.FloatTensor, of old models, is always on the CPU
        model.tie_weights()
        return model  # type: ignore[no-any-return]  # every model of transformers is a module

    def _positions(self) -> int | None:
        text = getattr(self.config, "get_text_config", lambda: self.config)()
        names = ("max_position_embeddings", "n_positions", "max_target_positions")
        told = (getattr(text, name, None) for name in names)
        return next((count for count in told if isinstance(count, int) and count > 0), None)

    def _notes(self, seq: int | None) -> tuple[str, ...]:
        return tuple(self._said(seq))

    def _said(self, seq: int | None) -> Iterator[str]:
        """What is estimated otherwise than the config may let one expect."""
        most, model = self._positions(), self.model_class.__name__
        if most is not None and seq is not None and seq > most:
            yield f"{seq} tokens are more than the {most} positions of the config: a real run may fail there."
        if self._architectures and model not in self._architectures:
            named = ", ".join(self._architectures)[:80]
            yield f"The config names {named}, which transformers does not have: {model} is estimated."
        if (quantized := _quantization(self.config)) is not None:
            yield f"The config says that the weights are quantized ({quantized}): estimated without."
        others = [kind for kind in ("vision", "audio") if getattr(self.config, f"{kind}_config", None)]
        if others and self.model_class.main_input_name == "input_ids":
            yield (
                f"The model also takes {' and '.join(OTHER_INPUTS[kind] for kind in others)}; tokens alone "
                "are estimated: nothing runs in that part, and it has no gradients."
            )

    def _inputs(self, batch: int, seq: int, *, labels: bool) -> dict[str, torch.Tensor]:
        config, name = self.config, self.model_class.main_input_name
        if name == "input_ids":
            inputs = {name: torch.zeros(batch, seq, dtype=torch.long)}
        elif name == "pixel_values":
            image = getattr(config, "vision_config", config)
            side, channels = getattr(image, "image_size", IMAGE_SIDE), getattr(image, "num_channels", 3)
            sides = side if isinstance(side, (tuple, list)) else [side, side]
            inputs = {name: torch.zeros(batch, channels, *sides)}
        elif name == "input_features" and hasattr(config, "max_source_positions"):
            inputs = {name: torch.zeros(batch, config.num_mel_bins, 2 * config.max_source_positions)}
        else:
            raise MemPluginError(
                f"{self.model_class.__name__} takes {name!r}, whose size no config tells.",
                where="TARGET",
                fix="Write a function that returns (model, inputs), and give module:function.",
            )
        if getattr(config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = torch.zeros(batch, seq, dtype=torch.long)
        if labels and self.model_class.__name__.endswith(LABEL_PER_TOKEN):
            inputs["labels"] = torch.zeros(batch, seq, dtype=torch.long)
        elif labels and self.model_class.__name__.endswith(LABEL_PER_SAMPLE):
            inputs["labels"] = torch.zeros(batch, dtype=torch.long)
        return inputs


def _quantization(config: Any) -> str | None:
    """How weights are stored that are not numbers of a type alone, if the config says so."""
    told = getattr(config, "quantization_config", None)
    if told is None:
        return None
    method = told.get("quant_method") if isinstance(told, dict) else getattr(told, "quant_method", None)
    return str(getattr(method, "value", method) or "quantization_config")[:40]


def config_of_folder(path: Path) -> Any:
    """The config in a folder, or in a file of its own.

    Raises:
        MemPluginError: there is no config.json, or its model is not known to transformers.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise MemPluginError("The folder has no config.json.", where=str(path))
    try:
        return _transformers().AutoConfig.from_pretrained(
            str(file), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        said = (str(error).splitlines() or [""])[0][:300]
        raise MemPluginError(
            f"transformers cannot read the config: {said}",
            where=str(file),
            fix="Is its model_type one that this version of transformers has?",
        ) from error


def config_of_class(name: str) -> Any:
    """A config with the defaults of its class.

    Raises:
        MemPluginError: transformers has no such class.
    """
    transformers = _transformers()
    found = getattr(transformers, name, None)
    if isinstance(found, type):
        return found()
    near = nearest_configs(name)
    raise MemPluginError(
        f"transformers has no class {name[:80]!r}.",
        where="TARGET",
        fix=f"Did you mean {', '.join(near)}?" if near else "Give a folder with a config.json.",
    )


def nearest_configs(name: str) -> tuple[str, ...]:
    """Configs of transformers with names like one, or whose model it names; none without transformers."""
    with suppress(MemPluginError):
        known = [other for other in dir(_transformers()) if other.endswith("Config")]
        stem = _HEADS.split(name)[0] + "Config"
        return (stem,) if stem in known else tuple(difflib.get_close_matches(name, known, 3))
    return ()


def _no_first_values() -> Any:
    """`no_init_weights` of transformers, which moved in version 5."""
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
            fix='pip install "tb-memplugin[transformers]", or give module:function.',
        ) from error
    return transformers  # type: ignore[no-any-return]  # it is not followed
