"""Ensembles and the models that they need: which are loaded first, and what becomes of an ensemble when one of these is
replaced, goes, or comes.

Lives here: who needs whom, and joining an ensemble with the versions that serve now. Must not: wait or load; that is
`repository`, which has the models that an ensemble `needs` loaded before it, and asks for `changes` after each load and
unload. The rule: an ensemble serves with those versions that requests to its models would find, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter

from paceline.server.errors import ConfigError, ServerError
from paceline.server.models.batch_policy import no_cache, own_settings
from paceline.server.models.ensemble_config import EnsembleInstance, EnsembleModel, most_at_once
from paceline.server.models.loader import LoadedVersion
from paceline.server.models.model_record import UNLOADED, ModelRecord
from paceline.server.models.pipeline import Pipeline
from paceline.server.models.served_model import ServedModel

Joined = tuple[LoadedVersion, Pipeline | None]
Records = Mapping[str, ModelRecord[ServedModel]]


class Ensembles:
    """Those among `records`. `find` gives the version that requests find, or raises ServerError."""

    def __init__(self, records: Records, find: Callable[[str, str], ServedModel]) -> None:
        self._records = records
        self._find = find
        # What was loaded of each ensemble that is to serve; it stays while a model that it needs is missing.
        self._loaded: dict[str, Sequence[LoadedVersion]] = {}

    def learn(self, name: str, loaded: Sequence[LoadedVersion]) -> Sequence[LoadedVersion]:
        """`name` is to serve `loaded` from now on, which may be no ensemble. Returns which one it was to serve before.
        Raises ConfigError for one that needs itself, maybe by way of others."""
        before = self._loaded.pop(name, ())
        if any(isinstance(one.opened, EnsembleModel) for one in loaded):
            self._loaded[name] = loaded
        try:
            self._in_order()
        except CycleError as error:
            self.learn(name, before)
            circle: list[str] = error.args[1][:0:-1]  # each needs the next one, and the last the first
            at = circle.index(name)
            way = " -> ".join((*circle[at:], *circle[:at], name))
            raise ConfigError(f"circular dependency between ensembles: {way}") from None
        return before

    def forget(self, name: str) -> None:
        """`name` isn't to serve any more."""
        self._loaded.pop(name, None)

    def needs(self, name: str) -> Sequence[str]:
        """The models that the ensemble `name` needs itself; none if it is no ensemble."""
        return list(dict.fromkeys(need for one in self._loaded.get(name, ()) for need in _needs(one)))

    def is_needed(self, name: str) -> bool:
        return any(name in self.needs(one) for one in self._loaded)

    def joined(self, loaded: Sequence[LoadedVersion]) -> list[Joined]:
        """Versions with the models that execute them. Raises ConfigError if one can't be executed."""
        return [self._join(one) for one in loaded]

    def changes(self) -> Iterator[tuple[str, list[Joined] | ConfigError | None]]:
        """The ensembles that have to change, those after which others have to first: as what they serve now, or why
        they can't, None if that is because a model was unloaded. They have to have changed when the next is asked
        for."""
        for name in self._in_order():
            record, loaded = self._records[name], self._loaded[name]
            if record.turn.locked() or self._is_current(name):
                continue  # a load in progress looks for itself
            needed = [self._records[need] for need in self.needs(name) if need in self._records]
            if any(one.unloaded and not one.serving for one in needed):
                if record.serving:
                    yield name, None
                continue
            try:
                joined = self.joined(loaded)
            except ConfigError as error:
                if record.serving or record.failure != str(error):
                    yield name, error
            else:
                yield name, joined

    def _is_current(self, name: str) -> bool:
        serving = self._records[name].serving.values()
        try:
            return bool(serving) and all(
                one.pipeline is not None and one.pipeline.is_current(self._find) for one in serving
            )
        except ServerError:
            return False

    def _in_order(self) -> list[str]:
        """All ensembles, each after those that it needs. Raises CycleError."""
        needs = {name: self.needs(name) for name in self._loaded}
        return [name for name in TopologicalSorter(needs).static_order() if name in needs]

    def _join(self, loaded: LoadedVersion) -> Joined:
        if not isinstance(loaded.opened, EnsembleModel):
            return loaded, None
        self._check_there(loaded)
        pipeline = Pipeline(loaded, loaded.opened.steps, self._find)
        # Of its own: what was loaded once is joined again and again, and who is replaced stops its instances while its
        # successor's execute.
        instances = tuple(EnsembleInstance() for _ in range(most_at_once(loaded.config)))
        loaded = replace(loaded, labels={**pipeline.labels, **loaded.labels}, instances=instances)
        if not pipeline.decoupled:
            return loaded, pipeline
        if loaded.config.response_cache.enable:
            raise no_cache(loaded.name, "'decoupled' transaction policy", "as one of its steps answers more than once")
        config = deepcopy(loaded.config)
        config.model_transaction_policy.decoupled = True
        policy = replace(loaded.plan.policy, isolate_failures=False)
        plan = replace(loaded.plan, policy=policy, most_open=own_settings(config).max_open_requests, decoupled=True)
        return replace(loaded, config=config, plan=plan), pipeline

    def _check_there(self, loaded: LoadedVersion) -> None:
        """Raise ConfigError unless all models that it needs serve."""
        assert isinstance(loaded.opened, EnsembleModel)
        name = loaded.name
        unknown = [one for one in _needs(loaded) if one not in self._records]
        if unknown:
            what = f"models that are not available or ambiguous: {', '.join(unknown)}"
            expected = "expected them in the model repository; give the folder that holds them all, or each as a path"
            raise ConfigError(f"ensemble {name} contains {what}; {expected}")
        for step in loaded.opened.steps:
            record = self._records[step.model]
            if not record.serving:
                text = f"ensemble '{name}' depends on '{step.model}' which has no loaded version"
                why = record.failure or (UNLOADED if record.unloaded else "it was never loaded")
                raise ConfigError(f"{text}. Model '{step.model}' loading failed with error: {why}")
            if step.version and step.version not in record.serving:
                text = f"ensemble '{name}' depends on '{step.model}' whose required version {step.version}"
                raise ConfigError(f"{text} is not loaded; it serves {list(record.serving)}")


def _needs(loaded: LoadedVersion) -> Sequence[str]:
    return loaded.opened.models if isinstance(loaded.opened, EnsembleModel) else ()
