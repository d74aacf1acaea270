"""One effective configuration: precedence, sources, and errors that name the place."""

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.configuration_loader import ConfigError, Configuration, load, without_settings
from deploy.sections import RENAMED, former_keys, read_settings
from deploy.sections import SECTIONS as REAL_SECTIONS
from deploy.terminal.command_settings import security_flags
from fleet.settings import NonNegative, Port, setting_types
from router.config import RouterConfig


@dataclass(frozen=True, slots=True)
class Door:
    host: str = "127.0.0.1"
    port: Port = 8000
    seconds: NonNegative = 2.5
    strict: bool = False
    key_file: Path | None = None
    backends: tuple[str, ...] = ()
    mode: Literal["fast", "safe"] = "fast"


@dataclass(frozen=True, slots=True)
class Bell:
    volume: int = 3

    def __post_init__(self) -> None:
        if self.volume > 11:
            raise ValueError(f"volume {self.volume} is too loud")


SECTIONS: Mapping[str, type] = {"door": Door, "bell": Bell}


def read(tmp_path: Path, text: str | None = None, **environment: str) -> Configuration:
    if text is not None:
        (tmp_path / "roost.toml").write_text(text)
    return load(SECTIONS, file=None, environment=environment, directory=tmp_path)


def sources(configuration: Configuration) -> dict[str, str]:
    return {f"{section}.{key}": setting.source for (section, key), setting in configuration.items()}


def test_without_file_and_variables_every_key_is_its_default(tmp_path: Path) -> None:
    configuration = read(tmp_path)
    assert configuration.part(Door) == Door()
    assert set(sources(configuration).values()) == {"default"}


def test_flags_beat_the_environment_which_beats_the_file_which_beats_the_defaults(tmp_path: Path) -> None:
    text = '[door]\nhost = "a"\nport = 1\nseconds = 1\n'
    configuration = read(tmp_path, text, ROOST_DOOR_HOST="b", ROOST_DOOR_PORT="2").with_flags(
        {("door", "host"): ("--host", "c"), ("bell", "volume"): ("--volume", None)}
    )
    assert configuration.part(Door) == Door(host="c", port=2, seconds=1.0)
    found = sources(configuration)
    assert (found["door.host"], found["door.port"], found["bell.volume"]) == (
        "--host",
        "ROOST_DOOR_PORT",
        "default",
    )
    assert found["door.seconds"] == f"{tmp_path / 'roost.toml'}:4"


def test_values_in_the_environment_are_read_by_the_type_of_their_key(tmp_path: Path) -> None:
    configuration = read(
        tmp_path,
        ROOST_DOOR_STRICT="true",
        ROOST_DOOR_BACKENDS="http://a, http://b",
        ROOST_DOOR_KEY_FILE="/keys",
        ROOST_DOOR_SECONDS="7",
        ROOST_DOOR_MODE="safe",
    )
    assert configuration.part(Door) == Door(
        strict=True, backends=("http://a", "http://b"), key_file=Path("/keys"), seconds=7.0, mode="safe"
    )
    assert read(tmp_path, ROOST_DOOR_KEY_FILE="").part(Door).key_file is None


def test_variables_of_vllms_workers_are_no_settings(tmp_path: Path) -> None:
    configuration = read(
        tmp_path, ROOST_AGENT="127.0.0.1:7200", ROOST_SECRET_FILE="/secret", ROOST_DOOR_MODE="safe"
    )
    assert configuration.part(Door).mode == "safe"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[door]\nprot = 1\n", ("roost.toml:2", "'prot'", "did you mean port?")),
        ("[dor]\nport = 1\n", ("roost.toml:1", "[dor]", "did you mean door?")),
        (
            '[bell]\nvolume = 3\n[door]\n\nport = "many"\n',
            ("roost.toml:5", "door.port", "must be a whole number", "'many'"),
        ),
        ("[door]\nport = true\n", ("roost.toml:2", "number", "true")),
        ('[door]\nmode = "slow"\n', ("roost.toml:2", "door.mode must be fast or safe, not 'slow'")),
        ("[bell]\nvolume = 12\n", ("[bell] volume 12 is too loud", "volume from", "roost.toml:2")),
        (
            "[door]\nport = 99999\n",
            ("roost.toml:2: door.port", "must be a whole number from 0 to 65535", "99999"),
        ),
        (
            "[door]\nseconds = inf\n",
            ("roost.toml:2: door.seconds", "must be a number of at least 0, not inf"),
        ),
        ("[door\n", ("roost.toml", "line 1")),
        ("door = 3\n", ("roost.toml:1", "must be a section")),
        ("door.prot = 3\n", ("roost.toml", "'prot'", "port")),
    ],
)
def test_a_bad_file_is_refused_with_place_and_remedy(
    tmp_path: Path, text: str, parts: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text).check()
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value", "parts"),
    [
        ("ROOST_DOOR_PROT", "1", ("ROOST_DOOR_PROT", "did you mean ROOST_DOOR_PORT?")),
        ("ROOST_DOOR_PORT", "many", ("ROOST_DOOR_PORT", "must be a whole number", "'many'")),
        ("ROOST_DOOR_PORT", "-1", ("ROOST_DOOR_PORT must be a whole number from 0 to 65535, not '-1'",)),
        ("ROOST_DOOR_SECONDS", "nan", ("ROOST_DOOR_SECONDS must be a number of at least 0, not 'nan'",)),
        ("ROOST_DOOR_STRICT", "perhaps", ("ROOST_DOOR_STRICT", "must be true or false", "'perhaps'")),
    ],
)
def test_a_bad_variable_is_refused_by_name(
    tmp_path: Path, variable: str, value: str, parts: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, **{variable: value})
    for part in parts:
        assert part in str(caught.value)


