"""roost.toml: one effective configuration from defaults, file, environment and flags. Every key has a source.

Precedence, lowest first: the defaults of each part's config dataclass, the file (--config, or ./roost.toml if
it exists), the variables ROOST_<SECTION>_<KEY>, the command's flags. An unknown key, an unknown section and a
wrong type are errors that name the place and the nearest known name. Environment values are text: lists are
split at commas, and an empty value means "unset" where a key may be unset.

A dataclass field with the metadata {"sections": "backends"} collects any number of sections [backends.NAME].
Each is a dataclass whose field with the metadata {"section": True} takes NAME. Only the file creates such
sections; variables (ROOST_BACKENDS_<NAME>_<KEY>) change keys of existing ones.
"""

import dataclasses
import difflib
import json
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fleet.redaction import without_secrets
from fleet.settings import converted, setting_types

FILE = "roost.toml"
PREFIX = "ROOST_"
FILE_VARIABLE = "ROOST_CONFIG"
"""Variable with the path of the file; the flag overrides it."""
OTHER_VARIABLES = (
    "ROOST_AGENT",
    "ROOST_SECRET_FILE",
    "ROOST_FALLBACK",
    "ROOST_ASYNC",
    "ROOST_PATIENCE_SECONDS",
    "ROOST_VLLM_PYTHON",
)
"""Variables that are no settings: those of the plugin in vLLM's workers, and the environment that tests start
vLLM in. They may be set where Roost runs, too."""

