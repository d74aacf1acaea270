"""Place of a worker in a Dynamo deployment, as `--dynamo NAMESPACE[.COMPONENT]` names it. Pure."""

import re
from typing import NamedTuple

COMPONENT = "backend"
PREFILL_COMPONENT = "prefill"
"""Component of prefill workers, as in Dynamo: those of another role need another endpoint."""
ENDPOINT = "generate"
_NAME = re.compile(r"[A-Za-z0-9_-]+")


class DynamoAddress(NamedTuple):
    """Namespace and component that a worker joins. Its endpoint is called `generate`, as Dynamo's own workers
    call theirs."""

    namespace: str
    component: str = COMPONENT

    @property
    def endpoint(self) -> str:
        """Path of the endpoint in discovery: NAMESPACE.COMPONENT.generate."""
        return f"{self.namespace}.{self.component}.{ENDPOINT}"

    @classmethod
    def parse(cls, text: str, component: str = COMPONENT) -> "DynamoAddress":
        """Parse NAMESPACE or NAMESPACE.COMPONENT. component: where the text names none. ValueError names the
        part that is no name."""
        parts = text.split(".")
        wrong = next((part for part in parts if not _NAME.fullmatch(part)), None)
        if wrong is not None or len(parts) > 2:
            raise ValueError(
                f"dynamo = {text!r} must be NAMESPACE or NAMESPACE.COMPONENT, of letters, digits, - and _,"
                " e.g. dynamo or dynamo.backend"
            )
        return cls(parts[0], parts[1] if len(parts) > 1 else component)
