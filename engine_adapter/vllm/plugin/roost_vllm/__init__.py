"""vLLM plugin of Roost.

It runs in every worker process of a vLLM with expert parallelism. It connects out to Roost's agent
(`ROOST_AGENT`, `ROOST_SECRET_FILE`), reports expert demand, and carries out placements by agreement of all
expert ranks, with vLLM's own EPLB. Without `ROOST_AGENT` it changes nothing.
"""

__version__ = "0.1.0"


def register() -> None:
    """Entry point of `vllm.general_plugins`: called in every process of vLLM, before it makes any object. A
    wrong setting is logged, and does not end vLLM."""
    import logging
    import os

    from roost_vllm.settings import Settings, from_environment

    try:
        settings = from_environment(os.environ)
    except ValueError as error:
        logging.getLogger("vllm.roost").warning("roost: %s; vLLM starts without placements", error)
        settings = Settings("", 0, b"", fault=str(error))
    if settings is None:
        return
    from roost_vllm.hooks import install

    install(settings)
