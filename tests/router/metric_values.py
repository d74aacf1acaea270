"""Values of metrics, as their library collects them."""

from prometheus_client import Counter, Gauge


def value_of(metric: Counter | Gauge) -> float:
    """Return the value of a metric without labels."""
    [family] = metric.collect()
    return float(family.samples[0].value)