Part = TypeVar("Part")
Key = tuple[str, str]
"""(section, key)"""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TABLE = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(?:#.*)?")


Checks = Mapping[type, Callable[[Any], None]]


class ConfigError(Exception):
    """Unusable configuration; the text names key, place and remedy."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Value of one key and its source: "default", "roost.toml:12", "ROOST_ROUTER_PORT" or "--port"."""

    value: Any
    source: str


class Configuration:
    """Effective settings of all sections, and the config dataclasses built from them."""

    def __init__(self, sections: Mapping[str, type], settings: Mapping[Key, Setting], checks: Checks) -> None:
        self._sections = dict(sections)
        self._settings = dict(settings)
        self._checks = checks

    def part(self, kind: type[Part]) -> Part:
        """Build the config dataclass of one section. Raises ConfigError if the dataclass rejects the
        values."""
        return self._built(next(section for section, known in self._sections.items() if known is kind), kind)

    def _built(self, name: str, kind: type[Part]) -> Part:
        chosen = {key: setting for (section, key), setting in self._settings.items() if section == name}
        values = {key: setting.value for key, setting in chosen.items()}
        for field in dataclasses.fields(kind):  # type: ignore[arg-type]
            if "sections" in field.metadata:
                family = f"{field.metadata['sections']}."
                values[field.name] = tuple(
                    self._built(one, of) for one, of in self._sections.items() if one.startswith(family)
                )
            elif "section" in field.metadata:
                values[field.name] = name.partition(".")[2]
        try:
            part = kind(**values)
            self._checks.get(kind, _accept)(part)
        except ValueError as error:
            places = ", ".join(
                f"{key} from {setting.source}"
                for key, setting in chosen.items()
                if setting.source != "default"
            )
            raise ConfigError(f"[{name}] {error}" + (f" ({places})" if places else "")) from error
        return part

    def check(self, *kinds: type) -> None:
        """Build these parts (default: all) to reject invalid values before anything starts."""
        for kind in kinds or self._sections.values():
            self.part(kind)

    def items(self) -> Iterator[tuple[Key, Setting]]:
        """Iterate over all settings, in the order of sections and fields."""
        return iter(self._settings.items())

    def with_flags(self, flags: Mapping[Key, tuple[str, Any]]) -> "Configuration":
        """Return a copy with command-line values: {(section, key): (flag, value)}; the value None means not
        given. Paths are relative to the working directory, not to a settings file: they are made
        absolute."""
        settings = dict(self._settings)
        for (section, key), (flag, value) in flags.items():
            if value is not None:
                hint = setting_types(self._sections[section])[key]
                given = value.absolute() if isinstance(value, Path) else value
                settings[section, key] = Setting(_converted(given, hint, flag), flag)
        return Configuration(self._sections, settings, self._checks)

    def as_toml(self, *, sources: bool = True, secrets: bool = False) -> str:
        """Return the effective roost.toml. Unset keys become comments, since TOML has no null.

        secrets: include the passwords in URLs, for a file that only its owner may read.
        """
        settings = self._settings if secrets else _shown(self._settings)
        return "\n".join(_toml_lines(settings, sources)) + "\n"

    def as_json(self) -> str:
        """Return {section: {key: {"value", "source"}}}."""
        nested: dict[str, dict[str, Any]] = {}
        for (section, key), setting in _shown(self._settings).items():
            nested.setdefault(section, {})[key] = {"value": setting.value, "source": setting.source}
        return msgspec.json.encode(nested, enc_hook=str).decode()


def _accept(part: Any) -> None:
    """Accept any value: the check of parts that need no files."""


def load(
    sections: Mapping[str, type],
    *,
    file: Path | None,
    environment: Mapping[str, str],
    directory: Path,
    defaults: Mapping[Key, Any] | None = None,
    checks: Checks | None = None,
    former: Mapping[Key, str] | None = None,
) -> Configuration:
    """Read defaults, file and environment.

    file: the value of --config; None: the variable's value, or roost.toml in `directory`. defaults: override
    those of the dataclasses. checks: by config dataclass; raise ValueError for missing files. former: keys of
    earlier versions, with what to do instead. Raises ConfigError for an unreadable or malformed file, for
    unknown and former keys and variables, and for values that a key does not allow.
    """
    path = _chosen_file(file, environment, directory)
    text, tables = ("", {}) if path is None else _read(path)
    if path is not None:
        tables, named = _named_sections(sections, tables, path, text)
        sections = {**sections, **named}
    settings = dict(_defaults(sections))
    settings.update({key: Setting(value, "default") for key, value in (defaults or {}).items()})
    if path is not None:
        settings.update(_from_file(sections, tables, path, text, former or {}))
    settings.update(_from_environment(sections, environment, former or {}))
    return Configuration(sections, settings, checks or {})


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a child that gets its settings by file: ROOST_ variables would override the
    file."""
    return {name: value for name, value in environment.items() if not name.startswith(PREFIX)}


def _defaults(sections: Mapping[str, type]) -> Iterator[tuple[Key, Setting]]:
    for section, kind in sections.items():
        for field in _settable(kind):
            value = (
                field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
            )
            if value is dataclasses.MISSING:
                raise TypeError(f"{kind.__name__}.{field.name} needs a default: roost.toml may be empty")
            yield (section, field.name), Setting(value, "default")


def _settable(kind: type) -> "list[dataclasses.Field[Any]]":
    """Return the keys of a section: all fields except those that hold whole sections or their names."""
    return [
        field for field in dataclasses.fields(kind) if not {"sections", "section"} & field.metadata.keys()
    ]


def _chosen_file(file: Path | None, environment: Mapping[str, str], directory: Path) -> Path | None:
    if file is None and environment.get(FILE_VARIABLE):
        file = Path(environment[FILE_VARIABLE])
    if file is not None:
        return file
    return directory / FILE if (directory / FILE).is_file() else None


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
        return text, tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from error


def _named_sections(
    sections: Mapping[str, type], tables: dict[str, Any], path: Path, text: str
) -> tuple[dict[str, Any], dict[str, type]]:
    """Flatten [FAMILY.NAME] tables into sections of their own. Returns the tables and the dataclasses of the
    new sections."""
    families: dict[str, type] = {}
    for kind in sections.values():
        for field in dataclasses.fields(kind):
            if "sections" in field.metadata:
                families[field.metadata["sections"]] = typing.get_args(setting_types(kind)[field.name])[0]
    flat, named = {section: table for section, table in tables.items() if section not in families}, {}
    for family, kind in families.items():
        for name, table in (
            tables.get(family, {}).items() if isinstance(tables.get(family, {}), dict) else [("", None)]
        ):
            if not isinstance(table, dict) or not _NAME.fullmatch(name):
                place = _place(path, text, family, name or None)
                raise ConfigError(
                    f"{place}: {family} are separate sections, written [{family}.NAME], NAME of letters,"
                    " digits, - and _"
                )
            flat[f"{family}.{name}"], named[f"{family}.{name}"] = table, kind
    return flat, named


def _from_file(
    sections: Mapping[str, type],
    tables: Mapping[str, Any],
    path: Path,
    text: str,
    former: Mapping[Key, str],
) -> dict[Key, Setting]:
    found: dict[Key, Setting] = {}
    for section, table in tables.items():
        _known(section, sections, f"{_place(path, text, section, None)}: no section [{section}]")
        if not isinstance(table, dict):
            raise ConfigError(
                f"{_place(path, text, '', section)}: {section} must be a section, written [{section}]"
            )
        keys, hints = {field.name for field in _settable(sections[section])}, setting_types(sections[section])
        for key, value in table.items():
            place = _place(path, text, section, key)
            if (section, key) in former:
                raise ConfigError(f"{place}: {section}.{key} {former[section, key]}")
            _known(key, keys, f"{place}: no key {key!r} in [{section}]")
            found[section, key] = Setting(_converted(value, hints[key], f"{place}: {section}.{key}"), place)
    return found


def _from_environment(
    sections: Mapping[str, type], environment: Mapping[str, str], former: Mapping[Key, str]
) -> dict[Key, Setting]:
    names = {
        variable_of(section, field.name): (section, field.name)
        for section, kind in sections.items()
        for field in _settable(kind)
    }
    remedies = {variable_of(*key): remedy for key, remedy in former.items()}
    found: dict[Key, Setting] = {}
    for variable, text in sorted(environment.items()):
        if variable.startswith(PREFIX) and variable not in (FILE_VARIABLE, *OTHER_VARIABLES):
            if variable in remedies:
                raise ConfigError(f"{variable} {remedies[variable]}")
            _known(variable, names, f"environment: no setting {variable}")
            section, key = names[variable]
            hint = setting_types(sections[section])[key]
            found[section, key] = Setting(
                _converted(_from_text(text, hint), hint, variable, strict=False), variable
            )
    return found


def variable_of(section: str, key: str) -> str:
    """Return the name of the environment variable that sets a key."""
    return f"{PREFIX}{section}_{key}".upper().replace(".", "_").replace("-", "_")


def _known(name: str, names: Iterable[str], complaint: str) -> None:
    names = list(names)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        raise ConfigError(
            complaint + (f"; did you mean {near[0]}?" if near else f"; known: {', '.join(sorted(names))}")
        )


def _place(path: Path, text: str, section: str, key: str | None) -> str:
    """Return file:line of a key, or of its section header (key None). The line is omitted for TOML syntax
    that hides it."""
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        head = _TABLE.fullmatch(line)
        if head:
            table = head[1]
        if (key is None and head and table == section) or (
            key and table == section and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=", line)
        ):
            return f"{path}:{number}"
    return str(path)


def _converted(value: Any, hint: Any, name: str, *, strict: bool = True) -> Any:
    try:
        return converted(
            str(value) if isinstance(value, Path) else value, hint, strict=strict, dec_hook=_path
        )
    except ValueError as error:
        raise ConfigError(f"{name} {error}, not {_shown_value(value)}") from None


def _shown_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(_without_secrets(value))


def _path(kind: type, value: Any) -> Any:
    if kind is not Path:
        raise NotImplementedError(f"settings of type {kind}")
    if not isinstance(value, str | Path):
        raise TypeError("not a path")  # msgspec turns it into its validation error
    return Path(value)


def _options(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _from_text(text: str, hint: Any) -> Any:
    options = _options(hint)
    if not text and type(None) in options:
        return None
    if any(typing.get_origin(option) in (tuple, list) for option in options):
        return [item.strip() for item in text.split(",") if item.strip()]
    return text


def _shown(settings: Mapping[Key, Setting]) -> dict[Key, Setting]:
    """Return the settings without the secrets in URLs."""
    return {
        key: dataclasses.replace(setting, value=_without_secrets(setting.value))
        for key, setting in settings.items()
    }


def _without_secrets(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_without_secrets(item) for item in value)
    return without_secrets(value) if isinstance(value, str) else value


def _toml_lines(settings: Mapping[Key, Setting], sources: bool) -> Iterator[str]:
    current = ""
    for (section, key), setting in settings.items():
        if section != current:
            yield f"[{section}]" if not current else f"\n[{section}]"
            current = section
        line = f"# {key} is unset" if setting.value is None else f"{key} = {_toml(setting.value)}"
        yield f"{line}  # {setting.source}" if sources else line


def _toml(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, str | Path):
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value).lower() if isinstance(value, bool) else repr(value)