def test_a_file_that_was_asked_for_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml"):
        load(SECTIONS, file=tmp_path / "missing.toml", environment={}, directory=tmp_path)
    with pytest.raises(ConfigError, match=r"other\.toml"):
        read(tmp_path, ROOST_CONFIG=str(tmp_path / "other.toml"))


def test_a_wrong_flag_value_names_the_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--port must be a whole number from 0 to 65535, not 'x'"):
        read(tmp_path).with_flags({("door", "port"): ("--port", "x")})
    with pytest.raises(ConfigError, match=r"--seconds must be a number of at least 0, not -1\.0"):
        read(tmp_path).with_flags({("door", "seconds"): ("--seconds", -1.0)})


def test_the_printed_configuration_says_where_each_key_comes_from_and_marks_unset_ones(
    tmp_path: Path,
) -> None:
    printed = read(tmp_path, "[door]\nport = 1\n").as_toml()
    assert f"port = 1  # {tmp_path / 'roost.toml'}:2\n" in printed
    assert "# key_file is unset  # default\n" in printed
    nested = json.loads(read(tmp_path).as_json())
    assert nested["door"]["port"] == {"value": 1, "source": str(tmp_path / "roost.toml") + ":2"}


text_values = st.text(st.characters(exclude_categories=("Cs",)))


@given(
    host=text_values,
    backends=st.lists(text_values).map(tuple),
    seconds=st.floats(min_value=0, allow_infinity=False),
    strict=st.booleans(),
    port=st.integers(0, 65535),
)
def test_what_is_printed_reads_back_as_the_same_configuration(
    host: str, backends: tuple[str, ...], seconds: float, strict: bool, port: int
) -> None:
    values = {
        "host": host,
        "backends": backends,
        "seconds": seconds,
        "strict": strict,
        "port": port,
        "key_file": Path("/k"),
    }
    before = load(SECTIONS, file=None, environment={}, directory=Path("/nowhere")).with_flags(
        {("door", key): ("--x", value) for key, value in values.items()}
    )
    for sourced in (True, False):
        again = tomllib.loads(before.as_toml(sources=sourced, secrets=True))
        assert Door(
            **{
                **again["door"],
                "backends": tuple(again["door"]["backends"]),
                "key_file": Path(again["door"]["key_file"]),
            }
        ) == before.part(Door)


def test_children_do_not_inherit_settings_that_would_beat_their_file() -> None:
    assert without_settings({"ROOST_DOOR_PORT": "1", "ROOST_CONFIG": "x", "PATH": "/bin"}) == {"PATH": "/bin"}


@dataclass(frozen=True, slots=True)
class Window:
    name: str = field(default="", metadata={"section": True})
    width: int = 1

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"width must be above 0, not {self.width}")


@dataclass(frozen=True, slots=True)
class House:
    colour: str = "red"
    windows: tuple[Window, ...] = field(default=(), metadata={"sections": "windows"})


def read_house(tmp_path: Path, text: str, **environment: str) -> Configuration:
    (tmp_path / "roost.toml").write_text(text)
    return load({"house": House, "bell": Bell}, file=None, environment=environment, directory=tmp_path)


