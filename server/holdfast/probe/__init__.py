"""Is the worst case served? The suite of requests here decides whether the server is READY.

Runs in the front end, as a client of its own listener. `suite` names the steps. A step (in
`contexts`, `batches`, `decodes`, `baseline`, `first_uses`) takes its sizes from `sizes` and
`decode_sizes`, asks `budget` whether it may try them, and sends through `session` and `client`.
Only the ranks' own stats, read by `measure`, prove what it did.
"""

from holdfast.probe.journal import ProbeJournal, ProbeJournals
from holdfast.probe.session import ProbeTimeouts
from holdfast.probe.suite import Prober

__all__ = ["ProbeJournal", "ProbeJournals", "ProbeTimeouts", "Prober"]
