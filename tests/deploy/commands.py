"""The `roost` command as tests run it."""

from typer.testing import CliRunner, Result

from deploy.cli.app import app


def roost(*arguments: str) -> Result:
    """Its result; an exception that a user would see as a traceback fails the test."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    assert "Traceback" not in result.output
    return result
