"""Settings under which a router in Dynamo would not work are refused, with the reason."""

from typing import Any

import pytest

from router.dynamo.config import DynamoConfig


def test_the_defaults_leave_dynamo_alone() -> None:
    config = DynamoConfig()
    assert (config.namespace, config.own_endpoint.path, config.shape) == (None, "roost.router.generate", None)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"endpoint": "roost.router"}, "must be namespace.component.endpoint"),
        ({"namespace": "roost"}, "would see both"),
        ({"layers": 2}, "belong together"),
        ({"routed_experts_share": 0.1}, "needs layers"),
        ({"routed_experts_share": 1.5, "layers": 1, "experts": 2, "top_k": 1}, "routed_experts_share"),
        ({"frontend_migration_limit": -1}, "frontend_migration_limit"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        DynamoConfig(**settings)
