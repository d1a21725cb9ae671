"""Is the worst case served? The suite of requests here decides whether the server is READY.

Runs in the front end, as a client of its own listener. Only the ranks' own stats prove what a step
did.

    suite                runs the steps by name, and reports
    contexts             steps of one prompt: the first answer, and contexts up to the longest
    batches, decodes     steps of many prompts; of requests that decode together
    first_uses           steps of what only some requests use
    baseline             the step that compares with a recorded baseline
    sizes, decode_sizes  the sizes that steps try
    budget, journal      may this size be tried? which sizes took the machine down?
    session, client      composes requests and checks answers; sends them to our own listener
    measure              what did the engine do?
"""

from holdfast.probe.journal import ProbeJournal, ProbeJournals
from holdfast.probe.session import ProbeTimeouts
from holdfast.probe.suite import Prober

__all__ = ["ProbeJournal", "ProbeJournals", "ProbeTimeouts", "Prober"]
