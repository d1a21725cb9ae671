"""What does the server say? Metrics, logs and the progress of a start.

Runs in the front end; `collector`, `counters` and `logs` also run in a follower.

    metrics               every metric, as data
    collector, counters   makes them from the status of the server; what the front end counts
    exposition            one page of Prometheus text for ours and vLLM's
    vllm_gauges, routing  vLLM's gauges of load as we export them; the page that routers read
    load, loop_lag        how loaded is the server? how late is its event loop?
    key_usage             how much has each key used?
    progress, logs        what a start is doing; how our loggers write
"""
