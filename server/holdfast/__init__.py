"""Holdfast: an OpenAI-compatible server around vLLM whose green light is true.

Three flows cross these packages:

1. start    cli -> settings -> app (listening, gate closed) -> lifecycle.supervisor
            -> engine.async_llm -> lifecycle.probe -> READY
2. request  api.gate -> vLLM's OpenAI routes -> engine.client (proxy) -> AsyncLLM
3. memory   workspace.plugin, in each worker -> workspace.stats (mmap)
            -> telemetry.collectors -> /metrics

Imports go one way: errors, settings, records, states, plan <- workspace, telemetry, engine
<- lifecycle <- api <- app <- cli. Only engine, workspace and demo import vLLM.
"""

__version__ = "0.1.0"