def test_any_number_of_named_sections_go_into_one_part_each_with_its_name(tmp_path: Path) -> None:
    text = '[windows.north]\nwidth = 3\n[house]\ncolour = "blue"\n[windows.south-2]\n'
    configuration = read_house(tmp_path, text, ROOST_WINDOWS_SOUTH_2_WIDTH="7")
    assert configuration.part(House) == House("blue", (Window("north", 3), Window("south-2", 7)))
    assert sources(configuration)["windows.north.width"].endswith("roost.toml:2")
    assert sources(configuration)["windows.south-2.width"] == "ROOST_WINDOWS_SOUTH_2_WIDTH"


def test_named_sections_outlive_being_written_and_read_again(tmp_path: Path) -> None:
    first = read_house(tmp_path, "[windows.north]\nwidth = 3\n")
    assert read_house(tmp_path, first.as_toml()).part(House) == first.part(House)
    assert json.loads(first.as_json())["windows.north"]["width"]["value"] == 3


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[windows.north]\nwidht = 3\n", "no key 'widht' in [windows.north]; did you mean width"),
        ("[windows.north]\nname = 'x'\n", "no key 'name' in [windows.north]"),
        ("[windows.north]\nwidth = 0\n", "[windows.north] width must be above 0, not 0"),
        ("[windows]\nnorth = 3\n", "written [windows.NAME]"),
        ('[windows."a/b"]\nwidth = 3\n', "NAME of letters, digits, - and _"),
        ("windows = 3\n", "written [windows.NAME]"),
        ("[house]\nwindows = []\n", "no key 'windows' in [house]"),
    ],
)
def test_what_is_wrong_in_a_named_section_is_refused_with_its_place(
    tmp_path: Path, text: str, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        read_house(tmp_path, text).check()


@pytest.mark.parametrize(("section", "key"), sorted(former_keys()))
def test_a_key_of_an_earlier_version_is_refused_with_what_to_do_instead(
    tmp_path: Path, section: str, key: str
) -> None:
    remedy = former_keys()[section, key]
    (tmp_path / "roost.toml").write_text(f"[{section}]\n{key} = 1\n")
    with pytest.raises(ConfigError) as caught:
        read_settings(None, {}, tmp_path)
    assert str(caught.value) == f"{tmp_path / 'roost.toml'}:2: {section}.{key} {remedy}"
    variable = f"ROOST_{section}_{key}".upper()
    with pytest.raises(ConfigError) as caught:
        read_settings(None, {variable: "1"}, tmp_path / "elsewhere")
    assert str(caught.value) == f"{variable} {remedy}"


def test_former_keys_are_keys_no_more_and_renamed_ones_have_a_successor() -> None:
    now = {(section, field) for section, kind in REAL_SECTIONS.items() for field in setting_types(kind)}
    assert not now & former_keys().keys()
    assert {(section, new) for (section, _), new in RENAMED.items()} <= now


@pytest.mark.parametrize(
    ("key", "remedy"), [("checkpoint", "name an existing folder"), ("placement", "name an existing file")]
)
def test_files_that_an_engine_begins_with_must_exist(tmp_path: Path, key: str, remedy: str) -> None:
    (tmp_path / "roost.toml").write_text(f'[engine]\n{key} = "/nowhere"\n')
    settings = read_settings(None, {}, tmp_path)
    with pytest.raises(ConfigError, match=rf"{key} = '/nowhere': {remedy}.*roost\.toml:2"):
        settings.check()


def test_a_path_on_the_command_line_is_relative_to_the_working_directory(tmp_path: Path) -> None:
    flags = security_flags("router", Path("cert.pem"), Path("key.pem"), terminated=False, insecure=False)
    router = read_settings(None, {}, tmp_path).with_flags(flags).part(RouterConfig)
    assert (router.tls_cert, router.tls_key) == (f"{Path.cwd()}/cert.pem", f"{Path.cwd()}/key.pem")


def test_a_switch_that_was_not_given_leaves_the_file_s_value(tmp_path: Path) -> None:
    file = tmp_path / "roost.toml"
    file.write_text("[router]\ninsecure = true\ntls_terminated = true\n")
    flags = security_flags("router", None, None, terminated=False, insecure=False)
    router = read_settings(file, {}, tmp_path).with_flags(flags).part(RouterConfig)
    assert router.insecure
    assert router.tls_terminated


def test_a_number_for_a_file_is_refused_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "roost.toml"
    file.write_text("[worker]\ntls_cert = 5\n")
    with pytest.raises(ConfigError, match=r"roost.toml:2: worker.tls_cert must be a file or unset, not 5"):
        read_settings(file, {}, tmp_path)
