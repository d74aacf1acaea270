"""Generated pages are what `make docs` would write now."""

from docs import make_before_buying, make_engines, make_openapi, make_settings


def test_the_page_of_settings_is_what_its_script_writes() -> None:
    assert make_settings.FILE.read_text() == make_settings.page(), "run `make docs`"


def test_the_http_api_is_what_its_script_writes() -> None:
    assert make_openapi.FILE.read_text() == make_openapi.document(), "run `make docs`"


def test_the_page_before_buying_is_what_its_script_writes() -> None:
    assert make_before_buying.FILE.read_text() == make_before_buying.page(), "run `make docs`"


def test_the_page_of_engines_is_what_its_script_writes() -> None:
    assert make_engines.FILE.read_text() == make_engines.page(), "run `make docs`"


def test_every_key_has_a_line_with_its_type_default_and_meaning() -> None:
    page = make_settings.page()
    assert "| `namespace` | text | `'roost'` | first token of every subject" in page
    assert "## `[backends.NAME]`" in page
    assert "| `checkpoint` | a file or unset | the demo model |" in page
