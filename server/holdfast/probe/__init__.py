"""Is the worst case served? The suite of requests that decides whether READY may be said.

Runs in the front end, as a client of its own listener. `suite` names the steps. A step (in
`contexts`, `batches`, `decodes`, `first_uses`) takes its sizes from `sizes`, asks `budget` whether
it may try them, sends through `session` and `client`, and is believed only for what the ranks' own
stats show, read by `measure`.
"""

from holdfast.probe.journal import ProbeJournal
from holdfast.probe.session import Patience
from holdfast.probe.suite import Prober

__all__ = ["Patience", "ProbeJournal", "Prober"]
