"""A model's configuration: as its `auto_complete_config` gets it and completes it, and as its code reads it.

Lives here: the object and its checks, which are Triton's. Must not: anything about what a configuration means; the
server finds that out. The rule: what the user has configured isn't changed; a contradiction raises ValueError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "ModelConfig",
    "get_input_config_by_name",
    "get_output_config_by_name",
    "using_decoupled_model_transaction_policy",
]

Config = Mapping[str, Any]
"""A model's configuration, as its JSON has it."""

_SCHEDULERS = ("sequence_batching", "ensemble_scheduling")


class ModelConfig:
    """A configuration to be completed."""

    def __init__(self, model_config: str) -> None:
        self._config: dict[str, Any] = json.loads(model_config)
        for kind in ("input", "output"):
            self._config.setdefault(kind, [])

    def as_dict(self) -> dict[str, Any]:
        """The configuration as it stands, by its fields' names."""
        return self._config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        configured = self._config.get("max_batch_size", 0)
        if configured > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {configured}, but {self._where} specified max_batch_size "
                f"{max_batch_size}"
            )
        self._config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Combine requests, unless it is configured how."""
        for other in _SCHEDULERS:
            if other in self._config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{other}', but {self._where} tries to set "
                    "scheduling_choice as 'dynamic_batching'"
                )
        self._config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, Any]) -> None:
        """Say whether the model is decoupled."""
        if others := [key for key in transaction_policy_dict if key != "decoupled"]:
            raise ValueError(
                f"model transaction property in {self._where} contains property other than 'decoupled': {others}"
            )
        policy = self._config.setdefault("model_transaction_policy", {})
        for key, value in transaction_policy_dict.items():
            if policy.get(key, value) != value:
                raise ValueError(
                    f"trying to change decoupled property in {self._where}, which is already set to '{policy[key]}'"
                )
            policy[key] = value

    def add_input(self, input: Mapping[str, Any]) -> None:
        """Add an input of `name`, `data_type` and `dims`, maybe `optional`, or complete it if it is there."""
        self._add("input", input, ("name", "data_type", "dims", "optional"))

    def add_output(self, output: Mapping[str, Any]) -> None:
        """The same for an output of `name`, `data_type` and `dims`."""
        self._add("output", output, ("name", "data_type", "dims"))

    @property
    def _where(self) -> str:
        return f"auto-complete-config function for model '{self._config.get('name', '')}'"

    def _add(self, kind: str, tensor: Mapping[str, Any], allowed: Sequence[str]) -> None:
        for key in ("name", "data_type", "dims"):
            if key not in tensor:
                raise ValueError(f"{kind} in {self._where} is missing '{key}' property")
        name = tensor["name"]
        if others := [key for key in tensor if key not in allowed]:
            raise ValueError(f"{kind} '{name}' in {self._where} contains property other than {allowed}: {others}")
        there = next((one for one in self._config[kind] if one["name"] == name), None)
        if there is None:
            self._config[kind].append(dict(tensor))
            return
        for key in ("data_type", "dims", "optional"):
            configured = there.get(key)
            is_open = configured in (None, "TYPE_INVALID", []) or key not in tensor
            if not is_open and configured != tensor[key]:
                raise ValueError(
                    f"unable to load model '{self._config.get('name', '')}': {kind} '{name}': configuration expects "
                    f"{key} {configured}, model provides {tensor[key]}"
                )
        there.update(tensor)


def get_input_config_by_name(model_config: Config, name: str) -> Any:
    """The entry of an input in the configuration; None if there is none."""
    return next((one for one in model_config.get("input", ()) if one["name"] == name), None)


def get_output_config_by_name(model_config: Config, name: str) -> Any:
    """The entry of an output in the configuration; None if there is none."""
    return next((one for one in model_config.get("output", ()) if one["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: Config) -> bool:
    """Whether the configuration says that the model is decoupled."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))
