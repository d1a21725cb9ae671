"""Is the worst case served? The suite of requests that decides whether READY may be said.

`prober` runs the steps that `steps` names. A step (in `contexts`, `batches`, `decodes`) takes its
sizes from `sizes`, asks `budget` whether it may try them, sends through `bench` and `wire`, and is
believed only for what the ranks' own stats show, read by `measure`.
"""

from holdfast.lifecycle.probe.bench import Patience
from holdfast.lifecycle.probe.journal import ProbeJournal
from holdfast.lifecycle.probe.prober import Prober

__all__ = ["Patience", "ProbeJournal", "Prober"]
