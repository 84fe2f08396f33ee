"""`ModelConfig` of triton_python_backend_utils: what auto_complete_config of a model.py may add to config.pbtxt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_INPUT_PROPERTIES = ("name", "data_type", "dims", "optional")
_OUTPUT_PROPERTIES = ("name", "data_type", "dims")


class ModelConfig:
    """A configuration as a dictionary, with the fields of config.pbtxt. All methods raise ValueError.

    What config.pbtxt says stays: a method that contradicts it raises.
    """

    def __init__(self, model_config: str) -> None:
        self._model_config: dict[str, Any] = json.loads(model_config)

    def as_dict(self) -> dict[str, Any]:
        """Return the configuration."""
        return self._model_config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set it, at least as large as config.pbtxt has it."""
        own = self._model_config.get("max_batch_size", 0)
        if own > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {own}, but in auto-complete-config function for model"
                f" '{self._name}' specified max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Have requests joined to batches."""
        for other in ("sequence_batching", "ensemble_scheduling"):
            if other in self._model_config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{other}', but auto-complete-config function for"
                    f" model '{self._name}' tries to set scheduling_choice as 'dynamic_batching'"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, Any]) -> None:
        """Set whether requests may have any number of responses: {"decoupled": bool}."""
        for key in transaction_policy_dict:
            if key != "decoupled":
                raise ValueError(
                    "model transaction property in auto-complete-config function for model"
                    f" '{self._name}' contains property other than 'decoupled'."
                )
        policy = self._model_config.setdefault("model_transaction_policy", {})
        if "decoupled" in transaction_policy_dict:
            wanted = transaction_policy_dict["decoupled"]
            if policy.get("decoupled", wanted) != wanted:
                raise ValueError(
                    f"trying to change decoupled property in auto-complete-config for model '{self._name}',"
                    f" which is already set to '{policy['decoupled']}'."
                )
            policy["decoupled"] = wanted

    def add_input(self, input: dict[str, Any]) -> None:
        """Add an input: name, data_type, dims, and optional."""
        self._add("input", input, _INPUT_PROPERTIES)

    def add_output(self, output: dict[str, Any]) -> None:
        """Add an output: name, data_type, dims."""
        self._add("output", output, _OUTPUT_PROPERTIES)

    @property
    def _name(self) -> str:
        return str(self._model_config.get("name", ""))

    def _add(self, group: str, tensor: dict[str, Any], properties: tuple[str, ...]) -> None:
        where = f"in auto-complete-config function for model '{self._name}'"
        for key in tensor:
            if key not in properties:
                raise ValueError(f"{group} '{tensor.get('name')}' {where} contains property other than {properties}.")
        for key in ("name", "data_type", "dims"):
            if key not in tensor:
                title = f"{group} '{tensor['name']}'" if "name" in tensor else group
                raise ValueError(f"{title} {where} is missing '{key}' property.")
        own = self._model_config.setdefault(group, [])
        for known in own:
            if known["name"] == tensor["name"]:
                self._complete(group, known, tensor)
                return
        own.append(dict(tensor))

    def _complete(self, group: str, known: dict[str, Any], tensor: dict[str, Any]) -> None:
        """Complete a tensor of config.pbtxt, which may leave out type and dims."""
        unset = {"data_type": (None, "TYPE_INVALID"), "dims": (None, []), "optional": (None, False)}
        for key, given in tensor.items():
            if key == "name":
                continue
            value = list(given) if key == "dims" else given
            if known.get(key) not in unset[key] and known[key] != value:
                raise ValueError(
                    f"unable to load model '{self._name}', configuration expects {key} {known[key]} for {group}"
                    f" '{tensor['name']}', model provides {value}"
                )
            known[key] = value
