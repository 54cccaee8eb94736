"""How a config is loaded from a Python file, overridden from the command line, and saved as JSON.

A config file has ``get_config() -> Config``, or ``get_config(path)``, which is given ``--config.data.path``. Any field
can be overridden: ``--config configs/quickstart.py --config.optimizer.learning_rate=3e-4``. Whatever is wrong with
either is a ``ConfigError`` of one sentence that names the field, the value and the nearest right one.
"""

import ast
import dataclasses
import importlib.util
import inspect
import json
import pathlib
import typing
from collections.abc import Sequence
from typing import Any, Literal

from recml_sasrec.config import Config, ConfigError, field_names
from recml_sasrec.config_checks import checked, describe, nearest, validate


def load_config(path: str, overrides: Sequence[str] = ()) -> Config:
    """Runs the file's ``get_config()``, applies ``section.field=value`` overrides and validates the result.

    Raises:
        ConfigError: with one sentence on whatever is wrong.
    """
    values = []
    for override in overrides:
        name, equals, value = override.partition("=")
        if not equals:
            raise ConfigError(f"override {override!r} has no value; write --config.{name}=VALUE")
        values.append((name, value))
    config = _import_config(path, dict(values).get("data.path", ""))
    for name, value in values:
        set_field(config, name, value)
    validate(config)
    return config


def _import_config(path: str, data_path: str) -> Config:
    file = pathlib.Path(path)
    if not file.is_file():
        siblings = sorted(str(p) for p in file.parent.glob("*.py")) if file.parent.is_dir() else []
        near = nearest(path, siblings)
        hint = f"; did you mean {near!r}?" if near else "; run from the folder that holds configs/"
        raise ConfigError(f"config file {path!r} does not exist{hint}")
    spec = importlib.util.spec_from_file_location("recml_sasrec_config", file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"config file {path!r} is not a Python file; it must end in .py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        if not inspect.signature(module.get_config).parameters:
            config = module.get_config()
        elif data_path:
            config = module.get_config(data_path)
        else:
            raise ConfigError(
                f"config file {path!r} needs the data it is for; give --config.data.path=FOLDER, what "
                "python -m recml_sasrec.prepare --output wrote"
            )
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # whatever a user's file raises is a fault of that file
        reason = (str(error).strip().splitlines() or ["no message"])[0]
        raise ConfigError(f"config file {path!r} failed with {type(error).__name__}: {reason}") from error
    if not isinstance(config, Config):
        raise ConfigError(f"get_config() of {path!r} returned {type(config).__name__}; it must return Config")
    return config


def set_field(config: Config, name: str, value: str) -> None:
    """Sets the field with a dotted name from its command-line text, in place.

    Raises:
        ConfigError: unknown field or a value of the wrong type.
    """
    node, leaf, hint = _find(config, name)
    setattr(node, leaf, _parse(name, value, hint))


def set_value(config: Config, name: str, value: Any) -> None:
    """Sets the field with a dotted name to a value, such as JSON gives, in place.

    Raises:
        ConfigError: unknown field or a value of the wrong type.
    """
    node, leaf, hint = _find(config, name)
    setattr(node, leaf, checked(name, value, hint))


def _find(config: Config, name: str) -> tuple[Any, str, Any]:
    """The section that holds the field with a dotted name, the field's own name and its type."""
    *sections, leaf = name.split(".")
    node: Any = config
    for depth, section in enumerate((*sections, leaf)):
        hints = typing.get_type_hints(type(node))
        if section not in hints:
            raise ConfigError(_unknown_field(config, name))
        is_section = dataclasses.is_dataclass(hints[section])
        if is_section == (depth == len(sections)):
            kind = "a section, not a field" if is_section else "a field, not a section"
            raise ConfigError(f"config.{name}: {section!r} is {kind}; {_unknown_field(config, name)}")
        if is_section:
            node = getattr(node, section)
    return node, leaf, hints[leaf]


def _unknown_field(config: Config, name: str) -> str:
    names = list(field_names(config))
    by_leaf = {n.rpartition(".")[2]: n for n in names}
    near = nearest(name, names) or by_leaf.get(nearest(name.rpartition(".")[2], list(by_leaf)) or "")
    hint = f"did you mean config.{near}?" if near else f"sections are {', '.join(_to_dict(config))}"
    return f"config.{name} does not exist; {hint}"


def _parse(name: str, text: str, hint: Any) -> Any:
    """The value of a field's type that a command-line text stands for."""
    if hint is str or typing.get_origin(hint) is Literal:
        return checked(name, text, hint)
    if hint is bool:
        words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        if text.lower() not in words:
            raise ConfigError(f"config.{name}={text} is not a truth value; write true or false")
        return words[text.lower()]
    if typing.get_origin(hint) is tuple and typing.get_origin(typing.get_args(hint)[0]) is Literal:
        names = (word.strip("()[]'\" ") for word in text.split(","))  # ('a', 'b'), or plainly a,b
        return checked(name, [word for word in names if word], hint)
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise ConfigError(f"config.{name}={text} is not {describe(hint)}") from None
    return checked(name, value, hint)


def _to_dict(config: Config) -> dict[str, Any]:
    return dataclasses.asdict(config)


def to_json(config: Config) -> str:
    """The config as indented JSON, every field spelled out."""
    return json.dumps(_to_dict(config), indent=2) + "\n"


def from_json(text: str) -> Config:
    """The inverse of ``to_json``; fields that the text lacks take their defaults.

    Raises:
        ConfigError: the text is not a config.
    """
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"the saved config is not JSON ({error}); delete the run's folder and train again") from None
    config = Config()
    _fill(config, config, tree, "")
    validate(config)
    return config


def _fill(config: Config, node: Any, tree: dict[str, Any], prefix: str) -> None:
    if not isinstance(tree, dict):
        raise ConfigError(f"the saved config holds {tree!r} for config.{prefix.rstrip('.')}; it must be a section")
    hints = typing.get_type_hints(type(node))
    for name, value in tree.items():
        if name not in hints:
            raise ConfigError(_unknown_field(config, prefix + name))
        if dataclasses.is_dataclass(hints[name]):
            _fill(config, getattr(node, name), value, f"{prefix}{name}.")
        else:
            if prefix + name == "evaluation.metric_version" and value in ("yambda_v1", "yambda_v2"):
                value = value.removeprefix("yambda_")  # as earlier runs saved it
            setattr(node, name, checked(prefix + name, value, hints[name]))
