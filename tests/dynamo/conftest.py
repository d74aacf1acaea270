"""Tests with a real Dynamo run where ROOST_DYNAMO_PYTHON names the Python of its environment: `make
test-dynamo` does that. `make test` collects none of them."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.dynamo.deployment import DynamoDeployment

collect_ignore_glob = [] if os.environ.get("ROOST_DYNAMO_PYTHON") else ["test_*.py"]


@pytest_asyncio.fixture
async def dynamo(tmp_path: Path) -> AsyncIterator[DynamoDeployment]:
    """A deployment without processes: file discovery, TCP requests, ZMQ events."""
    async with DynamoDeployment(tmp_path) as deployment:
        yield deployment
