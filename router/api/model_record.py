"""Models as `/v1/models` lists them, in OpenAI's form."""

from typing import Any

from router.service import RouterService


def model_list(service: RouterService) -> dict[str, Any]:
    """Return the models that a live engine serves."""
    return {
        "object": "list",
        "data": [model_record(service, name) for name in service.view.models(live=True)],
    }


def model_record(service: RouterService, name: str) -> dict[str, Any]:
    """Return a model's entry: that of a static backend unchanged (root, parent, permission, created,
    max_model_len), else Roost's own.
    """
    card = service.backends.card(name)
    if card is not None:
        return card
    return {
        "id": name,
        "object": "model",
        "created": service.started_at,
        "owned_by": "roost",
        "max_model_len": service.view.target_table(name).largest_context,
    }
