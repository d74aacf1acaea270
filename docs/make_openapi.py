"""Write docs/openapi.yaml, the router's HTTP API: python docs/make_openapi.py

It is the document that a router serves at /openapi.json.
"""

import sys
from pathlib import Path

import yaml

FILE = Path(__file__).with_name("openapi.yaml")
sys.path.insert(0, str(FILE.parents[1]))

from bus.protocol.subjects import Subjects  # noqa: E402 the repository need not be installed
from router.api.app import create_app  # noqa: E402
from router.config import RouterConfig  # noqa: E402
from router.service import RouterService  # noqa: E402


def document() -> str:
    """Return the API as YAML."""
    app = create_app(RouterService(None, Subjects("docs"), RouterConfig()))
    return yaml.safe_dump(app.openapi(), sort_keys=False, allow_unicode=True, width=110)


if __name__ == "__main__":
    FILE.write_text(document())
